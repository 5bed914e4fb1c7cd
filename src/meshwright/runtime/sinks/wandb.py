"""Weights & Biases, offline: ``wandb sync RUN_DIR/wandb/offline-run-*`` sends the curves when the user wants it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.runtime.sinks.base import Row, Sink, kept_id, numbers, package, warned


class WeightsAndBiases(Sink):
    """Logs numbers into files of Weights & Biases. Nothing is sent."""

    name = "wandb"

    def __init__(self, directory: Path) -> None:
        self._library: Any = package("wandb", "Weights & Biases", "wandb")
        self._directory, self._run, self._last = directory, None, -1

    def write(self, rows: Sequence[Row]) -> None:
        """Log the numbers of each step. Those of an evaluation join the numbers of its step, which was the last."""
        with warned(self):
            run = self._opened()
            for row in rows:
                run.log({**numbers(row), "trainer/step": row["step"]}, step=max(row["step"], self._last))
                self._last = max(row["step"], self._last)

    def _opened(self) -> Any:
        if self._run is None:
            self._run = self._library.init(
                mode="offline", dir=str(self._directory), project="meshwright", name=self._directory.name,
                id=kept_id(self._directory / "wandb.id"), resume="allow", settings={"silent": True, "console": "off"},
            )  # fmt: skip
        return self._run

    def close(self) -> None:
        """Finish the run of Weights & Biases."""
        if self._run is not None:
            with warned(self):
                self._run.finish()
            self._run = None
