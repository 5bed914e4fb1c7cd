"""Simulated collectives: alone they take what closed forms say; on shared links never less than the links allow."""

import math
from collections.abc import Callable, Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.alpha_beta import Hop, gamma_s_per_byte, steps_s
from meshwright.cost.collective import Group, Network
from meshwright.ir.cluster import Cluster
from meshwright.ir.device import Device
from meshwright.ir.level import Level
from meshwright.schedules.collectives.hierarchy import equal_boxes
from meshwright.schedules.collectives.operations import ALGORITHMS, all_reduce, build
from meshwright.simulate.collectives import alone_s, shared_s

ALPHA_S, BETA_S, GAMMA_S = 3e-6, 2e-9, 5e-10
PUBLISHED: Mapping[str, Callable[[int, float], float]] = {
    "star": lambda p, n: (p - 1) * (2 * ALPHA_S + 2 * n * BETA_S + n * GAMMA_S),
    "tree": lambda p, n: math.log2(p) * (2 * ALPHA_S + 2 * n * BETA_S + n * GAMMA_S),
    "butterfly": lambda p, n: math.log2(p) * (ALPHA_S + n * BETA_S + n * GAMMA_S),
    "rabenseifner": lambda p, n: 2 * math.log2(p) * ALPHA_S + (p - 1) / p * n * (2 * BETA_S + GAMMA_S),
    "ring": lambda p, n: 2 * (p - 1) * ALPHA_S + (p - 1) / p * n * (2 * BETA_S + GAMMA_S),
}
"""By algorithm, (ranks, bytes) to seconds on equal links: Thakur et al. 2005, Patarasuk and Yuan 2009."""

FLAT = {"all_reduce": ("star", "partitioned", "shares", "ring", "tree", "butterfly", "rabenseifner"),
        "reduce_scatter": ("star", "partitioned", "ring", "halving"),
        "all_gather": ("star", "partitioned", "ring", "halving"),
        "all_to_all": ("partitioned",)}  # fmt: skip
ACROSS = {"all_reduce": ("ring", "tree", "butterfly", "rabenseifner"), "reduce_scatter": ("star", "ring", "halving"),
          "all_gather": ("star", "ring", "halving"), "all_to_all": ()}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
@given(log=st.integers(1, 6), num_bytes=st.integers(1, 10**8))
def test_on_equal_links_closed_forms_are_those_that_were_published(name: str, log: int, num_bytes: int) -> None:
    seconds = steps_s("all_reduce", name, [Hop(2**log, ALPHA_S, BETA_S)], num_bytes, GAMMA_S)
    assert seconds == pytest.approx(PUBLISHED[name](2**log, num_bytes), rel=1e-12)


def _hops(logs: list[int], slower: list[tuple[float, float]]) -> list[Hop]:
    """Levels of a power of two units each, each slower than the one below it."""
    hops, ranks, alpha_s, beta_s = list[Hop](), 1, 1e-6, 1e-10
    for log, (latency, rate) in zip(logs, slower, strict=False):
        ranks, alpha_s, beta_s = ranks * 2**log, alpha_s * latency, beta_s * rate
        hops.append(Hop(ranks, alpha_s, beta_s))
    return hops


def _link(hops: list[Hop]) -> Callable[[int, int], tuple[str, float, float]]:
    def link(source: int, target: int) -> tuple[str, float, float]:
        at = next(at for at, hop in enumerate(hops) if source // hop.ranks == target // hop.ranks)
        return str(at), hops[at].alpha_s, hops[at].beta_s_per_byte

    return link


@pytest.mark.parametrize("operation", FLAT)
@given(
    logs=st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda logs: sum(logs) <= 4),
    slower=st.lists(st.tuples(st.floats(1, 30), st.floats(1, 30)), min_size=3, max_size=3),
    part=st.integers(1, 10**5),
    gamma_s=st.floats(0, 1e-10),
    data=st.data(),
)
def test_a_closed_form_is_the_simulation_without_contention(
    operation: str, logs: list[int], slower: list[tuple[float, float]], part: int, gamma_s: float, data: st.DataObject
) -> None:
    """In a box and across boxes, of sizes that divide. Where everyone sends to everyone at once, additions of what came
    inside of a box hide behind what is on its way between boxes: there the closed form is up to a tenth above."""
    hops = _hops(logs, slower)
    size = hops[-1].ranks
    levels = [f"{inside}+{across}@{equal_boxes([2**log for log in logs])}"
              for inside in ("star", "ring") for across in ACROSS[operation]]  # fmt: skip
    name = data.draw(st.sampled_from([*FLAT[operation], *(levels if len(logs) > 1 else ())]))
    seconds = steps_s(operation, name, hops, part * size, gamma_s)
    simulated = alone_s(build(operation, name, size, part * size), _link(hops), gamma_s)
    assert seconds is not None
    if len(logs) > 1 and (name == "shares" or (operation, name) == ("reduce_scatter", "star")):
        assert simulated * (1 - 1e-9) <= seconds <= 1.1 * simulated
    else:
        assert seconds == pytest.approx(simulated, rel=1e-9)


