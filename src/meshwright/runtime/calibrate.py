"""Calibration: measures this machine's cores (one alone, and all at once) and the links between ranks, and makes a
cluster.

Every rank runs ``measure``, and each rank has one core:

    alone     rank 0 measures, the others sleep: one thread, then all threads
    together  all ranks measure the same kernels at about the same time: cores share caches, memory and power
    between   messages and collectives, by size (``runtime/between.py``)

A step seldom makes the same call twice in a row. Before a call is repeated, other calls have pushed its code and
operands out of the nearest caches. So a rank measures in laps: in each lap it makes every call once, from the largest
call to the smallest. Small calls then follow small calls, as in a step, and no call follows itself. In each of several
sweeps, every condition (one thread, all threads, all ranks) is measured for a few laps. The result is the mean of the
sweeps' medians, because the speed of the machine changes, and a step runs at all of its speeds. The drift is the
deviation between sweeps. Calls on one thread are timed in processor time, which stops while another process has the
core. The spread is the fraction by which they took longer on the wall clock; it is large on a busy machine.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.groups import from_every_rank, meet
from meshwright.compress.coder import coder_of
from meshwright.compress.stream import Stream, recode
from meshwright.compress.vector import decode, encoded
from meshwright.ir.cluster import Cluster, CodecTiming
from meshwright.ir.codec import CANDIDATES, LOSSLESS, Codec, codec_of
from meshwright.ir.kind import COMPUTE
from meshwright.runtime import launch
from meshwright.runtime.between import MeasuredSizes, between, boxes_of_world
from meshwright.runtime.measured import Measured, made_cluster
from meshwright.runtime.probes import (
    DTYPES,
    Probe,
    compute_probes,
    flat_probe,
    kernel_probe,
    matmul_probe,
    memory_probes,
)

MAX_RANKS = 8
SWEEPS = 4
FLOPS_PER_BYTE = 8.0
"""Approximate number of FLOPs of a matrix product that take as long as copying one byte. Only the order of calls
depends on it."""
CLOCK_CALLS = 21
"""Number of timed calls of an empty function. The median of their times is the time that reading the clock takes."""
LEAST_S = 1e-8
"""Lower limit on the measured seconds of a call, because a coarse clock may measure 0."""


class Effort(msgspec.Struct, frozen=True):
    """How much to measure: ``laps`` in each sweep, and the sizes of the calls.

    Matrix products have square matrices with ``sides`` rows. Products of a few rows have square weights with
    ``flat_sides`` rows. Operators that are bound by memory have tensors with these numbers of ``elements``. ``scale``
    multiplies the sequence lengths and image sides of attention and convolutions. ``between`` holds the sizes of
    messages and collectives.
    """

    laps: int = 4
    sides: tuple[int, ...] = (48, 128, 384, 896)
    flat_sides: tuple[int, ...] = (128, 512, 1536)
    elements: tuple[int, ...] = (2**14, 2**18, 2**21)
    scale: float = 1.0
    between: MeasuredSizes = MeasuredSizes()


CODEC_ELEMENTS = 2**20
"""Elements of the vector with which codecs are measured."""
Advance = Callable[[str], None]
Call = Callable[[], object]


def num_ranks() -> int:
    """The number of ranks that should run ``measure``."""
    return min(launch.num_cores(), MAX_RANKS)


def measure(effort: Effort, advance: Advance) -> Cluster | None:
    """Measure cores and links; return the cluster on rank 0, and None on other ranks. Every rank must call this.
    ``advance`` is called with a text before each measurement. Raise a LaunchError if ``boxes_of_world`` does."""
    launch.start("cpu")
    torch.set_num_threads(1)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    cores = launch.num_cores()
    with torch.inference_mode():
        probes = list(_probes(effort))
        alone, threaded, together = (Sweeps(probes, effort.laps) for _ in range(3))
        for sweep in range(SWEEPS):
            turn = f"sweep {sweep + 1} of {SWEEPS}"
            if rank == 0:
                advance(f"one core, {turn}")
                alone.add()
                if cores > 1:
                    advance(f"{cores} threads, {turn}")
                    torch.set_num_threads(cores)
                    threaded.add()
                    torch.set_num_threads(1)
            meet()
            if ranks > 1:
                advance(f"{ranks} cores at once, {turn}")
                together.add(meets=True)
                meet()
        at_once = _of_all(from_every_rank(together.measured())) if ranks > 1 else None
        places = boxes_of_world()
        timings = between(effort.between, places, advance) if ranks > 1 else []
    if rank != 0:
        return None
    advance("codecs")
    codecs = codec_timings(effort.laps)
    inside, across = places.each, places.num_boxes
    cluster = made_cluster(
        alone.measured(), threaded.measured() if cores > 1 else None, at_once, timings, ranks=inside,
        cores=cores if across == 1 else inside, boxes=across,
    )  # fmt: skip
    return msgspec.structs.replace(cluster, codecs=codecs)


def codec_timings(laps: int) -> tuple[CodecTiming, ...]:
    """The seconds per byte that one core takes to encode and to decode, for each codec that the planner may choose.
    ``lossless`` is measured only if zstandard is installed."""
    values = torch.randn(CODEC_ELEMENTS, generator=torch.Generator().manual_seed(0))
    into, timings = torch.empty_like(values), []
    for text in (*CANDIDATES, *[LOSSLESS] * bool(find_spec("zstandard"))):
        codec = codec_of(text)
        kind = _selection if codec.select else _compression if codec.lossless else _chunks
        calls = kind(values, into, codec)
        for call in calls:  # the first call allocates memory
            call()
        taken = [[timed(call, time.thread_time)[0] for call in calls] for _ in range(laps)]
        medians = [statistics.median(side) / values.nbytes for side in zip(*taken, strict=True)]
        timings.append(CodecTiming(codec=text, encode_s_per_byte=medians[0], decode_s_per_byte=medians[1]))
    return tuple(timings)


def _selection(values: Tensor, into: Tensor, codec: Codec) -> tuple[Call, Call]:
    stream = Stream.select(values, codec)
    return lambda: recode(Stream.select(values, codec), codec, 0), lambda: stream.add_to(into)


def _compression(values: Tensor, into: Tensor, codec: Codec) -> tuple[Call, Call]:
    coder = coder_of(codec, values.dtype)
    message = torch.empty(coder.num_bytes(values.numel()), dtype=torch.uint8)
    size = coder.encode(values, message, 0)
    return lambda: coder.encode(values, message, 0), lambda: coder.decode(message[:size], into, add=False)


def _chunks(values: Tensor, into: Tensor, codec: Codec) -> tuple[Call, Call]:
    coder = coder_of(codec, values.dtype)
    message = encoded(coder, values, 0)
    return lambda: encoded(coder, values, 0), lambda: decode(coder, message, into)


def _probes(effort: Effort) -> Iterable[tuple[str, Probe]]:
    """The probes to measure, each with its dtype. Products in float32 are measured with all ``sides``, products in
    other dtypes with ``sides[1]``."""
    yield "", kernel_probe()
    for dtype in DTYPES:
        for side in effort.sides if dtype == "float32" else effort.sides[1:2]:
            yield dtype, matmul_probe(side, dtype)
    flat = map(flat_probe, effort.flat_sides)
    for probe in (*flat, *compute_probes(effort.scale), *memory_probes(effort.elements)):
        yield "float32", probe


class Sweeps:
    """The seconds of calls under one condition, sweep by sweep."""

    def __init__(self, probes: list[tuple[str, Probe]], laps: int) -> None:
        self._probes = sorted(probes, key=lambda probe: -_length(probe[1]))
        self._laps = laps
        self._medians: list[list[float]] = [[] for _ in probes]
        self._taken_s = self._passed_s = 0.0

    def add(self, *, meets: bool = False) -> None:
        """Add a sweep: in each lap, time every call once. ``meets``: all ranks start each lap at the same time."""
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        seconds: list[list[float]] = [[] for _ in self._probes]
        of_clock_s = statistics.median(timed(_nothing, clock)[0] for _ in range(CLOCK_CALLS))
        for _ in range(self._laps):
            if meets:
                meet()
            for (_, probe), taken_s in zip(self._probes, seconds, strict=True):
                taken, passed = timed(probe.call, clock)
                taken_s.append(max(taken - of_clock_s, LEAST_S))
                self._taken_s += taken
                self._passed_s += passed
        for medians, taken_s in zip(self._medians, seconds, strict=True):
            medians.append(statistics.median(taken_s))

    def measured(self) -> Measured:
        """For every call, the mean over sweeps of its median seconds; for all calls together, the drift."""
        measured = Measured(taken_s=self._taken_s, passed_s=self._passed_s)
        for (dtype, probe), medians in zip(self._probes, self._medians, strict=True):
            seconds = statistics.fmean(medians)
            if probe.kind == "dispatch":
                measured.kernel_s = seconds
            elif probe.kind == "matmul":
                measured.peaks[dtype] = max(measured.peaks.get(dtype, 0.0), probe.size / seconds)
            if probe.kind != "dispatch" and dtype == "float32":
                if probe.other:
                    measured.others[probe.kind, probe.size] = probe.other
                measured.seconds.setdefault(probe.kind, []).append((probe.size, seconds))
        deviations = (statistics.stdev(medians) / statistics.fmean(medians) for medians in self._medians)
        measured.drift = statistics.median(deviations)
        return measured


def _length(probe: Probe) -> float:
    """The approximate time of a call, relative to other calls. All ranks make their longest calls first."""
    return probe.size / FLOPS_PER_BYTE if probe.kind in COMPUTE else probe.size


def _nothing() -> None:
    pass


def timed(call: Call, clock: Callable[[], float]) -> tuple[float, float]:
    """The seconds of a call on ``clock``, and on the wall clock."""
    begin, began = time.perf_counter(), clock()
    call()
    return clock() - began, time.perf_counter() - begin


def _of_all(ranks: list[Measured]) -> Measured:
    """The means of the measurements of ranks that measured at the same time, and the largest drift of any rank."""
    first = ranks[0]
    seconds = {
        kind: [
            (size, statistics.fmean(rank.seconds[kind][index][1] for rank in ranks))
            for index, (size, _) in enumerate(points)
        ]
        for kind, points in first.seconds.items()
    }
    peaks = {dtype: statistics.fmean(rank.peaks[dtype] for rank in ranks) for dtype in first.peaks}
    return Measured(
        seconds=seconds, kernel_s=statistics.fmean(rank.kernel_s for rank in ranks), peaks=peaks, others=first.others,
        drift=max(rank.drift for rank in ranks),
    )  # fmt: skip
