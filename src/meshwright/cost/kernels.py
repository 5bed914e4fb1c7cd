"""Kernels: the seconds of a kernel on a device, from its kind, dtype and sizes; every estimate uses this model."""

import math

import msgspec

from meshwright.cost.attention import emitted_kernels
from meshwright.ir.device import PEAK_DTYPES, Device, Kernels
from meshwright.ir.kernel import Kernel, Product
from meshwright.ir.kind import COMPUTE, OPERANDS
from meshwright.ir.software import Software

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Blocks (rows, columns) of the output that one processor computes at a time, as in cuBLAS and CUTLASS."""

SPLITS = (1, 2, 4, 8)
"""The numbers of blocks into which a product with few tiles may split its reduction (split-k)."""

ATTENTION_BACKWARD = 1.15
"""Factor by which fused attention's backward takes longer per FLOP than its forward (Dao et al. 2022)."""

_INSTEAD = {"bfloat16": ("float16", "float32"), "float16": ("bfloat16", "float32"), "int8": ("float32",)}
"""Maps a dtype to the dtypes that replace it on a device that lacks it. Old GPUs have no bfloat16, and CPUs compute
16-bit products in float32."""


class Cost(msgspec.Struct, frozen=True):
    """Device seconds, FLOPs, bytes and number of launches of some kernels on one rank."""

    seconds: float = 0.0
    flops: float = 0.0
    bytes: int = 0
    launches: float = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.seconds + other.seconds, self.flops + other.flops, self.bytes + other.bytes,
            self.launches + other.launches,
        )  # fmt: skip


