"""Compute: the seconds of matrix products, attention and memory-bound kernels, from tiles, waves and bytes moved."""

import math

from meshwright.ir.device import Device, Kernels

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Blocks of the output that one processor computes at a time, as in cuBLAS and CUTLASS."""

SPLITS = (1, 2, 4, 8)
"""Over how many blocks a product with few tiles may divide its reduction."""


class Rates:
    """What a device reaches: its data sheet times the few fractions of ``Device.kernels``.

    A matrix product of m x n with reduction length k is cut into tiles. Each wave computes one tile on every processor:

        tile_s = 2 * rows * columns * (k + extra_depth) / (peak / processors * matmul_fraction * reuse(tile))

    ``extra_depth`` stands for filling and draining the tile's pipeline, ``reuse`` for the operands that a small tile
    loads more often: ``1 / (1 + operand_cost * (1/rows + 1/columns))``. The last wave may be nearly empty, but costs as
    much as a full one. The best tile wins, as the libraries' heuristics intend. Nothing is faster than its memory.
    """

    def __init__(self, device: Device, dtype: str) -> None:
        kernels = device.kernels or default_kernels(device)
        self._device = device
        # Old devices have no bfloat16, and their users take float16.
        known = device.peak_flops_per_s
        chosen = dtype if dtype in known else {"bfloat16": "float16", "float16": "bfloat16"}.get(dtype, dtype)
        self.kernels = kernels
        self.peak = device.peak(chosen)
        self.peak_16bit = max(known.get("bfloat16", 0.0), known.get("float16", 0.0)) or self.peak
        self.bandwidth = device.memory_bandwidth_bytes_per_s * kernels.bandwidth_fraction
        self.kernel_s = kernels.kernel_s
        self.launch_s = kernels.launch_s

    def in_16_bit(self) -> "Rates":
        """The same device with products in 16 bit."""
        return Rates(self._device, "bfloat16")

    def matmul_s(self, m: float, n: float, k: float, *, batch: float = 1, element_bytes: int = 2) -> float:
        """``batch`` products of (m x k) by (k x n); one kernel."""
        kernels = self.kernels
        processors = kernels.processors
        rate = 2.0 / (self.peak / processors * kernels.matmul_fraction)
        best = math.inf
        for rows, columns in TILES:
            tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
            work = rate * rows * columns * (1.0 + kernels.operand_cost * (1.0 / rows + 1.0 / columns))
            for split in SPLITS:
                waves = math.ceil(tiles * split / processors)
                seconds = waves * work * (k / split + kernels.extra_depth)
                if split > 1:
                    seconds += 4.0 * m * n * batch * (split + 1) / self.bandwidth
                best = min(best, seconds)
                if tiles * split >= processors:
                    break
        moved = element_bytes * batch * (m * k + k * n + m * n)
        return max(best, moved / self.bandwidth) + self.kernel_s

    def stream_s(self, moved_bytes: float, kernels: int = 1) -> float:
        """Kernels that are bound by memory and read and write so many bytes together."""
        return moved_bytes / self.bandwidth + kernels * self.kernel_s

    def attention_s(self, flops: float, moved_bytes: float) -> float:
        """Fused attention (Dao et al. 2022): its products in 16 bit, or its inputs and outputs."""
        return max(flops / (self.peak_16bit * self.kernels.attention_fraction), moved_bytes / self.bandwidth) + (
            self.kernel_s
        )


def default_kernels(device: Device) -> Kernels:
    """The behaviour of a device that no file describes: about that of an A100 at its own data sheet's rates."""
    return Kernels(processors=100 if device.kind == "gpu" else 1)
