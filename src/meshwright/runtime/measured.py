"""The measurements of a calibration, and the cluster file that is made from them."""

import math
import time

import msgspec
import torch

from meshwright.ir.cluster import NETWORK, Calibration, Cluster, CollectiveTiming
from meshwright.ir.device import Condition, Curve, Device, Kernels
from meshwright.ir.kind import COMPUTE, KINDS, OPERANDS
from meshwright.ir.level import Level
from meshwright.runtime.machine import machine_name
from meshwright.runtime.memory import memory_bytes

BUSY_SPREAD = 0.15
"""A ``spread`` above this means that other programs use the machine."""
BOX = "box"
DEFAULT_LINE = (30e-6, 3.65e-10)
"""α and β of a level that was not measured. They come from gloo (torch 2.13) on another machine."""

Seconds = dict[str, list[tuple[float, float]]]
"""Maps a kind of operator to a list of (size of a call, seconds of the call)."""


class Measured(msgspec.Struct):
    """Measurements under one condition: on one core alone, with several threads, or on all cores at once."""

    seconds: Seconds = {}
    kernel_s: float = 0.0
    """Seconds to dispatch a kernel."""
    peaks: dict[str, float] = {}
    """Maps a dtype to the best FLOP/s of matrix products."""
    others: dict[tuple[str, float], float] = {}
    """Maps the kind and size of a matrix product or convolution to its other size. If the size is FLOPs, the other size
    is bytes; if the size is bytes, it is FLOPs."""
    taken_s: float = 0.0
    """Seconds of all calls on the clock that timed them: processor time on one thread, wall-clock time on several."""
    passed_s: float = 0.0
    """Wall-clock seconds of all calls."""
    drift: float = 0.0
    """The standard deviation of a call's time over sweeps, as a fraction of its mean: the median of this number over
    all calls."""

    @property
    def spread(self) -> float:
        """How long calls on one thread waited for a processor: wall-clock time over processor time, minus 1."""
        return max(0.0, self.passed_s / max(self.taken_s, 1e-9) - 1)


def made_cluster(
    alone: Measured,
    threaded: Measured | None,
    together: Measured | None,
    timings: list[CollectiveTiming],
    *,
    ranks: int,
    cores: int,
    boxes: int = 1,
) -> Cluster:
    """Make a cluster from measurements. Peaks are the best measured rates, and curves are fractions of the peaks. Each
    of the ``boxes`` has ``cores`` cores; ``ranks`` ranks took part in each box.

    Calls with several threads are timed by the wall clock, so their times (``threaded``) are left out on a busy
    machine.
    """
    alone = _without_operands(alone)
    peaks = dict(alone.peaks)
    flat = _flat(alone.seconds)
    rates = [_rate(size, seconds, alone.kernel_s) for kind, size, seconds in flat if kind in COMPUTE]
    peaks["float32"] = max([peaks["float32"], *rates])
    bandwidth = max(_rate(size, seconds, alone.kernel_s) for kind, size, seconds in flat if kind not in COMPUTE)
    shared = []  # conditions under which cores share memory and power: several threads, or several ranks at once
    if threaded is not None and alone.spread <= BUSY_SPREAD:
        shared.append((_without_operands(threaded), cores, 1))
    if together is not None:
        concurrent = _without_operands(together)
        shared.append((_while_others_train(alone, concurrent) if ranks > 1 else concurrent, 1, ranks))
    conditions = [
        Condition(
            threads=threads,
            ranks=at_once,
            kernel_s=measured.kernel_s,
            efficiency=curves(measured, peaks["float32"] * threads, bandwidth * threads),
        )
        for measured, threads, at_once in shared
    ]
    name = machine_name()
    device = Device(
        name=name,
        kind="cpu",
        memory_bytes=memory_bytes() // cores,
        memory_bandwidth_bytes_per_s=bandwidth,
        peak_flops_per_s=peaks,
        efficiency=curves(alone, peaks["float32"], bandwidth),
        conditions=tuple(conditions),
        kernels=Kernels(processors=1, matmul_fraction=1.0, bandwidth_fraction=0.7, kernel_s=alone.kernel_s, launch_s=0),
        source="meshwright calibrate: the best rate of any kernel on one core",
        origin="measured",
    )
    levels = levels_of(timings, cores, boxes)
    return Cluster(
        name="this-machine",
        num_devices=cores * boxes,
        open_ended=cores * boxes > 1,
        source=f"meshwright calibrate on {name}",
        device=device,
        levels=levels,
        collectives=tuple(timings),
        calibration=Calibration(
            machine=name,
            torch=str(torch.__version__),
            time_s=round(time.time()),
            spread=round(alone.spread, 4),
            drift=round(max(alone.drift, together.drift if together else 0.0), 4),
        ),
    )


def levels_of(timings: list[CollectiveTiming], cores: int, boxes: int) -> tuple[Level, ...]:
    """Return the levels of ``boxes`` boxes with ``cores`` cores each, from the times of messages at each level."""
    return tuple(_level(name, fan_out, timings) for name, fan_out in ((BOX, cores), (NETWORK, boxes)) if fan_out > 1)