class Rates:
    """The seconds of kernels on a device.

    For kinds of kernels with a measured efficiency curve (on calibrated machines):

        arithmetic_s = FLOPs / (peak * efficiency(kind, FLOPs))
        memory_s     = bytes / (bandwidth * efficiency(kind, bytes))
        seconds      = kernel_s + memory_s                          kinds that are bound by memory
                       kernel_s + max(arithmetic_s, memory_s)       others, with bytes at the full bandwidth
                       kernel_s + arithmetic_s + memory_s           products and convolutions, where their operands'
                                                                    cost was measured

    (S. Williams, A. Waterman, D. Patterson, "Roofline", 2009.) Some kernels first rearrange their operands: a product
    with few rows packs its weights, and a convolution on a CPU copies its images into blocks of channels. A core does
    not rearrange and multiply at the same time, so the times add. For kinds without a curve, the rate is the data
    sheet's rate times the fractions in ``Device.kernels``. A matrix product on a GPU or accelerator is then cut into
    tiles; each wave computes one tile on every processor:

        tile_s = 2 * rows * columns * (k + extra_depth) / (peak / processors * matmul_fraction * reuse(tile))

    ``extra_depth`` stands for filling and draining the tile's pipeline, ``reuse`` for the operands that a small tile
    loads more often: ``1 / (1 + operand_cost * (1/rows + 1/columns))``. The last wave may be nearly empty, but costs as
    much as a full wave. The fastest tile counts, because the libraries try to choose it. No kernel takes less than its
    memory time.

    ``software`` changes the fractions. Its ``pace`` multiplies every time. Its ``traffic`` multiplies the bytes that
    memory-bound kernels move, except the bytes of the optimizer, for which there are separate numbers.
    """

    def __init__(self, device: Device, software: Software | None = None) -> None:
        self.device, self.software = device, software or Software()
        self.kernels = _reached(device.kernels or default_kernels(device), self.software)
        self.kernel_s, self.launch_s = self.software.pace * self.kernels.kernel_s, self.kernels.launch_s
        self._streamed = device.memory_bandwidth_bytes_per_s * self.kernels.bandwidth_fraction
        self._peaks: dict[tuple[str, bool], float] = {}

    def seconds(self, kind: str, dtype: str, flops: float, num_bytes: float, product: Product | None = None) -> float:
        """Seconds of one kernel. ``product``: the sizes of a matrix product, or of a convolution as a product; without
        them, the product is assumed to be a cube with the same FLOPs.

        Raises:
            ClusterError: the device has no peak for a dtype in which it has to compute.
        """
        return self.software.pace * self._seconds(kind, dtype, flops, num_bytes, product)

    def _seconds(self, kind: str, dtype: str, flops: float, num_bytes: float, product: Product | None) -> float:
        device, measured = self.device, kind in self.device.efficiency
        if kind not in COMPUTE:
            num_bytes *= self.software.traffic if kind != "update" else 1.0
            if not measured:
                return self.kernels.kernel_s + num_bytes / self._streamed
            fraction = device.efficiency_at(kind, num_bytes)
            return self.kernels.kernel_s + num_bytes / (device.memory_bandwidth_bytes_per_s * fraction)
        peak = self.peak(kind, dtype)
        if measured:
            arithmetic_s = flops / (peak * device.efficiency_at(kind, flops))
            memory_s = num_bytes / device.memory_bandwidth_bytes_per_s
            if (operands := OPERANDS.get(kind, "")) in device.efficiency:
                return self.kernels.kernel_s + arithmetic_s + memory_s / device.efficiency_at(operands, num_bytes)
            return self.kernels.kernel_s + max(arithmetic_s, memory_s)
        if kind.startswith("attention"):
            again = ATTENTION_BACKWARD if kind == "attention_backward" else 1.0
            arithmetic_s = again * flops / (peak * self.kernels.attention_fraction)
        elif device.kind == "cpu":
            arithmetic_s = flops / (peak * self.kernels.matmul_fraction)
        else:
            arithmetic_s = self._tiles_s(peak, product or Product(*3 * [(flops / 2) ** (1 / 3)]))
        return self.kernels.kernel_s + max(arithmetic_s, num_bytes / self._streamed)

    def cost(self, kernel: Kernel) -> Cost:
        """The cost of all calls of a kernel. Attention costs the kernels of its algorithm, and an opaque region the
        measured time."""
        if kernel.attention is not None:
            on_cpu = self.device.kind == "cpu"
            parts = [self.cost(launch) for launch in emitted_kernels(kernel, on_cpu, self.kernels.cudnn_attention)]
            return msgspec.structs.replace(sum(parts, Cost()), flops=kernel.flops)
        if kernel.measured_s:
            return Cost(kernel.measured_s, kernel.flops, kernel.bytes, kernel.calls)
        seconds = self.seconds(kernel.kind, kernel.dtype, kernel.flops, kernel.bytes, kernel.product)
        return Cost(seconds + (kernel.calls - 1) * self.kernel_s, kernel.flops, kernel.bytes, kernel.calls)

    def algorithm_costs(self, kernel: Kernel) -> dict[str, Cost]:
        """The cost of attention by each algorithm that supports the call on the device, the usual one first."""
        sizes = kernel.attention
        assert sizes is not None
        return {
            name: self.cost(msgspec.structs.replace(kernel, attention=sizes._replace(algorithm=name)))
            for name in sizes.served(kernel.dtype, self.device.kind == "cpu")
        }

    def chosen_cost(self, kernel: Kernel) -> Cost:
        """The cost of a kernel before the planner has chosen the algorithms of attention: it takes the fastest. CPUs
        have nothing to choose."""
        if kernel.attention is None or kernel.attention.algorithm or self.device.kind == "cpu":
            return self.cost(kernel)
        return min(self.algorithm_costs(kernel).values(), key=lambda cost: cost.seconds)

    def matmul_s(
        self, m: float, n: float, k: float, *, batch: float = 1, dtype: str = "bfloat16", kind: str = "matmul"
    ) -> float:
        """Seconds of one kernel of ``batch`` products of (m x k) by (k x n)."""
        num_bytes = element_bytes(dtype) * batch * (m * k + k * n + m * n)
        return self.seconds(kind, dtype, 2 * batch * m * n * k, num_bytes, Product(m, n, k, batch))

    def memory_bound(self, kind: str, num_bytes: float, kernels: float = 1) -> Cost:
        """The cost of ``kernels`` memory-bound kernels of one kind that move ``num_bytes`` in all."""
        if num_bytes <= 0:
            return Cost()
        seconds = self.seconds(kind, "", 0.0, num_bytes) + (kernels - 1) * self.kernel_s
        return Cost(seconds, 0.0, round(num_bytes), kernels)

    def peak(self, kind: str, dtype: str) -> float:
        """Peak FLOP/s. Convolutions of float32 use the tensor cores (torch.backends.cudnn.allow_tf32), products of
        float32 do not; integers and complex numbers are multiplied at float32's rate."""
        convolves = dtype == "float32" and kind.startswith("convolution")
        if (dtype, convolves) not in self._peaks:
            known = self.device.peak_flops_per_s
            wanted = dtype if dtype in PEAK_DTYPES else "float32"
            if wanted == "float8" and self.device.kind == "cpu":  # it multiplies the rounded numbers in float32
                wanted = "float32"
            if convolves:
                wanted = "tfloat32" if "tfloat32" in known else wanted
            there = next((name for name in (wanted, *_INSTEAD.get(wanted, ())) if name in known), wanted)
            self._peaks[dtype, convolves] = self.device.peak(there)
        return self._peaks[dtype, convolves]

    def _tiles_s(self, peak: float, product: Product) -> float:
        """Seconds of a product in waves of tiles, for the fastest tile and split."""
        m, n, k, batch = product
        kernels = self.kernels
        processors = kernels.processors
        rate = 2.0 / (peak / processors * kernels.matmul_fraction)
        best = math.inf
        for rows, columns in TILES:
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
            work = rate * rows * columns * (1.0 + kernels.operand_cost * (1.0 / rows + 1.0 / columns))
            for split in SPLITS:
                waves = math.ceil(tiles * split / processors)
                seconds = waves * work * (k / split + kernels.extra_depth)
                if split > 1:
                    seconds += 4.0 * m * n * batch * (split + 1) / self._streamed
                best = min(best, seconds)
                if tiles * split >= processors:
                    break
        return best


def element_bytes(dtype: str) -> int:
    """Bytes of an element of an activation if products are in ``dtype``. Activations of float8 products have 16
    bits."""
    return {"float64": 8, "float32": 4, "tfloat32": 4}.get(dtype, 2)


def default_kernels(device: Device) -> Kernels:
    """The kernel constants of a device whose file has none: a GPU is assumed to reach the same fractions of its data
    sheet as an A100, a CPU its nominal rates."""
    if device.kind == "cpu":
        return Kernels(
            processors=1, matmul_fraction=1.0, attention_fraction=1.0, bandwidth_fraction=1.0, kernel_s=0.0,
            launch_s=0.0,
        )  # fmt: skip
    return Kernels(processors=100 if device.kind == "gpu" else 1)


def _reached(kernels: Kernels, software: Software) -> Kernels:
    """The kernel constants of a device, adapted to ``software``."""
    return msgspec.structs.replace(
        kernels,
        matmul_fraction=min(1.0, kernels.matmul_fraction * software.matmul),
        attention_fraction=min(1.0, kernels.attention_fraction * software.attention),
        launch_s=kernels.launch_s * software.host,
    )
