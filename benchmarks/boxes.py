"""Do collectives along levels reach their targets? Ranks in emulated boxes: pass or fail. `python -m benchmarks.boxes`.

Boxes are network namespaces joined by links of given rates (``emulation/network.py``; root, else nothing is
judged). The table that ``meshwright calibrate`` would write is measured in sweeps; after each, the algorithms run by
turns, so that what the machine drifts in minutes is in both.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from benchmarks.report import alone
from meshwright.bench.repeat import alternate
from meshwright.catalog import load_cluster
from meshwright.comm.groups import axis_groups, collectives
from meshwright.cost.collective import Group, Network
from meshwright.emulation.network import run_in_boxes, why_not
from meshwright.ir.cluster import Cluster, CollectiveTiming
from meshwright.ir.mesh import Mesh
from meshwright.ir.result import Check, Finding
from meshwright.ir.statistics import ratio
from meshwright.ops import collectives as operators
from meshwright.runtime import launch
from meshwright.runtime.between import OURS, MeasuredSizes, Places, boxes_of_world, sweeps
from meshwright.runtime.measured import levels_of
from meshwright.runtime.ranks import run_ranks
from meshwright.schedules.collectives.choice import NATIVE, candidates, chosen, in_pieces
from meshwright.schedules.collectives.hierarchy import equal_boxes

ROUNDS = 5
GBIT = 1e9
LARGE_BYTES = 2**26
FASTER, OF_THE_BOUND, OF_THE_BEST = 1.35, 1.10, 1.05
"""Than a ring that crosses boxes at every hop; what the slow link allows; the best of all algorithms."""
OFF, OFF_MEDIAN = 0.20, 0.10
BLOCK_S, MOST_STEPS = 0.05, 5000
"""Of a block of the fastest algorithm: ranks begin up to half a millisecond apart, which must not count."""
TURN_S = 0.1
"""Of all blocks of the fastest algorithm between two sweeps, of which there are at most ``ROUNDS``."""
SLOW = 10
"""PyTorch's own takes part where it does not take this many times as long as the fastest, by the first sweep."""
UNEQUAL = (GBIT, GBIT, GBIT / 2, GBIT / 4)
UNEQUAL_BYTES = 2**24
SWEEPS = 5
LINK_SIZES = MeasuredSizes(
    bytes=tuple(2**power for power in range(18, 27)), repeats=3, sweeps=1, operations=("all_reduce",)
)
LINK_PREDICTED_SIZES = msgspec.structs.replace(LINK_SIZES, bytes=LINK_SIZES.bytes[:-1], sweeps=SWEEPS)
LINK_PREDICTED = tuple(3 * 2**power for power in (18, 20, 22, 23))
UNEQUAL_SIZES = msgspec.structs.replace(LINK_SIZES, bytes=LINK_SIZES.bytes[:-2], sweeps=SWEEPS)
MEMORY_SIZES = msgspec.structs.replace(
    MeasuredSizes(), bytes=MeasuredSizes().bytes[:-1], sweeps=10 * SWEEPS, operations=("all_reduce",)
)
MEMORY_PREDICTED = tuple(3 * 2**power for power in (10, 13, 17, 19, 21, 23))
AGAIN = (2**15, 2**19, 2**21, 2**23)
"""Bytes that the table has: how far they are off when they are measured again is what the machine drifts."""


class BoxTimes(msgspec.Struct, frozen=True):
    """What ranks measured: the table; seconds by bytes and side, a figure a round; what the table says to take, and
    that it takes, by bytes."""

    table: tuple[CollectiveTiming, ...]
    seconds: dict[int, dict[str, list[float]]]
    picked: dict[int, str]
    predicted: dict[int, dict[str, float]]


# --- on every rank ---------------------------------------------------------------------------------------------------


def measure(table: MeasuredSizes, sizes: Sequence[int], crossing: bool) -> BoxTimes:
    """The table; and by turns, after each of its sweeps, every algorithm that may be taken, at other sizes; or,
    where ``crossing``, what is picked and a ring that leaves its box at every hop, ``ROUNDS`` times."""
    torch.set_num_threads(1)
    launch.start("cpu")
    with torch.inference_mode():
        places = boxes_of_world()
        group = Group(dist.get_world_size())
        turns: dict[int, Callable[[], dict[str, list[float]]]] = {}
        seconds: dict[int, dict[str, list[float]]] = {num_bytes: {} for num_bytes in sizes}
        rows, picked, predicted = [], {}, {}  # as they are after the last sweep
        for rows in sweeps(table, places, lambda what: None):
            network = Network(known(rows, places.num_boxes, places.each))
            picked = {size: chosen(network.algorithms(group), "all_reduce", size) for size in sizes}
            predicted = {size: _predicted(network, group, _names(places, size), size) for size in sizes}
            for size in sizes:
                if size not in turns:
                    fastest_s = min(predicted[size].values())
                    sides = _crossing(picked[size], size) if crossing else _all(predicted[size], size)
                    steps = max(1, min(MOST_STEPS, round(BLOCK_S / fastest_s)))
                    rounds = ROUNDS if crossing else max(1, min(ROUNDS, round(TURN_S / (steps * fastest_s))))
                    turns[size] = partial(alternate, sides, rounds=rounds, steps=steps, warmup_steps=1)
                for name, side_s in turns[size]().items():
                    seconds[size].setdefault(name, []).extend(side_s)
    return BoxTimes(tuple(rows), seconds, picked, predicted)


