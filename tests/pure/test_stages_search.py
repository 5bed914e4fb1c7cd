"""The dynamic program over stages and submeshes, beside brute force and Alpa's own instance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.inter_op.stage_prices import StagePrices, Submesh
from meshwright.planner.inter_op.stages import assign_stages
from tests.tries import tries

ANY = 99
"""More stages than there are."""


def brute_force(
    prices: StagePrices,
    pools: tuple[int, ...],
    microbatches: int,
    fill: float,
    possible: Callable[[Sequence[Submesh]], bool] = lambda _: True,
) -> float:
    """The least step over all cuts, all submeshes and all variants."""
    num, best = prices.num_layers, inf
    ways = list(itertools.product(range(len(prices.submeshes)), range(prices.seconds.shape[3])))
    once = np.zeros_like(prices.seconds) if prices.once is None else prices.once
    for count in range(1, num + 1):
        for cut in itertools.combinations(range(1, num), count - 1):
            borders = [0, *cut, num]
            for picked in itertools.product(ways, repeat=count):
                used = [0] * len(pools)
                for number, _ in picked:
                    for pool, devices in enumerate(prices.submeshes[number].counts):
                        used[pool] += devices
                cells = [(borders[place], borders[place + 1] - 1, *way) for place, way in enumerate(picked)]
                fits = all(prices.most_after[cell] >= count - 1 - place for place, cell in enumerate(cells))
                picked_meshes = [prices.submeshes[number] for number, _ in picked]
                if tuple(used) != pools or not fits or not possible(picked_meshes):
                    continue
                times = [float(prices.seconds[cell]) for cell in cells]
                if inf in times:
                    continue
                busy = max(
                    (microbatches - fill) * time + float(once[cell]) for time, cell in zip(times, cells, strict=True)
                )
                best = min(best, fill * sum(times) + busy)
    return best


def alone(pool: int, devices: int) -> Submesh:
    """Devices of one pool."""
    return Submesh((0,) * pool + (devices,))


@st.composite
def instances(draw: st.DrawFn) -> tuple[StagePrices, tuple[int, ...], int, float]:
    layers, variants = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    pools = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    sizes = [alone(pool, devices) for pool, most in enumerate(pools) for devices in (1, 2, 4) if devices <= most]
    if len(pools) > 1 and draw(st.booleans()):  # a stage on unlike devices
        sizes.append(Submesh((1, 1)))
    if len(pools) == 1 and draw(st.booleans()):  # stages of equally many devices
        sizes = [draw(st.sampled_from(sizes))]
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    seconds = random.random((layers, layers, len(sizes), variants))
    if draw(st.booleans()):  # as real stages: more layers take longer, more devices shorter
        work = 0.1 + random.random(layers)
        sums = np.array([[work[first : last + 1].sum() for last in range(layers)] for first in range(layers)])
        seconds = (
            0.2 * seconds + sums[:, :, None, None] / np.array([s.devices**0.9 for s in sizes])[None, None, :, None]
        )
    seconds[random.random(seconds.shape) < draw(st.sampled_from([0.0, 0.3]))] = inf
    after = random.integers(-1, layers + 1, seconds.shape) if draw(st.booleans()) else np.full(seconds.shape, ANY)
    fill = draw(st.sampled_from([1.0, 0.5, 1 / 3]))
    once = random.random(seconds.shape) * draw(st.sampled_from([0.1, 10.0])) if draw(st.booleans()) else None
    return StagePrices(tuple(sizes), seconds, after, once), pools, draw(st.sampled_from([1, 2, 8, 64])), fill


@given(instances())
@tries(50)
def test_equal_to_brute_force(instance: tuple[StagePrices, tuple[int, ...], int, float]) -> None:
    prices, pools, microbatches, fill = instance
    expected = brute_force(prices, pools, microbatches, fill)
    for prunes in (True, False):
        assignment = assign_stages(prices, pools, microbatches, fill=fill, prunes=prunes)
        if expected == inf:
            assert assignment is None
            continue
        assert assignment is not None
        assert assignment.step_s == pytest.approx(expected, rel=1e-9)
        times = [stage.seconds for stage in assignment.stages]
        once = [
            0.0 if prices.once is None else prices.once[stage.first, stage.last, stage.submesh, stage.variant]
            for stage in assignment.stages
        ]
        busy = max((microbatches - fill) * time + more for time, more in zip(times, once, strict=True))
        assert fill * sum(times) + busy == pytest.approx(assignment.step_s)
        borders = [(stage.first, stage.last) for stage in assignment.stages]
        assert [first for first, _ in borders] == [0, *(last + 1 for _, last in borders[:-1])]
        assert borders[-1][1] == prices.num_layers - 1
        for following, stage in enumerate(reversed(assignment.stages)):
            cell = stage.first, stage.last, stage.submesh, stage.variant
            assert prices.seconds[cell] == stage.seconds
            assert prices.most_after[cell] >= following


@given(instances(), st.sampled_from([1, 2, 3, 4]), st.booleans())
@tries(50)
def test_stages_in_the_order_of_ranks_equal_brute_force(
    instance: tuple[StagePrices, tuple[int, ...], int, float], box: int, in_order: bool
) -> None:
    """Stages take the ranks of their pool one after the other, and none crosses into a box that it does not fill."""
    prices, pools, microbatches, fill = instance

    def possible(picked: Sequence[Submesh]) -> bool:
        if any(submesh.joins for submesh in picked):
            return False
        order = [submesh.pool for submesh in picked]
        first = dict.fromkeys(order, 0)
        for submesh in picked:
            ranks = range(first[submesh.pool], first[submesh.pool] + submesh.devices)
            first[submesh.pool] = ranks.stop
            boxes = {rank // box for rank in ranks}
            if len(boxes) > 1 and len(boxes) * box != len(ranks):
                return False
        return not in_order or order == sorted(order)

    expected = brute_force(prices, pools, microbatches, fill, possible)
    for prunes in (True, False):
        assignment = assign_stages(
            prices, pools, microbatches, fill=fill, prunes=prunes, boxes=[box] * len(pools), in_order=in_order
        )
        assert (assignment.step_s if assignment is not None else inf) == pytest.approx(expected, rel=1e-9)
        if assignment is not None:
            assert possible([prices.submeshes[stage.submesh] for stage in assignment.stages])


def alike(seconds: np.ndarray, sizes: tuple[int, ...] = (1, 2, 4, 8)) -> StagePrices:
    return StagePrices(tuple(Submesh((size,)) for size in sizes), seconds, np.full(seconds.shape, ANY))


def layered(layers: int, sizes: tuple[int, ...], seed: int = 3, exponent: float = 0.92) -> StagePrices:
    """Layers of unlike work. On n devices, variant 0 divides the time by n**exponent; variant 1 scales
    worse, and adds a cost for each device."""
    work = 1 + np.random.RandomState(seed).rand(layers)
    work[0] *= 2.5
    work[-1] *= 3
    seconds = np.full((layers, layers, len(sizes), 2), inf)
    for (first, last), (number, size) in itertools.product(
        itertools.combinations_with_replacement(range(layers), 2), enumerate(sizes)
    ):
        total = work[first : last + 1].sum()
        seconds[first, last, number] = total / size**exponent, total / size ** (0.9 * exponent) + 0.02 * size
    return alike(seconds, sizes)


def tight(prices: StagePrices) -> StagePrices:
    """Memory for 4 layers on each device: a stage of many layers on few devices may have few stages after it."""
    after = np.full(prices.seconds.shape, -1)
    for (first, last), (number, submesh) in itertools.product(
        itertools.combinations_with_replacement(range(prices.num_layers), 2), enumerate(prices.submeshes)
    ):
        after[first, last, number] = 4 * submesh.devices // (last - first + 1) - 1
    return StagePrices(prices.submeshes, prices.seconds, after)


SIZES = (1, 2, 4, 8)
GOLDEN = [
    # tests/pipeline_parallel/test_dynamic_programming.py of alpa-projects/alpa at b8078a9
    (alike(np.random.RandomState(42).rand(8, 8, 4, 5)), 8, 16, 0.29528505825705054, [(0, 3, 4, 2), (4, 7, 4, 4)]),
    (alike(np.random.RandomState(7).rand(8, 8, 4, 2)), 8, 1, 0.05312869067295756, [(0, 7, 8, 0)]),
    (alike(np.random.RandomState(7).rand(8, 8, 4, 2)), 8, 4, 0.21251476269183023, [(0, 7, 8, 0)]),
    (alike(np.random.RandomState(7).rand(8, 8, 4, 2)), 8, 64, 3.4002362030692836, [(0, 7, 8, 0)]),
    (layered(8, SIZES), 8, 16, 39.972890700997496, [(0, 7, 8, 0)]),
    (layered(12, SIZES), 16, 32, 56.99771020100653, [(0, 1, 4, 0), (2, 9, 8, 0), (10, 11, 4, 0)]),
    (tight(layered(8, SIZES, 11, 0.95)), 8, 16, 34.48281893506358, [(0, 7, 8, 0)]),
]
"""Instances, devices, micro-batches, least step, and its stages: (first layer, last layer, devices, variant). The
optima were found by a simpler program, which tries every limit on the slowest stage."""


@pytest.mark.parametrize(("prices", "devices", "microbatches", "step_s", "stages"), GOLDEN)
def test_known_optima(
    prices: StagePrices, devices: int, microbatches: int, step_s: float, stages: list[tuple[int, int, int, int]]
) -> None:
    assignment = assign_stages(prices, (devices,), microbatches)
    assert assignment is not None
    assert assignment.step_s == pytest.approx(step_s, rel=1e-12)
    assert [
        (stage.first, stage.last, prices.submeshes[stage.submesh].devices, stage.variant) for stage in assignment.stages
    ] == stages


def test_pruning_leaves_out_half_of_the_work() -> None:
    prices = layered(24, (1, 2, 4, 8))
    pruned, whole = (assign_stages(prices, (32,), 64, prunes=prunes) for prunes in (True, False))
    assert pruned is not None
    assert whole is not None
    assert pruned.step_s == pytest.approx(whole.step_s, rel=1e-12)
    assert pruned.entries < whole.entries / 2


def test_a_slow_pool_gets_fewer_layers() -> None:
    """Two boxes: the second computes at half the speed of the first, so its stage gets half as many layers."""
    layers = 12
    seconds = np.full((layers, layers, 2, 1), inf)
    for first, last in itertools.combinations_with_replacement(range(layers), 2):
        seconds[first, last, :, 0] = (last - first + 1), 2.0 * (last - first + 1)
    prices = StagePrices((alone(0, 8), alone(1, 8)), seconds, np.full(seconds.shape, ANY))
    assignment = assign_stages(prices, (8, 8), 64)
    assert assignment is not None
    assert sorted(stage.last - stage.first + 1 for stage in assignment.stages) == [4, 8]


def test_a_stage_may_join_unlike_devices() -> None:
    """12 fast devices, and 4 that are a quarter as fast: the slow ones alone would hold up the others, so they join 4
    fast devices in a stage. Metis (2024) finds such stages on 12 A100 and 4 T4."""
    layers, submeshes = 10, [alone(0, count) for count in (4, 8, 12)] + [alone(1, 4), Submesh((4, 4))]
    seconds = np.full((layers, layers, len(submeshes), 1), inf)
    for (first, last), (number, submesh) in itertools.product(
        itertools.combinations_with_replacement(range(layers), 2), enumerate(submeshes)
    ):
        fast, slow = (*submesh.counts, 0)[:2]
        seconds[first, last, number] = (last - first + 1) / (fast + slow / 4)
    prices = StagePrices(tuple(submeshes), seconds, np.full(seconds.shape, ANY))
    assignment = assign_stages(prices, (12, 4), 8)
    assert assignment is not None
    assert {submeshes[stage.submesh].counts: stage.last - stage.first + 1 for stage in assignment.stages} == {
        (4, 4): 4, (8,): 6,
    }  # fmt: skip
    apart = StagePrices(tuple(submeshes[:4]), seconds[:, :, :4], prices.most_after[:, :, :4])
    separate = assign_stages(apart, (12, 4), 8)
    assert separate is not None
    assert assignment.step_s < separate.step_s


def test_what_a_stage_does_once_is_weighed_by_the_micro_batches() -> None:
    """The last layer is as fast as the others, but its update takes as long as four micro-batches of a layer."""
    layers = 6
    seconds = np.full((layers, layers, 1, 1), inf)
    once = np.zeros(seconds.shape)
    for first, last in itertools.combinations_with_replacement(range(layers), 2):
        seconds[first, last] = last - first + 1
        once[first, last] = 4.0 * (last == layers - 1)
    prices = StagePrices((Submesh((1,)),), seconds, np.full(seconds.shape, ANY), once)
    for microbatches, expected in ((3, [4, 2]), (100, [3, 3])):
        assignment = assign_stages(prices, (2,), microbatches)
        assert assignment is not None
        assert [stage.last - stage.first + 1 for stage in assignment.stages] == expected


def test_memory_limits_the_stages_that_follow() -> None:
    """Each stage keeps the activations of as many micro-batches as stages follow: here, none may follow two."""
    prices = layered(6, (1, 2, 4, 8))
    few = StagePrices(prices.submeshes, prices.seconds, np.full(prices.seconds.shape, 1))
    assignment = assign_stages(few, (8,), 1000)
    assert assignment is not None
    assert len(assignment.stages) <= 2
    assert (
        assign_stages(StagePrices(prices.submeshes, prices.seconds, np.full(prices.seconds.shape, -1)), (8,), 4) is None
    )
