"""The measured machine: its names, its software versions, and the float32 peak of its cores."""

import platform
import re
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from meshwright import __version__
from meshwright.ir.result import Machine, Peak
from meshwright.runtime import launch
from meshwright.runtime.loop import Progress
from meshwright.runtime.machine import cpu_model

SIZES = (256, 512, 1024, 2048)
"""Sizes of the square matrices whose products measure the peak: from fitting a core's cache to fitting no cache."""
LEAST_S = 0.3
"""Minimum seconds for which each size is repeated; every size is repeated at least five times."""
WIDTHS = {"avx512f": 64, "fma": 32, "asimd": 16}
"""Float32 operations per cycle and core, by the processor's flag: two fused multiply-adds of the vector's width."""


def this_machine(*, accelerators: bool = False) -> Machine:
    """The machine of this process, with its GPUs if ``accelerators`` were used."""
    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())] if accelerators else []
    return Machine(cpu=cpu_model(), cores=launch.num_cores(), accelerators=tuple(names), system=platform.system())


def versions() -> dict[str, str]:
    """The versions of Python, torch and Meshwright."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "meshwright": __version__}


def today() -> str:
    """Today's date, such as 2026-01-31."""
    return date.today().isoformat()


def measured_peak(threads: int, progress: Progress) -> Peak:
    """The highest rate of any repetition of a product of square float32 matrices on ``threads`` threads.

    It is a lower bound of the processor's peak.
    """
    best_flops_per_s, best_size = 0.0, 0
    for size in SIZES:
        product, flops = square_product(size)
        begin, count = time.perf_counter(), 0
        while count < 5 or time.perf_counter() - begin < LEAST_S:
            start = time.perf_counter()
            product()
            rate = flops / (time.perf_counter() - start)
            count += 1
            if rate > best_flops_per_s:
                best_flops_per_s, best_size = rate, size
        progress.advance()
    sizes = ", ".join(map(str, SIZES))
    return Peak(
        flops_per_s=best_flops_per_s,
        dtype="float32",
        found=f"measured: the fastest product of square matrices ({best_size}; of {sizes}) on {threads} threads, "
        "a lower bound",
    )


def square_product(size: int) -> tuple[Callable[[], object], float]:
    """A function that multiplies two random square float32 matrices into a third, and its FLOPs."""
    left, right, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    return (lambda: torch.mm(left, right, out=out)), 2.0 * size**3


def nominal_peak(threads: int) -> Peak | None:
    """Clock rate x operations of a core per cycle x ``threads`` cores; None if Linux does not report them."""
    info = _text(Path("/proc/cpuinfo"))
    most_khz = _text(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")).strip()
    return peak_of(info, int(most_khz) * 1e3 if most_khz.isdecimal() else 0.0, threads)


def peak_of(info: str, most_hz: float, threads: int) -> Peak | None:
    """The nominal peak, from the text of /proc/cpuinfo and the highest clock (0: unknown, the text's clock counts).

    Virtual machines often report only the base clock. A processor with one AVX-512 unit has half of this peak.
    """
    flags = (_field(info, "flags") or _field(info, "Features")).split()
    flag = next((name for name in WIDTHS if name in flags), "")
    told_hz = max(
        (float(text) * 1e6 for text in re.findall(r"^cpu MHz\s*: *([\d.]+)", info, re.MULTILINE)), default=0.0
    )
    clock_hz = most_hz or told_hz
    if not flag or not clock_hz:
        return None
    source = "highest clock" if most_hz else "clock in /proc/cpuinfo"
    return Peak(
        flops_per_s=clock_hz * WIDTHS[flag] * threads,
        dtype="float32",
        found=f"nominal: {source} {clock_hz / 1e9:.2f} GHz x {WIDTHS[flag]} FLOP a cycle ({flag}) x {threads} cores",
    )


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _field(info: str, name: str) -> str:
    match = re.search(rf"^{name}\s*: *(.*)$", info, re.MULTILINE)
    return match[1].strip() if match else ""
