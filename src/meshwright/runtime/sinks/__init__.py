"""Where a run's metrics go: metrics.jsonl always, and what ``train.metrics`` names besides."""

from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.runtime.sinks.base import Row, Sink, numbers
from meshwright.runtime.sinks.jsonl import Jsonl
from meshwright.runtime.sinks.mlflow import MLflow
from meshwright.runtime.sinks.prometheus import Prometheus
from meshwright.runtime.sinks.tensorboard import TensorBoard
from meshwright.runtime.sinks.wandb import WeightsAndBiases

__all__ = [
    "Jsonl",
    "MLflow",
    "Prometheus",
    "Row",
    "Sink",
    "TensorBoard",
    "WeightsAndBiases",
    "numbers",
    "opened",
]  # fmt: skip

_KINDS: dict[str, Callable[[Path], Sink]] = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow, "prometheus": Prometheus,
}  # fmt: skip


def opened(names: Sequence[str], directory: Path) -> tuple[Sink, ...]:
    """The sinks of a run: metrics.jsonl, and those of these names. Their files lie in the run's directory.

    Raises:
        LaunchError: a sink's package is not installed; it names the extra that brings it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    return (Jsonl(directory / "metrics.jsonl"), *(_KINDS[name](directory) for name in dict.fromkeys(names)))
