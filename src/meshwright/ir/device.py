"""The device that one rank computes on: its peak rates, its memory, and the fraction of a peak that operators reach."""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Literal

import msgspec

from meshwright.errors import ClusterError, Problem
from meshwright.ir.files import did_you_mean
from meshwright.ir.kind import KINDS

PEAK_DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "int8")
"""The keys that ``Device.peak_flops_per_s`` may have. ``tfloat32`` is NVIDIA's TF32, a rounded float32."""

Curve = tuple[tuple[float, float], ...]
"""An efficiency curve: points (size, fraction of the peak), with rising sizes."""
Origin = Literal["measured", "catalog", "default", "given"]
"""Where constants come from: ``measured`` on this machine; ``catalog``: data sheets and published figures;
``default``: an assumed value; ``given``: a file of the user that does not state the source."""


class Kernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Constants with which the times of a device's kernels are estimated from its data sheet.

    The defaults were fitted on A100 (docs/predictor.md). The device has ``processors`` processors, and each computes
    one tile of a matrix product at a time. The main loops of matrix products reach ``matmul_fraction`` of the peak, and
    those of FlashAttention 2 reach ``attention_fraction``; cuDNN's attention is ``cudnn_attention`` times as fast.
    Kernels bound by memory reach ``bandwidth_fraction`` of the bandwidth. The start and end of a tile take as long as
    ``extra_depth`` more terms in the sum of each element. The loads of operands multiply the time of an r x c tile by
    ``1 + operand_cost * (1/r + 1/c)``.
    ``kernel_s`` is the device's time from one kernel to the next. ``launch_s`` is the host's time to launch a kernel;
    it is hidden while the device is busy."""

    processors: int
    matmul_fraction: float = 0.905
    attention_fraction: float = 0.45
    cudnn_attention: float = 1.0
    extra_depth: float = 145.0
    operand_cost: float = 5.6
    bandwidth_fraction: float = 0.715
    kernel_s: float = 2.3e-6
    launch_s: float = 51e-6


class Condition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The measured speed of a device while ``ranks`` devices of its box work, each with ``threads`` threads.

    ``efficiency`` maps a kind of operator to its curve, as in ``Device``. Its fractions refer to the peak of all
    ``threads`` threads together. ``kernel_s`` is the time from one kernel to the next, in seconds."""

    threads: int = 1
    ranks: int = 1
    kernel_s: float = 0.0
    efficiency: dict[str, Curve] = {}


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One device, which holds one rank: a GPU, a chip, or a core of a CPU.

    ``peak_flops_per_s`` maps a dtype name (``PEAK_DTYPES``) to the peak for dense matrices. ``efficiency`` maps a kind
    of operator to points ``[size, fraction of the peak]`` with rising sizes. The size is in FLOPs for kinds bound by
    arithmetic and in bytes for kinds bound by memory (``ir/kind.py``). ``conditions`` are measurements with more
    threads, or with all devices of the box at work. ``kernels`` has further constants for estimates of kernel times.
    ``usd_per_hour`` is the rent of one device (None: unknown). ``price_source`` says who asked this price, and when.
    ``origin`` says where peaks, bandwidth and efficiency come from."""

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
        """The peak FLOP/s in ``dtype``; raises a ClusterError if the device has no peak for this dtype."""
        if dtype not in self.peak_flops_per_s:
            raise ClusterError(
                f"there is no peak for {dtype!r}",
                where=f"device {self.name}",
                remedy=f"use {' or '.join(self.peak_flops_per_s)}, or add {dtype!r} to the device's peak_flops_per_s",
            )
        return self.peak_flops_per_s[dtype]

    def under(self, *, ranks: int = 1, threads: int = 1) -> "Device":
        """The device with its speed while ``ranks`` devices of its box work, each with ``threads`` threads.

        The speed is that of the nearest measured condition, which may be this device alone with one thread. Peaks and
        memory bandwidth are those of all threads of the condition together. Efficiency curves that were not measured
        under the condition stay as they are."""
        alone = Condition(efficiency=self.efficiency, kernel_s=self.kernels.kernel_s if self.kernels else 0.0)
        nearest = min(
            (alone, *self.conditions),
            key=lambda condition: (abs(math.log(condition.threads / threads)), abs(math.log(condition.ranks / ranks))),
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
        """The fraction of the peak that an operator of this kind and size reaches.

        It is linear in log(size) between the points of the curve and constant beyond the first and last point. It is 1
        if the device has no curve for the kind."""
        curve = self.efficiency.get(kind, ((1.0, 1.0),))
        if size <= curve[0][0]:
            return curve[0][1]
        for (low, below), (high, above) in pairwise(curve):
            if size <= high:
                return below + (above - below) * math.log(size / low) / math.log(high / low)
        return curve[-1][1]


# The likeliest mistake in a file is a number in the wrong unit: impossible numbers are refused with a hint.
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
    """Problems of impossible values. Each problem has its key, prefixed by ``where``, and a hint about the unit."""
    for quantity, value in quantities.items():
        low, high, hint = _RANGES[quantity]
        if not low <= value <= high:
            yield f"{where}.{quantity}".lstrip("."), f"{value:g} is not between {low:g} and {high:g}", hint


def device_problems(device: Device, where: str) -> Iterator[Problem]:
    """Problems of impossible values in the device. Each problem has its key, prefixed by ``where``."""
    names = ("memory_bytes", "memory_bandwidth_bytes_per_s", "usd_per_hour")
    quantities = {name: getattr(device, name) for name in names}
    yield from quantity_problems({name: value for name, value in quantities.items() if value is not None}, where)
    for dtype, peak in device.peak_flops_per_s.items():
        if dtype not in PEAK_DTYPES:
            remedy = did_you_mean(dtype, PEAK_DTYPES, f"known dtypes: {', '.join(PEAK_DTYPES)}")
            yield f"{where}.peak_flops_per_s", f"unknown dtype {dtype!r}", remedy
        for place, problem, remedy in quantity_problems({"peak_flops_per_s": peak}, where):
            yield f"{place}.{dtype}", problem, remedy
    for index, condition in enumerate(device.conditions):
        place = f"{where}.conditions[{index}]"
        if condition.threads < 1 or condition.ranks < 1:
            yield place, f"{condition.threads} threads on {condition.ranks} ranks", "give 1 or more of both"
        yield from _curve_problems(condition.efficiency, place)
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
