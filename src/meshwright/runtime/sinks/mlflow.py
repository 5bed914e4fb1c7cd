"""MLflow: ``mlflow ui --backend-store-uri sqlite:///RUN_DIR/mlflow.db`` shows the curves, or the user's own server."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.runtime.sinks.base import Row, Sink, numbers, package, warned

EXPERIMENT = "meshwright"
BATCH = 1000
"""The largest number of metrics that MLflow takes at once."""


class MLflow(Sink):
    """Logs numbers to MLflow: into the run's directory, unless the user has set MLflow's tracking address."""

    name = "mlflow"

    def __init__(self, directory: Path) -> None:
        self._library: Any = package("mlflow", "MLflow", "mlflow")
        self._directory, self._run = directory, ""
        self._client: Any = None

    def write(self, rows: Sequence[Row]) -> None:
        """Log the numbers of each step."""
        with warned(self):
            if self._client is None:
                self._open()
            kind, now = self._library.entities.Metric, round(1000 * time.time())
            metrics = [kind(name, value, now, row["step"]) for row in rows for name, value in numbers(row).items()]
            for begin in range(0, len(metrics), BATCH):
                self._client.log_batch(self._run, metrics=metrics[begin : begin + BATCH])

    def _open(self) -> None:
        chosen = self._library.is_tracking_uri_set()
        folder = self._directory.absolute()
        uri = self._library.get_tracking_uri() if chosen else f"sqlite:///{folder / 'mlflow.db'}"
        client = self._library.MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(EXPERIMENT)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            place = None if chosen else (folder / "mlruns").as_uri()  # MLflow's own choice is the current folder
            number = client.create_experiment(EXPERIMENT, artifact_location=place)
        # A run that goes on is a further run of MLflow, with the same name: its steps may overlap.
        self._run = client.create_run(number, run_name=self._directory.name).info.run_id
        self._client = client

    def close(self) -> None:
        """Mark the run of MLflow as finished."""
        if self._client is not None:
            with warned(self):
                self._client.set_terminated(self._run)
            self._client = None
