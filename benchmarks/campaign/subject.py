"""A model of the user's own, with mistakes that can be asked for."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Subject(nn.Module):
    """Two layers. With ``fails``, the forward pass raises an error."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.fails = fails

    def forward(self, values: Tensor) -> Tensor:
        if self.fails == "exception":
            raise ValueError("the model has a mistake")
        if self.fails == "shape":
            values = values[:, :7]
        if self.fails == "import":
            import no_such_module  # type: ignore[import-not-found] # noqa: F401
        result: Tensor = self.layers(values)
        return result


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of images or rows of numbers, by the mean of each eighth."""
    values = batch["image"] if "image" in batch else batch["inputs"]
    rows = values.reshape(len(values), 8, -1).mean(2)
    result: Tensor = torch.nn.functional.cross_entropy(model(rows), batch["label"])
    return result
