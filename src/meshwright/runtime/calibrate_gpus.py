"""Calibration of GPUs: measures matrix products, attention, kernels bound by memory, launches, copies, and links.

Every rank has one GPU. Rank 0 measures its own, the others wait; then all measure the links between them. Calls are
timed by the device's own clock, several in a row, because a step also queues kernels without waiting. In each of
several sweeps every call is measured once. The result is the mean of the sweeps, the drift is their deviation.

The same code runs on a CPU, on which tests run it.
"""

import statistics
import time
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.groups import meet
from meshwright.ir.cluster import CollectiveTiming
from meshwright.ir.kernel import Product
from meshwright.runtime import device as devices
from meshwright.runtime import launch
from meshwright.runtime.between import MeasuredSizes, Places, between, boxes_of_world
from meshwright.runtime.measured import Measured
from meshwright.runtime.probes import Probe, attention_probes, memory_probes
from meshwright.runtime.stopwatch import Stopwatch

Advance = Callable[[str], None]
SWEEPS = 3
TINY_CALLS = 400
"""Tiny kernels that are launched in a row, to time launches: fewer than the device's queue holds."""
COPIED_BYTES = 2**28
UPDATE_MOVES = 7
"""The numbers that the fused kernel of AdamW reads (parameter, gradient, both moments) and writes (all but the
gradient) for each element, as ``cost.optimizer.ADAMW`` has them."""


class GpuEffort(msgspec.Struct, frozen=True):
    """The sizes to measure. ``products`` are measured in each of ``dtypes``, the largest first; ``elements`` of kernels
    bound by memory; ``lengths`` of sequences of attention, which has ``heads`` heads of ``width`` features."""

    products: tuple[Product, ...] = (
        Product(8192, 8192, 8192), Product(8192, 50304, 2048), Product(4096, 4096, 4096), Product(8192, 8192, 2048),
        Product(8192, 2048, 8192), Product(8192, 6144, 2048), Product(2048, 8192, 8192), Product(2048, 2048, 8192),
        Product(8192, 2048, 2048), Product(2048, 2048, 2048), Product(1024, 4096, 1024), Product(1024, 1024, 1024),
        Product(512, 512, 512), Product(256, 2048, 2048),
    )  # fmt: skip
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    elements: tuple[int, ...] = (2**16, 2**20, 2**24, 2**26)
    lengths: tuple[int, ...] = (512, 2048, 4096, 8192)
    heads: int = 16
    width: int = 128
    copied_bytes: int = COPIED_BYTES
    between: MeasuredSizes = MeasuredSizes(bytes=(64, *(2**power for power in range(12, 29, 2))), sweeps=2)


class ProductTime(msgspec.Struct, frozen=True):
    """The measured seconds of a matrix product."""

    dtype: str
    product: Product
    seconds: float


class MeasuredGpu(msgspec.Struct, kw_only=True):
    """The measurements of one GPU and of the links between several.

    ``measured`` has the seconds of attention and of kernels bound by memory, ``products`` those of matrix products.
    ``launch_s``: the host's seconds to launch a kernel. ``copies``: bytes per second from host to device and back.
    ``beside``: the factor by which products take longer while such a copy runs on a stream of its own.
    """

    properties: devices.Properties
    measured: Measured
    products: tuple[ProductTime, ...]
    launch_s: float
    streamed_bytes_per_s: float
    copies: tuple[float, float]
    beside: float
    timings: tuple[CollectiveTiming, ...] = ()
    places: Places = Places(1, 1)


def measure(effort: GpuEffort, advance: Advance, device: torch.device | str | None = None) -> MeasuredGpu | None:
    """Measure; return the measurements on rank 0, and None on other ranks. Every rank must call this."""
    own = launch.start(device)
    rank = dist.get_rank() if dist.is_initialized() else 0
    measured = None
    with torch.inference_mode():
        if rank == 0:
            measured = _own(effort, advance, own)
        meet()
        places = boxes_of_world()
        timings = between(effort.between, places, advance, own) if dist.is_initialized() else []
    if measured is not None:
        measured.timings, measured.places = tuple(timings), places
    return measured


