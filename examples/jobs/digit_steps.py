"""The steps of the job graphs in this folder: real digits for training, the accuracy of weights, and their export."""

from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, Any]


def prepare() -> dict[str, Arrays]:
    """scikit-learn's handwritten digits, enlarged from 8 x 8 to 28 x 28 pixels: ``inputs`` [n, 784] from 0 to 1 and
    ``label`` [n]. Every fifth digit is held out.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    nearest = np.arange(28) * 8 // 28
    pixels = (data.images[:, nearest][:, :, nearest].reshape(-1, 784) / 16).astype(np.float32)
    label, held_out = data.target.astype(np.int64), np.arange(len(pixels)) % 5 == 0
    return {
        "train": {"inputs": pixels[~held_out], "label": label[~held_out]},
        "held_out": {"inputs": pixels[held_out], "label": label[held_out]},
    }


def accuracy(weights: Path, held_out: Arrays) -> float:
    """The share of held-out digits that a model of dense layers with ReLU between them gets right."""
    layers = dict(np.load(weights))
    names = sorted({name.rpartition(".")[0] for name in layers})
    values = held_out["inputs"].astype(np.float64)
    for name in names:
        values = values @ layers[f"{name}.weight"].T + layers[f"{name}.bias"]
        values = np.maximum(values, 0) if name != names[-1] else values
    return float(np.mean(values.argmax(axis=1) == held_out["label"]))


def evaluate(held_out: Arrays, **weights: Path) -> dict[str, float]:
    """The accuracy of each model, by the name of its input."""
    return {name: accuracy(path, held_out) for name, path in sorted(weights.items())}


def export(accuracies: dict[str, float], model: Path, **weights: Path) -> None:
    """Write the weights of the most accurate model (the first of equal ones)."""
    best = max(sorted(accuracies), key=lambda name: accuracies[name])
    model.write_bytes(weights[best].read_bytes())
