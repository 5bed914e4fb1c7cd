"""The device: what one rank computes on, its peaks, its memory, and how much of a peak operators reach."""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Literal

import msgspec

from meshwright.errors import ClusterError, Problem
from meshwright.ir.files import did_you_mean
from meshwright.ir.kind import KINDS

PEAK_DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "int8")
"""The keys that ``Device.peak_flops_per_s`` may have; ``tfloat32`` is float32 rounded by the matrix unit."""

Curve = tuple[tuple[float, float], ...]
Origin = Literal["measured", "catalog", "default", "given"]
"""Where constants are from: measured on this machine; data sheets and published figures; a stand-in, as nobody
measured; given by the user, in a file that does not say."""


class Kernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How a device's kernels fall short of its data sheet; the defaults were fitted once, on A100 (docs/predictor.md).

    ``processors`` that take a tile of a matrix product at a time; what their main loop reaches of the peak, and fused
    attention's; the reduction length that filling and draining a tile costs; the cost of loading a small tile's
    operands, in rows; the fraction of the memory bandwidth; the device's time from one kernel to the next; the host's
    time to issue one kernel, hidden while the device is busy.
    """

    processors: int
    matmul_fraction: float = 0.905
    attention_fraction: float = 0.45
    extra_depth: float = 145.0
    operand_cost: float = 5.6
    bandwidth_fraction: float = 0.715
    kernel_s: float = 2.3e-6
    launch_s: float = 51e-6


class Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How a device works when ``ranks`` devices of its box work at once, each with ``threads`` threads: its efficiency
    curves then, by kind, as fractions of the peak of all its threads, and the seconds from one kernel to the next."""

    threads: int = 1
    ranks: int = 1
    kernel_s: float = 0.0
    efficiency: dict[str, Curve] = {}


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One device: what holds a rank (a GPU, a chip; on CPU a core).

    ``peak_flops_per_s`` is dense, by dtype name (``PEAK_DTYPES``). ``efficiency`` gives, by kind of operator, rising
    ``[size, fraction of the peak]`` points; a size is FLOPs for what computes and bytes for what is bound by memory
    (``ir/kind.py``). ``conditions`` say what else was measured: more threads, all devices of the box at work.
    ``kernels`` says what the closed-form estimates need beyond that. ``usd_per_hour`` is what a device is rented for,
    None where no price is known, and ``price_source`` says by whom and when: prices move. ``origin`` is of peaks,
    bandwidth and efficiency.
    """

    name: str
    kind: Literal["cpu", "gpu", "accelerator"]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: dict[str, float]
    efficiency: dict[str, Curve] = {}
    conditions: tuple[Condition, ...] = ()
    kernels: Kernels | None = None
    usd_per_hour: float | None = None
    price_source: str = ""
    source: str = ""
    origin: Origin = "given"

    def peak(self, dtype: str) -> float:
        """FLOP/s at best in ``dtype``; a ClusterError where the device has no such precision."""
        if dtype not in self.peak_flops_per_s:
            raise ClusterError(
                f"there is no peak for {dtype!r}",
                where=f"device {self.name}",
                remedy=f"use {' or '.join(self.peak_flops_per_s)}, or add {dtype!r} to the device's peak_flops_per_s",
            )
        return self.peak_flops_per_s[dtype]

    def under(self, *, ranks: int = 1, threads: int = 1) -> "Device":
        """The device as it was measured nearest to ``ranks`` of its box working at once, with ``threads`` threads each
        (the same, where nothing but itself was measured). Its peaks are then those of all its threads; curves that were
        not measured stay as they are."""
        alone = Condition(efficiency=self.efficiency, kernel_s=self.kernels.kernel_s if self.kernels else 0.0)
        nearest = min(
            (alone, *self.conditions),
            key=lambda one: (abs(math.log(one.threads / threads)), abs(math.log(one.ranks / ranks))),
        )
        if nearest is alone:
            return self
        kernels = self.kernels
        if kernels is not None and nearest.kernel_s:
            kernels = msgspec.structs.replace(kernels, kernel_s=nearest.kernel_s)
        return msgspec.structs.replace(
            self,
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s * nearest.threads,
            peak_flops_per_s={dtype: peak * nearest.threads for dtype, peak in self.peak_flops_per_s.items()},
            efficiency=self.efficiency | nearest.efficiency,
            kernels=kernels,
        )

    def efficiency_at(self, kind: str, size: float) -> float:
        """The fraction of the peak that an operator of this kind and size reaches: linear in log(size) between the
        points, constant beyond them, and 1 where the device has no curve for the kind."""
        curve = self.efficiency.get(kind, ((1.0, 1.0),))
        if size <= curve[0][0]:
            return curve[0][1]
        for (low, below), (high, above) in pairwise(curve):
            if size <= high:
                return below + (above - below) * math.log(size / low) / math.log(high / low)
        return curve[-1][1]


# A number in the wrong unit is the likeliest mistake in a file, so what no machine has is refused with a hint.
_RANGES = {
    "alpha_s": (0.0, 1.0, "give seconds: 5 microseconds are 5e-6"),
    "beta_s_per_byte": (0.0, 1e-3, "give seconds per byte: 25 GB/s are 4e-11"),
    "contention": (1.0, 1e6, "give the factor by which all senders at once slow each other: 1 for none"),
    "memory_bytes": (1e6, 1e16, "give bytes: 80 GB are 80e9"),
    "memory_bandwidth_bytes_per_s": (1e6, 1e16, "give bytes per second: 2 TB/s are 2e12"),
    "peak_flops_per_s": (1e6, 1e19, "give FLOP per second: 312 TFLOP/s are 312e12"),
    "usd_per_hour": (0.0, 1e4, "give US dollars an hour for one device"),
    "time_s": (1e-9, 1e6, "give seconds: 5 microseconds are 5e-6"),
}


def quantity_problems(quantities: Mapping[str, float], where: str = "") -> Iterator[Problem]:
    """The values, by quantity, that no machine has, each at its key (after ``where``), with a hint at the unit."""
    for quantity, value in quantities.items():
        low, high, hint = _RANGES[quantity]
        if not low <= value <= high:
            yield f"{where}.{quantity}".lstrip("."), f"{value:g} is not between {low:g} and {high:g}", hint


def device_problems(device: Device, where: str) -> Iterator[Problem]:
    """What is impossible about the device, each at its key (after ``where``)."""
    names = ("memory_bytes", "memory_bandwidth_bytes_per_s", "usd_per_hour")
    quantities = {name: getattr(device, name) for name in names}
    yield from quantity_problems({name: value for name, value in quantities.items() if value is not None}, where)
    for dtype, peak in device.peak_flops_per_s.items():
        if dtype not in PEAK_DTYPES:
            remedy = did_you_mean(dtype, PEAK_DTYPES, f"known dtypes: {', '.join(PEAK_DTYPES)}")
            yield f"{where}.peak_flops_per_s", f"unknown dtype {dtype!r}", remedy
        for place, problem, remedy in quantity_problems({"peak_flops_per_s": peak}, where):
            yield f"{place}.{dtype}", problem, remedy
    for index, one in enumerate(device.conditions):
        place = f"{where}.conditions[{index}]"
        if one.threads < 1 or one.ranks < 1:
            yield place, f"{one.threads} threads on {one.ranks} ranks", "give 1 or more of both"
        yield from _curve_problems(one.efficiency, place)
    yield from _curve_problems(device.efficiency, where)


def _curve_problems(efficiency: dict[str, Curve], where: str) -> Iterator[Problem]:
    for kind, curve in efficiency.items():
        if kind not in KINDS:
            remedy = did_you_mean(kind, KINDS, f"known kinds: {', '.join(KINDS)}")
            yield f"{where}.efficiency", f"unknown kind of operator {kind!r}", remedy
        rising = all(low < high for low, high in pairwise([0.0, *(size for size, _ in curve)]))
        if not curve or not rising or not all(0 < fraction <= 1 for _, fraction in curve):
            remedy = "give [size, fraction] points: rising sizes above 0, fractions above 0 and up to 1"
            points = [list(point) for point in curve]
            yield f"{where}.efficiency.{kind}", f"{points} is not an efficiency curve", remedy