def test_what_has_no_closed_form_says_so() -> None:
    six, eight = ([Hop(ranks, ALPHA_S, BETA_S)] for ranks in (6, 8))
    assert steps_s("all_reduce", "butterfly", six, 1.0, 0.0) is None
    assert steps_s("all_reduce", "double-tree", eight, 1.0, 0.0) is None
    assert steps_s("all_reduce", "star+ring@2x4/8", eight, 1.0, 0.0) is None
    assert steps_s("all_reduce", "star+ring@2x2", eight, 1.0, 0.0) is None


@pytest.mark.parametrize("name", ["ring", "butterfly", "star+butterfly@4x2"])
def test_the_model_of_a_cluster_asks_the_closed_form_of_an_algorithm_that_was_not_measured(name: str) -> None:
    """Eight ranks of two boxes of four, one of which sends from each box at a time where it goes along levels."""
    cluster, num_bytes = _cluster(2, 4, links=4), 8 * 10**5
    gamma_s = gamma_s_per_byte(cluster.device)
    hops = [Hop(4, 1e-6, 1e-11), Hop(8, 1e-5, 1e-9)]
    seconds = Network(cluster).collective_s("all_reduce", num_bytes, Group(8), name)
    assert seconds - Network(cluster).start_s == pytest.approx(steps_s("all_reduce", name, hops, num_bytes, gamma_s))
    assert seconds != Network(cluster).collective_s("all_reduce", num_bytes, Group(8))


def _cluster(boxes: int, devices: int, links: int = 1) -> Cluster:
    inner = Level(name="box", fan_out=devices, alpha_s=1e-6, beta_s_per_byte=1e-11)
    outer = Level(name="rack", fan_out=boxes, alpha_s=1e-5, beta_s_per_byte=1e-9, links=links)
    device = Device(
        name="d",
        kind="gpu",
        peak_flops_per_s={"float32": 1e13},
        memory_bytes=10**10,
        memory_bandwidth_bytes_per_s=1e12,
    )
    return Cluster(name="c", num_devices=boxes * devices, device=device, levels=(inner, outer))


@given(num_bytes=st.integers(1, 10**7))
def test_on_links_that_nobody_shares_the_two_agree(num_bytes: int) -> None:
    """A butterfly of two boxes of one device: each sends one message at a time."""
    cluster = _cluster(2, 1)
    steps = all_reduce("butterfly", 2, num_bytes)
    alone = alone_s(steps, lambda source, target: ("rack", 1e-5, 1e-9), gamma_s_per_byte(cluster.device))
    assert shared_s(steps, cluster) == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("operation", ALGORITHMS)
@given(num_bytes=st.integers(0, 10**6))
def test_every_collective_ends(operation: str, num_bytes: int) -> None:
    for name in ALGORITHMS[operation]:
        assert shared_s(build(operation, name, 4, num_bytes), _cluster(2, 2)) >= 0


def test_what_shares_a_link_waits_for_it() -> None:
    """Four ranks of a box that send their quarters over one link take as long as one that sends all; over four links a
    quarter of it."""
    num_bytes, cluster = 10**8, _cluster(2, 4)
    steps = all_reduce("star+butterfly@4x2", 8, num_bytes)
    bound = num_bytes * 1e-9
    one_link_s, four_links_s = shared_s(steps, cluster), shared_s(steps, _cluster(2, 4, links=4))
    assert bound < one_link_s < 1.05 * bound
    assert bound / 4 < four_links_s < 1.15 * bound / 4


def test_levels_beat_a_ring_that_crosses_at_every_hop() -> None:
    """2 boxes of 2, 1 Gbit/s between boxes."""
    inner = Level(name="box", fan_out=2, alpha_s=1e-6, beta_s_per_byte=1e-10)
    outer = Level(name="net", fan_out=2, alpha_s=5e-5, beta_s_per_byte=8e-9)
    cluster = Cluster(name="c", num_devices=4, device=_cluster(1, 1).device, levels=(inner, outer))
    num_bytes = 64 * 2**20
    levels = shared_s(all_reduce("star+butterfly@2x2", 4, num_bytes), cluster)
    crossing = all_reduce("ring", 4, num_bytes)
    order = (0, 2, 1, 3)  # a ring in this order crosses boxes at every hop
    moved = tuple(
        tuple(msgspec.structs.replace(move, source=order[move.source], target=order[move.target]) for move in moves)
        for moves in crossing.rounds
    )
    flat = shared_s(msgspec.structs.replace(crossing, rounds=moved), cluster)
    assert flat > 1.35 * levels
    assert levels < 1.1 * num_bytes * 8e-9, "within 10 % of the bound of the slow link"
    assert math.isclose(flat, 3 * num_bytes * 8e-9, rel_tol=0.05)
