"""Calibration: measures this machine's cores, alone and all at once, and what joins them; gives a cluster.

Every rank runs ``measure``, on one core each:

    alone     rank 0 measures, the others sleep: one thread, then all threads
    together  all ranks measure the same kernels at the same time: cores share caches, memory and power
    between   messages and collectives, by size

Each call is repeated for some milliseconds, and the median counts. With one thread its processor time is taken, which
does not run while somebody else has the core; how much longer it took by the clock is the spread, which tells of a busy
machine.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright.comm.backend  # noqa: F401 - gives the collective operators their kernels
from meshwright.comm.groups import axis_groups, broadcast_along, channels, from_every_rank, meet
from meshwright.comm.transport.base import Channel
from meshwright.ir.cluster import Calibration, Cluster, CollectiveTiming, Level, Operation
from meshwright.ir.device import Condition, Curve, Device, Kernels
from meshwright.ir.kind import COMPUTE
from meshwright.ir.mesh import AxisGroup, Mesh
from meshwright.ops import collectives
from meshwright.runtime import launch
from meshwright.runtime.machine import machine_name
from meshwright.runtime.probes import (
    DTYPES,
    Probe,
    compute_probes,
    flat_probes,
    kernel_probe,
    matmul_probes,
    memory_probes,
)

MAX_RANKS = 8
BUSY_SPREAD = 0.15
"""More than this, and somebody else is using the machine."""
BOX = "box"
TINY_S, TINY_CALLS = 2e-5, 50
"""Calls shorter than this are timed several at once, for a clock takes its time too."""


class Effort(msgspec.Struct, frozen=True):
    """How much is measured: seconds for each call, sides of matrix products, elements of vectors, bytes of messages."""

    probe_s: float = 0.012
    sides: tuple[int, ...] = (48, 128, 384, 896)
    flat_sides: tuple[int, ...] = (128, 512, 1536)
    elements: tuple[int, ...] = (2**14, 2**18, 2**21)
    scale: float = 1.0
    message_bytes: tuple[int, ...] = (64, 2**14, 2**18, 2**20, 2**23)
    repeats: int = 12


Advance = Callable[[str], None]
Call = Callable[[], object]
Seconds = dict[str, list[tuple[float, float]]]
"""By kind, (size, seconds of a call)."""


class Measured(msgspec.Struct):
    """What one condition gave: by kind, the dispatch of a kernel, the best FLOP/s of products by dtype; the bytes of
    square products and the FLOPs of flat ones; what all calls took of the processor, and by the clock."""

    seconds: Seconds = {}
    kernel_s: float = 0.0
    peaks: dict[str, float] = {}
    others: dict[tuple[str, float], float] = {}
    taken_s: float = 0.0
    passed_s: float = 0.0

    @property
    def spread(self) -> float:
        """How much longer calls took by the clock than they had the processor."""
        return max(0.0, self.passed_s / max(self.taken_s, 1e-9) - 1)


def num_ranks() -> int:
    """How many ranks ``measure`` wants."""
    return min(launch.num_cores(), MAX_RANKS)


def measure(effort: Effort, advance: Advance) -> Cluster | None:
    """Measure, on ranks of one machine that all call this; the cluster on rank 0, None elsewhere."""
    launch.start("cpu")
    torch.set_num_threads(1)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with torch.inference_mode():
        probes = list(_probes(effort))
        alone = threaded = None
        if rank == 0:
            alone = _measure(probes, effort.probe_s, lambda kind: advance(f"one core: {kind}"))
        meet()
        cores = launch.num_cores()
        if rank == 0 and cores > 1:
            torch.set_num_threads(cores)
            threaded = _measure(probes, effort.probe_s / 2, lambda kind: advance(f"{cores} threads: {kind}"))
            torch.set_num_threads(1)
        together = None
        if ranks > 1:
            meet()
            together = _measure(
                probes, effort.probe_s, lambda kind: advance(f"{ranks} cores at once: {kind}"), meets=True
            )
            together = _of_all(from_every_rank(together))
        timings = _between(effort, ranks, rank, advance) if ranks > 1 else []
    if alone is None:
        return None
    return made_cluster(alone, threaded, together, timings, ranks=ranks, cores=cores)


def _probes(effort: Effort) -> Iterable[tuple[str, Probe]]:
    """With the dtype of each; the largest product of every dtype but float32 is left out."""
    yield "", kernel_probe()
    for dtype in DTYPES:
        sides = effort.sides if dtype == "float32" else effort.sides[1:2]
        for probe in matmul_probes(dtype, sides):
            yield dtype, probe
    for probe in (*flat_probes(effort.flat_sides), *compute_probes(effort.scale), *memory_probes(effort.elements)):
        yield "float32", probe


def _measure(probes: list[tuple[str, Probe]], probe_s: float, show: Advance, *, meets: bool = False) -> Measured:
    found = Measured()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for dtype, probe in probes:
        show(probe.kind)
        if meets:
            meet()
        fast, taken, passed = repeated(probe.call, probe_s, clock)
        found.taken_s += taken
        found.passed_s += passed
        if probe.kind == "dispatch":
            found.kernel_s = fast
        elif probe.kind == "matmul":
            found.peaks[dtype] = max(found.peaks.get(dtype, 0.0), probe.size / fast)
        if probe.other:
            found.others[probe.kind, probe.size] = probe.other
        if probe.kind != "dispatch" and dtype == "float32":
            found.seconds.setdefault(probe.kind, []).append((probe.size, fast))
    return found


def repeated(call: Call, probe_s: float, clock: Callable[[], float]) -> tuple[float, float, float]:
    """The seconds of a call on ``clock``, the median of what ``probe_s`` hold; what they all took on it, and
    what they took by the wall's clock."""
    begin = time.perf_counter()
    call()
    several = 1 if time.perf_counter() - begin > TINY_S else TINY_CALLS
    seconds: list[float] = []
    begin, began = time.perf_counter(), clock()
    while len(seconds) < 4 or (time.perf_counter() < begin + probe_s and len(seconds) < 1000):
        start = clock()
        for _ in range(several):
            call()
        seconds.append((clock() - start) / several)
    taken, passed = clock() - began, time.perf_counter() - begin
    return statistics.median(seconds), taken, passed