def _level(name: str, fan_out: int, timings: list[CollectiveTiming]) -> Level:
    sent = [(float(row.bytes), row.time_s) for row in timings if (row.operation, row.level) == ("send", name)]
    alpha, beta = _line(sent) if sent else DEFAULT_LINE
    default = "not measured: one rank was started; gloo (torch 2.13) on another machine"
    return Level(
        name=name, fan_out=fan_out, alpha_s=alpha, beta_s_per_byte=beta,
        source="meshwright calibrate" if sent else default, origin="measured" if sent else "default",
    )  # fmt: skip


def _while_others_train(alone: Measured, together: Measured) -> Measured:
    """Estimate the times of kernels while other ranks train. In ``together``, all ranks ran the same kernels at once.

    Ranks compute nearly always, so hyperthreads of a core always share its arithmetic units. Kinds bound by arithmetic
    therefore keep their times from ``together``. Only some kernels of a step are bound by memory, so ranks share the
    memory's bandwidth only part of the time. Kinds bound by memory get the mean of ``alone`` and ``together``.
    """
    seconds = {}
    for kind, points in together.seconds.items():
        by_size = {} if kind in COMPUTE else dict(alone.seconds[kind])
        seconds[kind] = [(size, (taken + by_size.get(size, taken)) / 2) for size, taken in points]
    return msgspec.structs.replace(together, seconds=seconds)


def _without_operands(measured: Measured) -> Measured:
    """Split the times of matrix products and convolutions into arithmetic and work on operands (``ir/kind.py``). Flat
    calls, which do few FLOPs per byte, show the time of work on operands. In other calls the rest is arithmetic."""
    split: Seconds = {}
    for kind, operands in OPERANDS.items():
        if kind not in measured.seconds or operands not in measured.seconds:
            continue
        best = max(_rate(size, seconds, measured.kernel_s) for size, seconds in measured.seconds[kind])
        if operands not in split:
            split[operands] = [
                (size, max(seconds - measured.others[operands, size] / best, 0.1 * seconds))
                for size, seconds in sorted(measured.seconds[operands])
            ]
        flat = split[operands]
        rates = [_rate(size, seconds, measured.kernel_s) for size, seconds in flat]
        split[kind] = [
            (size, max(seconds - _at(measured.others[kind, size], flat, rates), 0.7 * seconds))
            for size, seconds in measured.seconds[kind]
        ]
    return msgspec.structs.replace(measured, seconds=measured.seconds | split)


def _at(num_bytes: float, flat: list[tuple[float, float]], rates: list[float]) -> float:
    """Return the seconds that ``num_bytes`` of operands take, at the rate of the nearest measured size."""
    nearest = min(range(len(flat)), key=lambda index: abs(math.log(flat[index][0] / num_bytes)))
    return num_bytes / rates[nearest]


def _flat(seconds: Seconds) -> list[tuple[str, float, float]]:
    return [(kind, size, time_s) for kind, points in seconds.items() for size, time_s in points]


def _rate(size: float, seconds: float, kernel_s: float) -> float:
    """The FLOPs or bytes per second of a kernel, without the time of its dispatch."""
    return size / max(seconds - kernel_s, 0.1 * seconds)


def curves(measured: Measured, peak: float, bandwidth: float) -> dict[str, Curve]:
    """The efficiency curve of each kind that was measured: fractions of ``peak`` or of ``bandwidth``, by size."""
    by_kind = {}
    for kind, points in measured.seconds.items():
        best = peak if kind in COMPUTE else bandwidth
        by_kind[kind] = tuple(
            (float(size), min(1.0, float(f"{_rate(size, seconds, measured.kernel_s) / best:.4g}")))
            for size, seconds in sorted(points)
        )
    return by_kind


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return α and β of messages: the time of the smallest message, and the time of each further byte."""
    (least, first), (most, last) = min(points), max(points)
    return first, max(1e-13, (last - first) / max(1.0, most - least))


def stale(cluster: Cluster, now_s: float, days: float = 30.0, machine: str = "") -> str:
    """Return the reason why a calibration must be repeated; an empty text if it is still valid. ``machine``: the name
    of this machine (default: that of its cores)."""
    calibration = cluster.calibration
    if calibration is None:
        return "it was not measured"
    if calibration.machine != (machine or machine_name()):
        return f"it was measured on another machine, {calibration.machine}"
    if calibration.torch != str(torch.__version__):
        return f"it was measured with torch {calibration.torch}"
    missing = sorted(set(KINDS) - cluster.device.efficiency.keys()) if cluster.device.kind == "cpu" else []
    if missing:
        return f"it has no {', '.join(missing)}: it was measured by another version"
    age_days = (now_s - calibration.time_s) / 86400
    if age_days < -1:  # less is a clock that was set back
        return f"it was measured {-age_days:.0f} days later than now, by this machine's clock"
    if math.floor(age_days) > days:
        return f"it is {age_days:.0f} days old"
    return ""