def _predicted(network: Network, group: Group, names: Sequence[str], num_bytes: int) -> dict[str, float]:
    times = {name: network.measured_s("all_reduce", name, num_bytes, group) for name in names}
    return {name: time_s for name, time_s in times.items() if time_s is not None}


def known(rows: list[CollectiveTiming], boxes: int, each: int, base: Cluster | None = None) -> Cluster:
    """The cluster that these rows tell of, with the device of ``base``."""
    base = base or load_cluster("cpu-local")
    levels = levels_of(rows, each, boxes)
    return msgspec.structs.replace(
        base, name="emulated", num_devices=each * boxes, levels=levels, collectives=tuple(rows)
    )


def _names(places: Places, num_bytes: int) -> list[str]:
    boxes, each = places
    names = candidates("all_reduce", boxes * each, equal_boxes((each, boxes)) if boxes > 1 and each > 1 else "")
    return [name for name in names if num_bytes >= 2**20 or not in_pieces(name)]


def _all(predicted: dict[str, float], num_bytes: int) -> dict[str, Callable[[], object]]:
    """Predicted algorithms, but PyTorch's own where it is ``SLOW``, by the operators that a training step calls."""
    names = [name for name, time_s in predicted.items() if name != NATIVE or time_s < SLOW * min(predicted.values())]
    group = axis_groups(Mesh.of(all=dist.get_world_size()), dist.get_rank(), {"all": OURS})["all"]
    value = torch.zeros(num_bytes // 4)

    def call(name: str) -> object:
        return operators.WAIT(operators.ALL_REDUCE(value, "sum", group.name, name))

    return {name: partial(call, name) for name in names}


def _crossing(picked: str, num_bytes: int) -> dict[str, Callable[[], object]]:
    """The pick, and a flat ring whose every hop leaves the box: ranks of the two boxes by turns."""
    world, half = dist.group.WORLD, dist.get_world_size() // 2
    assert world is not None
    turns = [rank for pair in zip(range(half), range(half, 2 * half), strict=True) for rank in pair]
    ring = dist.new_group(turns, sort_ranks=False)
    assert dist.get_process_group_ranks(ring) == turns
    return {picked: _call(world, picked, num_bytes), "flat ring": _call(ring, "ring", num_bytes)}


def _call(group: dist.ProcessGroup, name: str, num_bytes: int) -> Callable[[], object]:
    value = torch.zeros(num_bytes // 4)
    ours = collectives(group)
    value.fill_(dist.get_rank() + 1)
    ours.all_reduce(value, "sum", name).wait()
    expected = sum(range(1, dist.get_world_size() + 1))
    if not bool((value == expected).all()):
        raise AssertionError(f"{name} gives {value.min()} to {value.max()} instead of {expected}")
    value.fill_(0)
    return lambda: ours.all_reduce(value, "sum", name).wait()


# --- judged ----------------------------------------------------------------------------------------------------------


def two_boxes() -> list[Finding]:
    """2 boxes of 2, 1 Gbit/s: against the ring and the bound, and as predicted."""
    measured = _in_boxes((0, 0, 1, 1), (GBIT, GBIT), LINK_SIZES, (LARGE_BYTES,), crossing=True)
    seconds, pick = measured.seconds[LARGE_BYTES], measured.picked[LARGE_BYTES]
    name = "2 boxes x 2 ranks, emulated 1 Gbit/s, 64 MiB"
    pick_s, ring = (statistics.median(seconds[side]) for side in (pick, "flat ring"))
    bound_s = 8 * LARGE_BYTES / GBIT
    results = [
        _check(
            f"{name}: a flat ring that leaves its box at every hop takes at least {FASTER} x as long",
            ring >= FASTER * pick_s,
            f"{ratio(seconds['flat ring'], seconds[pick])}, by {pick}",
        ),
        _check(
            f"{name}: at most {OF_THE_BOUND:g} x what the link takes for the bytes that must cross it",
            pick_s <= OF_THE_BOUND * bound_s,
            f"{pick_s / bound_s:.3f}",
        ),
        _check(f"{name}: picked unaided, an algorithm along levels", "@2x2" in pick, pick),
    ]
    measured = _in_boxes((0, 0, 1, 1), (GBIT, GBIT), LINK_PREDICTED_SIZES, LINK_PREDICTED)
    return [*results, predicted("2 boxes x 2 ranks, emulated 1 Gbit/s", measured)]


def four_boxes() -> list[Finding]:
    """4 boxes whose links are unequal: is the pick the best?"""
    measured = _in_boxes((0, 1, 2, 3), UNEQUAL, UNEQUAL_SIZES, (UNEQUAL_BYTES,))
    seconds, pick = measured.seconds[UNEQUAL_BYTES], measured.picked[UNEQUAL_BYTES]
    medians = {side: statistics.median(each) for side, each in seconds.items()}
    best = min(medians, key=medians.__getitem__)
    times = ", ".join(
        f"{side} {value / medians[best]:.3f}" for side, value in sorted(medians.items(), key=lambda pair: pair[1])
    )
    rates = ", ".join(f"{rate / GBIT:g}" for rate in UNEQUAL)
    return [
        _check(
            f"4 boxes, emulated links of {rates} Gbit/s, 16 MiB: the pick is within 5 % of the best",
            medians[pick] <= OF_THE_BEST * medians[best],
            f"{medians[pick] / medians[best]:.3f}, by {pick}; over the best: {times}",
        )
    ]


def in_one_box() -> list[Finding]:
    """2 ranks that share memory, as predicted."""
    sizes = (*MEMORY_PREDICTED, *AGAIN)
    with tempfile.TemporaryDirectory() as name:
        measured = run_ranks(measure, MEMORY_SIZES, sizes, False, num_ranks=2, directory=Path(name))
    again = statistics.median(map(abs, _off(measured, AGAIN).values()))
    return [predicted("2 ranks of one box", measured, f"; sizes of the table, measured again: median {again:.1%}")]


def _off(measured: BoxTimes, sizes: Sequence[int]) -> dict[tuple[str, int], float]:
    """How far the table's times are from what was measured, by our algorithms and by bytes."""
    return {
        (name, num_bytes): measured.predicted[num_bytes][name] / statistics.median(each) - 1
        for num_bytes in sizes
        for name, each in measured.seconds[num_bytes].items()
        if name != NATIVE and name in measured.predicted[num_bytes]
    }


def predicted(where: str, measured: BoxTimes, beside: str = "") -> Finding:
    """The table's times, at sizes that it does not have."""
    off = _off(measured, [size for size in measured.seconds if size not in AGAIN])
    worst = max(off, key=lambda key: abs(off[key]))
    median = statistics.median(map(abs, off.values()))
    inside = sum(abs(error) <= OFF for error in off.values())
    return Check(
        target=f"{where}: times predicted from the table within {OFF:.0%} of measured, median {OFF_MEDIAN:.0%}",
        verdict="pass" if inside == len(off) and median <= OFF_MEDIAN else "fail",
        measured=f"median {median:.1%}, worst {off[worst]:+.1%} ({worst[0]}, {worst[1]} bytes){beside}",
        passed=inside,
        total=len(off),
        notes={"off": {f"{name}, {num_bytes}": round(value, 4) for (name, num_bytes), value in off.items()}},
    )


def _check(target: str, right: bool, measured: str) -> Check:
    """A target that waits for links, not for cores: judged by ratios though ranks share the cores."""
    return Check(
        target=target, verdict="pass" if right else "fail", measured=measured, passed=int(right), total=1
    )  # fmt: skip


def _in_boxes(
    boxes: tuple[int, ...],
    rates: tuple[float, ...],
    table: MeasuredSizes,
    sizes: Sequence[int],
    *,
    crossing: bool = False,
) -> BoxTimes:
    with tempfile.TemporaryDirectory() as name:
        return run_in_boxes(
            measure, table, tuple(sizes), crossing, boxes=boxes, rates_bits_per_s=rates, directory=Path(name)
        )


def findings() -> list[Finding]:
    """All targets."""
    results = in_one_box()
    if missing := why_not():
        return [*results, Check(target="emulated boxes", verdict="reported", measured=f"not measured: {missing}")]
    return [*results, *two_boxes(), *four_boxes()]


PARTS = {"memory": in_one_box, "two": two_boxes, "four": four_boxes}


def main() -> int:
    """Measure and print; names on the command line are of ``PARTS``."""
    if not sys.argv[1:]:
        return alone(findings())
    return max(alone(PARTS[part]()) for part in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