def _own(effort: GpuEffort, advance: Advance, device: torch.device) -> MeasuredGpu:
    clock = Stopwatch(device)
    with device:
        probes = [
            *attention_probes(effort.lengths, effort.heads, effort.width),
            *memory_probes(effort.elements, update=_fused_update),
        ]
        kernel_s, launch_s = _launches(clock)
        seconds: dict[tuple[str, float], list[float]] = {}
        products: dict[tuple[str, Product], list[float]] = {}
        for sweep in range(SWEEPS):
            for dtype in effort.dtypes:
                advance(f"matrix products in {dtype}, sweep {sweep + 1} of {SWEEPS}")
                for product in effort.products:
                    products.setdefault((dtype, product), []).append(clock.each(_product(product, dtype, device)))
            advance(f"attention and kernels bound by memory, sweep {sweep + 1} of {SWEEPS}")
            for probe in probes:
                seconds.setdefault((probe.kind, probe.size), []).append(clock.each(probe.call))
        advance("copies and streams")
        streamed, copies, beside = _copies(effort, clock, device)
    measured = Measured(kernel_s=kernel_s)
    for (kind, size), each in seconds.items():
        measured.seconds.setdefault(kind, []).append((size, statistics.fmean(each)))
    samples = [*seconds.values(), *products.values()]
    measured.drift = statistics.median(statistics.stdev(each) / statistics.fmean(each) for each in samples)
    rows = tuple(ProductTime(dtype, product, statistics.fmean(each)) for (dtype, product), each in products.items())
    return MeasuredGpu(
        properties=devices.properties(device), measured=measured, products=rows, launch_s=launch_s,
        streamed_bytes_per_s=streamed, copies=copies, beside=beside,
    )  # fmt: skip


def _fused_update(count: int) -> Probe:
    """An update by PyTorch's fused kernel of AdamW, which trainers run on GPUs."""
    parameter = torch.nn.Parameter(torch.randn(count))
    parameter.grad = torch.randn(count)
    optimizer = torch.optim.AdamW([parameter], lr=1e-9, fused=True)
    return Probe("update", UPDATE_MOVES * parameter.nbytes, optimizer.step)


def _product(product: Product, dtype: str, device: torch.device) -> Callable[[], Tensor]:
    """A product of random matrices; the second is transposed, as in linear layers."""
    m, n, k = (int(size) for size in product[:3])
    left = torch.randn(m, k, device=device).to(getattr(torch, dtype))
    right = torch.randn(n, k, device=device).to(getattr(torch, dtype))
    return lambda: torch.mm(left, right.t())


def _launches(clock: Stopwatch) -> tuple[float, float]:
    """The device's seconds from one kernel to the next, and the host's seconds to launch a kernel."""
    value = torch.ones(1)

    def several() -> None:
        for _ in range(TINY_CALLS):
            torch.add(value, value)

    several()
    clock.settle()
    host, device = [], []
    for _ in range(5):
        begun = time.perf_counter()
        several()
        host.append((time.perf_counter() - begun) / TINY_CALLS)
        clock.settle()
        device.append(clock.queued(several) / TINY_CALLS)
    return statistics.median(device), statistics.median(host)


def _copies(effort: GpuEffort, clock: Stopwatch, device: torch.device) -> tuple[float, tuple[float, float], float]:
    """The bytes per second of a copy on the device (read and written), those from and to the host, and the factor by
    which a product takes longer beside such a copy."""
    kind = devices.device_kind(device)
    there = torch.ones(effort.copied_bytes, dtype=torch.uint8, device=device)
    other, here = torch.empty_like(there), kind.pinned(there)
    streamed = 2 * there.nbytes / clock.each(lambda: other.copy_(there))
    copied = clock.each(lambda: there.copy_(here, non_blocking=True))
    returned = clock.each(lambda: here.copy_(there, non_blocking=True))
    product = _product(effort.products[0], effort.dtypes[0], device)
    alone, copies = clock.each(product), kind.copies()
    beside = 1.0
    if copies is not None:
        with devices.within(copies):
            for _ in range(12):
                here.copy_(there, non_blocking=True)
        beside = clock.each(product, calls=8) / alone
        copies.synchronize()
    return streamed, (here.nbytes / copied, here.nbytes / returned), max(1.0, beside)
