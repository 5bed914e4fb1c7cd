"""Real images for the examples: the handwritten digits that come with scikit-learn."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor


def digits() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Training and held-out digits: ``image`` [n, 1, 8, 8] float32 from 0 to 1, ``label`` [n] int64.

    1,437 train; every fifth of all 1,797 is held out (360).
    """
    data = load_digits()
    image = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    label = torch.as_tensor(data.target, dtype=torch.int64)
    held_out = torch.arange(len(label)) % 5 == 0
    return (
        {"image": image[~held_out], "label": label[~held_out]},
        {"image": image[held_out], "label": label[held_out]},
    )
