"""The metrics of a training run: log lines, and a row per step for each sink."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from meshwright.runtime.device import peak_allocated_bytes
from meshwright.runtime.sinks import Row, Sink

TOLD_SHARE = 0.05
"""Log lines tell of waits for data from this share of the time on."""


def peak_memory_bytes(device: torch.device) -> int:
    """The peak memory of this rank: allocated on its CUDA device, or resident in its process."""
    if device.type == "cuda":
        return peak_allocated_bytes(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not available on every platform

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@dataclass
class Meter:
    """Collects the metrics of steps as tensors. Reading tensors waits for the device, so it is done only for a log
    line.

    Args:
        sinks: where rows go; none on ranks other than 0.
        steps: number of steps of the whole run.
        items_per_step, unit: number and name of the items of a step, such as 4096 and ``tok``.
        flops_per_step: FLOPs of the whole batch.
        peak_flops_per_s: peak of all ranks together; 0: unknown, and ``mfu`` is not shown.
        predicted_step_s: predicted seconds of a step; 0: unknown, and ``pred/meas`` is not shown.
    """

    sinks: Sequence[Sink]
    steps: int
    items_per_step: int
    unit: str
    flops_per_step: float
    peak_flops_per_s: float
    device: torch.device
    predicted_step_s: float = 0.0
    _pending: list[tuple[Row, Mapping[str, Tensor]]] = field(default_factory=list)
    _settled: list[Row] = field(default_factory=list)
    _last: float = 0.0
    _first: float = 0.0

    def start(self) -> None:
        """Start the clock. Call it before the first step, and after any work that is not a step."""
        self._first = self._last = time.perf_counter()

    def note(self, step: int, metrics: Mapping[str, Tensor], lr: float, data_s: float = 0.0) -> None:
        """Record a step that has been made, without waiting for the device. It waited ``data_s`` for its data."""
        now = time.perf_counter()
        self._pending.append(({"step": step, "step_s": now - self._last, "data_s": data_s, "lr": lr}, dict(metrics)))
        self._last = now

    def grow(self, factor: float) -> None:
        """Multiply the work of a step by ``factor`` from now on. The predicted time no longer holds, and is dropped."""
        self.items_per_step = round(self.items_per_step * factor)
        self.flops_per_step *= factor
        self.predicted_step_s = 0.0

    def read(self) -> str:
        """Write the rows of the steps since the last call. Return the last step's log line ("" if there were no
        steps)."""
        self.settle()
        rows, self._settled = self._settled, []
        if not rows:
            return ""
        elapsed_s, self._first = self._last - self._first, self._last
        return self._line(rows[-1], elapsed_s / len(rows), sum(row["data_s"] for row in rows) / elapsed_s)

    def settle(self) -> None:
        """Write the rows of the steps so far. The next log line is about these steps, too."""
        rows = [row | {name: value.item() for name, value in metrics.items()} for row, metrics in self._pending]
        self._pending.clear()
        self._last = time.perf_counter()
        for row in rows:
            row["step_s"], row["data_s"] = round(row["step_s"], 6), round(row["data_s"], 6)
        self.write(*rows)
        self._settled += rows

    def _line(self, row: Row, step_s: float, data_share: float) -> str:
        """Return a step's log line, such as the following line. Numbers that are unknown are left out, and the share of
        the time that steps wait for data if it is small.

        step 12/200  loss 3.4120  grad_norm 1.02  tok/s 51,200  mfu 31.2%  mem 1.21GiB  pred/meas 1.04
        """
        parts = [f"step {row['step']}/{self.steps}", f"loss {row['loss']:.4f}"]
        if (norm := row.get("grad_norm")) is not None:
            parts.append(f"grad_norm {norm:.3g}" if norm < 0.01 else f"grad_norm {norm:.2f}")
        parts.append(f"{self.unit}/s {self.items_per_step / step_s:,.0f}")
        if self.peak_flops_per_s > 0:
            parts.append(f"mfu {self.flops_per_step / step_s / self.peak_flops_per_s:.1%}")
        parts.append(f"mem {peak_memory_bytes(self.device) / 2**30:.2f}GiB")
        if data_share >= TOLD_SHARE:
            parts.append(f"data {data_share:.0%}")
        if self.predicted_step_s > 0:
            parts.append(f"pred/meas {self.predicted_step_s / step_s:.2f}")
        return "  ".join(parts)

    def write(self, *rows: Row) -> None:
        """Give rows to the sinks."""
        for sink in self.sinks:
            sink.write(rows)

    def flush(self) -> None:
        """Flush the rows so far to the disk. May be called by another thread."""
        for sink in self.sinks:
            sink.flush()

    def finish(self) -> None:
        """Close the sinks: no more rows come."""
        for sink in self.sinks:
            sink.close()

    def rewind(self, step: int) -> list[Row]:
        """Prepare the sinks for the steps after ``step``, which may have been made before. Return the rows up to it."""
        return next(filter(None, [sink.rewind(step) for sink in self.sinks]), [])
