"""Real images for the examples: scikit-learn's handwritten digits, and how well a model recognises them."""

import torch
import torch.nn.functional as F
from application import Outcome
from torch import Tensor

import meshwright as mw
from meshwright.errors import DataError


def digits(size: int = 8) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Training and held-out digits: ``image`` [n, 1, size, size] float32 from 0 to 1, ``label`` [n] int64.

    1,437 train; every fifth of all 1,797 is held out (360). They have 8 x 8 pixels; a larger ``size`` enlarges them.
    Raise a DataError if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "scikit-learn, which has the digits, is not installed", remedy="pip install 'meshwright[demo]'"
        ) from None
    data = load_digits()
    image = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    if size != 8:
        image = F.interpolate(image, size=(size, size), mode="bilinear", align_corners=False)
    label = torch.as_tensor(data.target, dtype=torch.int64)
    held_out = torch.arange(len(label)) % 5 == 0
    return (
        {"image": image[~held_out], "label": label[~held_out]},
        {"image": image[held_out], "label": label[held_out]},
    )


def recognised(trainer: mw.Trainer, train: dict[str, Tensor], held_out: dict[str, Tensor], goal: float) -> Outcome:
    """Percent of the held-out digits that the model gets right, beside a guess: the training set's most frequent."""
    trainer.evaluate(held_out)
    right = 100 * float(trainer.metrics["correct"]) / len(held_out["label"])
    guess = 100 * float((held_out["label"] == train["label"].mode().values).float().mean())
    return Outcome("held-out digits right", right, "always the most frequent digit", guess, goal)
