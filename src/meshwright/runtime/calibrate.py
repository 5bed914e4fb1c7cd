"""Calibration: measures this machine's cores, alone and all at once, and what joins them; gives a cluster.

Every rank runs ``measure``, on one core each:

    alone     rank 0 measures, the others sleep: one thread, then all threads
    together  all ranks measure the same kernels at the same time: cores share caches, memory and power
    between   messages and collectives, by size

Each call is repeated for some milliseconds, and the quarter of the fastest calls counts: others who use the machine now
and then do not matter, and who uses it all the time is told of by the spread.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright.comm.backend  # noqa: F401 - gives the collective operators their kernels
from meshwright.comm.groups import axis_groups, broadcast_along, channel, from_every_rank, meet
from meshwright.ir.cluster import Calibration, Cluster, CollectiveTiming, Level
from meshwright.ir.device import Condition, Curve, Device, Kernels
from meshwright.ir.kind import COMPUTE
from meshwright.ir.mesh import AxisGroup, Mesh
from meshwright.ops import collectives
from meshwright.runtime import launch
from meshwright.runtime.machine import machine_name
from meshwright.runtime.probes import DTYPES, Probe, compute_probes, kernel_probe, matmul_probes, memory_probes

MAX_RANKS = 8
BUSY_SPREAD = 0.15
"""More than this, and somebody else is using the machine."""
BOX = "box"


class Effort(msgspec.Struct, frozen=True):
    """How much is measured: seconds for each call, sides of matrix products, elements of vectors, bytes of messages."""

    probe_s: float = 0.012
    sides: tuple[int, ...] = (48, 128, 384, 896)
    elements: tuple[int, ...] = (2**14, 2**18, 2**21)
    scale: float = 1.0
    message_bytes: tuple[int, ...] = (64, 2**14, 2**18, 2**20, 2**23)
    repeats: int = 8


Advance = Callable[[str], None]
Seconds = dict[str, list[tuple[float, float]]]
"""By kind, (size, seconds of a call)."""


class Measured(msgspec.Struct):
    """What one condition gave, and how the slower half of the calls compares with the fastest."""

    seconds: Seconds
    kernel_s: float
    peaks: dict[str, float]
    spreads: list[float]


def num_ranks() -> int:
    """How many ranks ``measure`` wants."""
    return min(launch.num_cores(), MAX_RANKS)


def measure(effort: Effort, advance: Advance) -> Cluster | None:
    """Measure, on ranks of one machine that all call this; the cluster on rank 0, None elsewhere."""
    launch.start("cpu")
    torch.set_num_threads(1)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with torch.inference_mode():
        _settle_allocator()
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


def _settle_allocator() -> None:
    """Let the allocator keep memory as it does after some steps of training: a large block that was given back once
    makes the C library take blocks up to that size from its heap, instead of new pages from the system each time."""
    torch.zeros(30 * 2**20, dtype=torch.uint8)


def _probes(effort: Effort) -> Iterable[tuple[str, Probe]]:
    """With the dtype of each; the largest product of every dtype but float32 is left out."""
    yield "", kernel_probe()
    for dtype in DTYPES:
        sides = effort.sides if dtype == "float32" else effort.sides[1:2]
        for probe in matmul_probes(dtype, sides):
            yield dtype, probe
    for probe in (*compute_probes(effort.scale), *memory_probes(effort.elements)):
        yield "float32", probe


def _measure(probes: list[tuple[str, Probe]], probe_s: float, show: Advance, *, meets: bool = False) -> Measured:
    found = Measured({}, 0.0, {}, [])
    for dtype, probe in probes:
        show(probe.kind)
        if meets:
            meet()
        fast, spread = repeated(probe.call, probe_s)
        if fast > 1e-4:
            found.spreads.append(spread)
        if probe.kind == "dispatch":
            found.kernel_s = fast
        elif probe.kind == "matmul":
            found.peaks[dtype] = max(found.peaks.get(dtype, 0.0), probe.size / fast)
        if probe.kind != "dispatch" and dtype == "float32":
            found.seconds.setdefault(probe.kind, []).append((probe.size, fast))
    return found


def repeated(call: Callable[[], object], probe_s: float) -> tuple[float, float]:
    """The seconds of a call, by the faster quarter of calls in ``probe_s``, and by how much the median is slower."""
    call()
    seconds: list[float] = []
    end = time.perf_counter() + probe_s
    while len(seconds) < 4 or (time.perf_counter() < end and len(seconds) < 1000):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    fast = seconds[len(seconds) // 4]
    return fast, statistics.median(seconds) / seconds[0] - 1


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
    return Measured(seconds, statistics.fmean(one.kernel_s for one in ranks), peaks, first.spreads)


# --- between ranks ---------------------------------------------------------------------------------------------------


def _between(effort: Effort, ranks: int, rank: int, advance: Advance) -> list[CollectiveTiming]:
    """Messages between neighbours and collectives of all ranks, and of two where there are more."""
    rows: list[CollectiveTiming] = []

    def timed(operation: str, algorithm: str, count: int, call: Callable[[int], object], of: float = 1.0) -> None:
        for size in effort.message_bytes:
            advance(f"{operation} of {size} bytes")
            seconds = _in_step(lambda size=size: call(size), effort.repeats)  # type: ignore[misc]
            rows.append(
                CollectiveTiming(
                    operation=operation, algorithm=algorithm, level=BOX, ranks=count, bytes=size, time_s=seconds * of
                )  # type: ignore[arg-type]
            )

    if ranks % 2 == 0:
        peer = channel(rank ^ 1)
        timed("send", "channel", 2, lambda size: _ping_pong(peer, rank % 2 == 0, _buffer(size)), of=0.5)
    groups = [axis_groups(Mesh.of(all=ranks), rank, {"all": "exchange" if ranks == 2 else "native"})["all"]]
    if ranks > 2 and ranks % 2 == 0:
        groups.append(axis_groups(Mesh.of(rest=ranks // 2, pair=2), rank, {"pair": "exchange"})["pair"])
    for group in groups:
        for algorithm in dict.fromkeys((group.algorithm, "native")):
            one = msgspec.structs.replace(group, algorithm=algorithm)
            timed("all_reduce", algorithm, one.size, lambda size, one=one: _all_reduce(one, _buffer(size)))  # type: ignore[misc]
            if algorithm == group.algorithm:
                timed("all_gather", algorithm, one.size, lambda size, one=one: _all_gather(one, size))  # type: ignore[misc]
                timed("reduce_scatter", algorithm, one.size, lambda size, one=one: _reduce_scatter(one, size))  # type: ignore[misc]
        timed("broadcast", "native", group.size, lambda size, one=group: broadcast_along(_buffer(size), one, 0))  # type: ignore[misc]
    return rows


def _buffer(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes // 4)


def _ping_pong(peer: object, first: bool, value: Tensor) -> None:
    for sends in (first, not first):
        if sends:
            peer.send(value).wait()  # type: ignore[attr-defined]
        else:
            peer.receive(value).wait()  # type: ignore[attr-defined]


def _all_reduce(group: AxisGroup, value: Tensor) -> None:
    collectives.WAIT(collectives.ALL_REDUCE(value, "sum", group.name, group.algorithm))


def _all_gather(group: AxisGroup, num_bytes: int) -> None:
    part = _buffer(max(4, num_bytes // group.size))
    collectives.WAIT(collectives.ALL_GATHER(part, group.name, group.size, group.algorithm))


def _reduce_scatter(group: AxisGroup, num_bytes: int) -> None:
    value = _buffer(num_bytes).view(group.size, -1)
    collectives.WAIT(collectives.REDUCE_SCATTER(value, "sum", group.name, group.size, group.algorithm))


def _in_step(call: Callable[[], object], repeats: int) -> float:
    """The seconds of a call that all ranks make together: the median over repeats of a few calls each."""
    for _ in range(2):
        call()
    meet()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    found.sort()
    slowest: float = max(from_every_rank(found[len(found) // 4]))
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
    """The cluster file's contents: peaks are the best of anything that was measured, curves are fractions of them."""
    peaks = {dtype: peak for dtype, peak in alone.peaks.items()}
    rates = [_rate(size, seconds, alone.kernel_s) for kind, size, seconds in _flat(alone.seconds) if kind in COMPUTE]
    peaks["float32"] = max([peaks["float32"], *rates])
    streams = [
        _rate(size, seconds, alone.kernel_s) for kind, size, seconds in _flat(alone.seconds) if kind not in COMPUTE
    ]
    bandwidth = max(streams)
    conditions = []
    for found, threads, at_once in ((threaded, cores, 1), (together, 1, ranks)):
        if found is not None:
            conditions.append(
                Condition(
                    threads=threads,
                    ranks=at_once,
                    kernel_s=found.kernel_s,
                    efficiency=_curves(found, peaks["float32"] * threads, bandwidth * threads),
                )
            )
    spread = statistics.median(alone.spreads) if alone.spreads else 0.0
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
    levels = ()
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
            machine=name, torch=str(torch.__version__), time_s=round(time.time()), spread=round(spread, 4)
        ),
    )


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
