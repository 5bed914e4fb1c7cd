"""What a part of ``make gpu`` works with: the device, its clock and memory, the time that is left, and its notebook."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.gpu.findings import Line, Notebook, lines_of
from meshwright.bench.repeat import alternate
from meshwright.catalog import reported_cluster
from meshwright.errors import ClusterError
from meshwright.ir.cluster import Cluster
from meshwright.runtime.device import has_cuda, properties

ROUNDS, STEPS, WARM = 7, 3, 3


class Context:
    """``rehearse``: the device is the CPU, sizes are small, and nothing is judged. ``device``: default: the first
    GPU."""

    def __init__(
        self, name: str, scratch: Path, seconds: float, *, rehearse: bool, device: torch.device | None = None
    ) -> None:
        self.name, self.scratch, self.rehearse = name, scratch, rehearse
        self.notes = Notebook(scratch / f"{name}.jsonl")
        self.cluster_file = scratch / "cluster.toml"
        self._deadline = time.monotonic() + seconds
        if not rehearse and not has_cuda():
            raise SystemExit(f"torch {torch.__version__} sees no CUDA device")
        self.device = device or torch.device("cpu" if rehearse else "cuda:0")
        if not rehearse:
            torch.cuda.set_device(self.device)

    @property
    def left_s(self) -> float:
        """The seconds that are left for this part."""
        return self._deadline - time.monotonic()

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give back the memory of what was dropped, and count the peak anew."""
        self.settle()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def held_bytes(self) -> int:
        """The bytes of tensors on the device now; 0 on a CPU, which has no such count."""
        self.settle()
        return int(torch.cuda.memory_allocated(self.device)) if self.device.type == "cuda" else 0

    def peak_bytes(self, step: Callable[[], object], steps: int = 2) -> tuple[int, int]:
        """The most bytes of tensors on the device during some steps, and by how much that is more than before them."""
        if self.device.type != "cuda":
            step()
            return 0, 0
        before = self.held_bytes()
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(steps):
            step()
        self.settle()
        peak = int(torch.cuda.max_memory_allocated(self.device))
        return peak, peak - before

    def seconds(self, sides: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Seconds a step of each side by round, sides in turn."""
        rounds = 5 if self.rehearse else ROUNDS
        return alternate(sides, rounds=rounds, steps=1 if self.rehearse else STEPS, warmup_steps=WARM)

    def once(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """The result of a call, and its seconds until the device is idle."""
        self.settle()
        begun = time.perf_counter()
        result = call()
        self.settle()
        return result, time.perf_counter() - begun

    def keep(self, **figures: Any) -> None:
        """Keep figures for later parts."""
        self.notes.add(Line(kept=figures))

    def kept(self, part: str) -> dict[str, Any]:
        """The figures that an earlier part kept."""
        kept: dict[str, Any] = {}
        for line in lines_of(self.scratch / f"{part}.jsonl"):
            kept |= line.kept
        return kept

    def catalog_cluster(self, devices: int = 1) -> Cluster | None:
        """This device as the catalog has it; None if the catalog lacks it. A rehearsal takes an H100 whose cuDNN is no
        faster than FlashAttention, since the CPU, which runs the plan, has no cuDNN."""
        given = ("NVIDIA H100 80GB HBM3", 84_943_715_697, 132, 8) if self.rehearse else properties(self.device)
        try:
            cluster = reported_cluster(*given).resized(devices)
            if self.rehearse and cluster.device.kernels is not None:
                kernels = replace(cluster.device.kernels, cudnn_attention=1.0)
                cluster = replace(cluster, device=replace(cluster.device, kernels=kernels))
            return cluster
        except ClusterError as error:
            print(error, flush=True)
            return None