def _of_all(ranks: list[Measured]) -> Measured:
    """The mean of what ranks measured at the same time."""
    first = ranks[0]
    seconds = {
        kind: [
            (size, statistics.fmean(one.seconds[kind][index][1] for one in ranks))
            for index, (size, _) in enumerate(points)
        ]
        for kind, points in first.seconds.items()
    }
    peaks = {dtype: statistics.fmean(one.peaks[dtype] for one in ranks) for dtype in first.peaks}
    return Measured(
        seconds=seconds, kernel_s=statistics.fmean(one.kernel_s for one in ranks), peaks=peaks, others=first.others
    )


# --- between ranks ---------------------------------------------------------------------------------------------------


def _between(effort: Effort, ranks: int, rank: int, advance: Advance) -> list[CollectiveTiming]:
    """Messages between neighbours and collectives of all ranks, and of two where there are more."""
    rows: list[CollectiveTiming] = []

    def timed(
        operation: Operation, algorithm: str, count: int, of_size: Callable[[int], Call], part: float = 1.0
    ) -> None:
        for size in effort.message_bytes:
            advance(f"{operation} of {size} bytes")
            seconds = _in_step(of_size(size), effort.repeats) * part
            rows.append(
                CollectiveTiming(
                    operation=operation, algorithm=algorithm, level=BOX, ranks=count, bytes=size, time_s=seconds
                )
            )

    if ranks % 2 == 0:
        timed("send", "channel", 2, partial(_ping_pong, channels([rank ^ 1])[rank ^ 1], rank % 2 == 0), part=0.5)
    groups = [axis_groups(Mesh.of(all=ranks), rank, {"all": "exchange" if ranks == 2 else "native"})["all"]]
    if ranks > 2 and ranks % 2 == 0:
        groups.append(axis_groups(Mesh.of(rest=ranks // 2, pair=2), rank, {"pair": "exchange"})["pair"])
    for group in groups:
        timed("all_gather", group.algorithm, group.size, partial(_all_gather, group))
        timed("reduce_scatter", group.algorithm, group.size, partial(_reduce_scatter, group))
        timed("broadcast", "native", group.size, partial(_broadcast, group))
        for algorithm in dict.fromkeys((group.algorithm, "native")):
            one = msgspec.structs.replace(group, algorithm=algorithm)
            timed("all_reduce", algorithm, group.size, partial(_all_reduce, one))
    return rows


def _buffer(num_bytes: int) -> Tensor:
    return torch.zeros(max(1, num_bytes // 4))


def _ping_pong(peer: Channel, first: bool, num_bytes: int) -> Call:
    value = _buffer(num_bytes)

    def call() -> None:
        for sends in (first, not first):
            (peer.send(value) if sends else peer.receive(value)).wait()

    return call


def _all_reduce(group: AxisGroup, num_bytes: int) -> Call:
    value = _buffer(num_bytes)
    return lambda: collectives.WAIT(collectives.ALL_REDUCE(value, "sum", group.name, group.algorithm))


def _all_gather(group: AxisGroup, num_bytes: int) -> Call:
    part = _buffer(num_bytes // group.size)
    return lambda: collectives.WAIT(collectives.ALL_GATHER(part, group.name, group.size, group.algorithm))


def _reduce_scatter(group: AxisGroup, num_bytes: int) -> Call:
    value = torch.zeros(group.size, max(1, num_bytes // 4 // group.size))
    return lambda: collectives.WAIT(collectives.REDUCE_SCATTER(value, "sum", group.name, group.size, group.algorithm))


def _broadcast(group: AxisGroup, num_bytes: int) -> Call:
    value = _buffer(num_bytes)
    return lambda: broadcast_along(value, group, 0)


def _in_step(call: Call, repeats: int) -> float:
    """The seconds of a call that all ranks make together, one after the other: each waits for the others by itself. The
    fastest of some counts, on the slowest rank."""
    call()
    meet()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    slowest: float = max(from_every_rank(min(found)))
    return slowest


# --- what came of it -------------------------------------------------------------------------------------------------


def made_cluster(
    alone: Measured,
    threaded: Measured | None,
    together: Measured | None,
    timings: list[CollectiveTiming],
    *,
    ranks: int,
    cores: int,
) -> Cluster:
    """The cluster file's contents: peaks are the best of anything that was measured, curves are fractions of them.

    What several threads do can only be told by the clock: on a busy machine it is left out.
    """
    alone = _without_operands(alone)
    peaks = dict(alone.peaks)
    flat = _flat(alone.seconds)
    rates = [_rate(size, seconds, alone.kernel_s) for kind, size, seconds in flat if kind in COMPUTE]
    peaks["float32"] = max([peaks["float32"], *rates])
    bandwidth = max(_rate(size, seconds, alone.kernel_s) for kind, size, seconds in flat if kind not in COMPUTE)
    conditions = []
    for found, threads, at_once in ((threaded, cores, 1), (together, 1, ranks)):
        found = _without_operands(found) if found is not None else None
        if found is not None and at_once > 1:
            found = _seldom_in_step(alone, found)
        if found is not None and not (threads > 1 and alone.spread > BUSY_SPREAD):
            conditions.append(
                Condition(
                    threads=threads,
                    ranks=at_once,
                    kernel_s=found.kernel_s,
                    efficiency=_curves(found, peaks["float32"] * threads, bandwidth * threads),
                )
            )
    name = machine_name()
    device = Device(
        name=name,
        kind="cpu",
        memory_bytes=launch.memory_bytes() // cores,
        memory_bandwidth_bytes_per_s=bandwidth,
        peak_flops_per_s=peaks,
        efficiency=_curves(alone, peaks["float32"], bandwidth),
        conditions=tuple(conditions),
        kernels=Kernels(processors=1, matmul_fraction=1.0, bandwidth_fraction=0.7, kernel_s=alone.kernel_s, launch_s=0),
        source="meshwright calibrate: the best rate of any kernel on one core",
    )
    levels: tuple[Level, ...] = ()
    if cores > 1:
        alpha, beta = _line([(row.bytes, row.time_s) for row in timings if row.operation == "send"])
        levels = (Level(name=BOX, fan_out=cores, alpha_s=alpha, beta_s_per_byte=beta, source="meshwright calibrate"),)
    return Cluster(
        name="this-machine",
        num_devices=cores,
        open_ended=cores > 1,
        source=f"meshwright calibrate on {name}",
        device=device,
        levels=levels,
        collectives=tuple(timings),
        calibration=Calibration(
            machine=name, torch=str(torch.__version__), time_s=round(time.time()), spread=round(alone.spread, 4)
        ),
    )


def _seldom_in_step(alone: Measured, together: Measured) -> Measured:
    """What a kernel takes while other ranks train too: the mean of alone and together. ``together`` all ranks run the
    same kernel at the same time, which hurts most; in a step their kernels differ, and only some want the memory."""
    seconds = {
        kind: [
            (size, (taken + dict(alone.seconds[kind])[size]) / 2 if size in dict(alone.seconds[kind]) else taken)
            for size, taken in points
        ]
        for kind, points in together.seconds.items()
    }
    return msgspec.structs.replace(together, seconds=seconds)


def _without_operands(found: Measured) -> Measured:
    """Products as multiplying and, besides, what their operands cost: flat ones tell the one, square ones the other."""
    if "operands" not in found.seconds:
        return found
    best = max(_rate(size, seconds, found.kernel_s) for size, seconds in found.seconds["matmul"])
    flat = [
        (size, max(seconds - found.others["operands", size] / best, 0.1 * seconds))
        for size, seconds in sorted(found.seconds["operands"])
    ]
    rates = [_rate(size, seconds, found.kernel_s) for size, seconds in flat]
    square = [
        (size, max(seconds - _at(found.others["matmul", size], flat, rates), 0.7 * seconds))
        for size, seconds in found.seconds["matmul"]
    ]
    return msgspec.structs.replace(found, seconds=found.seconds | {"operands": flat, "matmul": square})


def _at(num_bytes: float, flat: list[tuple[float, float]], rates: list[float]) -> float:
    """The seconds of operands, at the rate of the measured size nearest to theirs."""
    nearest = min(range(len(flat)), key=lambda index: abs(math.log(flat[index][0] / num_bytes)))
    return num_bytes / rates[nearest]


def _flat(seconds: Seconds) -> list[tuple[str, float, float]]:
    return [(kind, size, one) for kind, points in seconds.items() for size, one in points]


def _rate(size: float, seconds: float, kernel_s: float) -> float:
    """What a kernel does in a second, without its dispatch."""
    return size / max(seconds - kernel_s, 0.1 * seconds)


def _curves(found: Measured, peak: float, bandwidth: float) -> dict[str, Curve]:
    curves = {}
    for kind, points in found.seconds.items():
        best = peak if kind in COMPUTE else bandwidth
        curves[kind] = tuple(
            (float(size), min(1.0, float(f"{_rate(size, seconds, found.kernel_s) / best:.4g}")))
            for size, seconds in sorted(points)
        )
    return curves


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """α and β of messages: what the smallest takes, and the largest a byte beyond that."""
    if not points:
        return 30e-6, 3.65e-10
    (least, first), (most, last) = min(points), max(points)
    return first, max(1e-13, (last - first) / max(1.0, most - least))


def stale(cluster: Cluster, now_s: float, days: float = 30.0) -> str:
    """Why a calibration must be made again, or nothing."""
    found = cluster.calibration
    if found is None:
        return "it was not measured"
    if found.machine != machine_name():
        return f"it was measured on another machine, {found.machine}"
    if found.torch != str(torch.__version__):
        return f"it was measured with torch {found.torch}"
    age_days = (now_s - found.time_s) / 86400
    if not 0 <= math.floor(age_days) <= days:
        return f"it is {age_days:.0f} days old"
    return ""
