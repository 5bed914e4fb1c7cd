"""Curves for TensorBoard: ``tensorboard --logdir RUN_DIR/tensorboard`` shows them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.runtime.sinks.base import Row, Sink, numbers, package, warned


class TensorBoard(Sink):
    """Writes scalars as event files, by PyTorch's own writer."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        self._kind: Any = package("torch.utils.tensorboard", "TensorBoard", "tensorboard").SummaryWriter
        self._folder, self._after = directory / "tensorboard", 0
        self._writer: Any = None

    def write(self, rows: Sequence[Row]) -> None:
        """Add a scalar for each number."""
        with warned(self):
            if self._writer is None:  # what is there of steps that come again is hidden
                self._writer = self._kind(log_dir=str(self._folder), purge_step=self._after + 1)
            for row in rows:
                for name, value in numbers(row).items():
                    self._writer.add_scalar(name, value, row["step"])
            self._writer.flush()

    def rewind(self, step: int) -> list[Row]:
        """Hide what was written of later steps."""
        self.close()
        self._after = step
        return []

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            with warned(self):
                self._writer.close()
            self._writer = None
