"""metrics.prom: the newest number of each metric, in Prometheus's text format, for node_exporter's text files."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.ir import files, prometheus
from meshwright.runtime.sinks.base import Row, Sink, numbers, warned


class Prometheus(Sink):
    """Replaces a file as a whole, so that a scraper never reads half of one."""

    name = "prometheus"

    def __init__(self, directory: Path) -> None:
        self._path, self._labels = directory / "metrics.prom", {"run": directory.name}
        self._values: dict[str, float] = {}

    def write(self, rows: Sequence[Row]) -> None:
        """Write the newest numbers."""
        for row in rows:
            self._values |= {"step": float(row["step"]), **numbers(row)}
        if self._values:
            with warned(self):
                files.write_atomically(self._path, prometheus.text(self._values, self._labels).encode())
