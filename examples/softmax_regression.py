"""Softmax regression: one product of 784 pixels and 10 digits, the smallest model that reads handwriting.

    python examples/softmax_regression.py
    torchrun --nproc-per-node 2 examples/softmax_regression.py

With so few weights, data parallelism is right: each rank computes the gradients of its half of every batch, and the
all-reduce sums 7,850 numbers. The digits are scikit-learn's, enlarged from 8 x 8 to 28 x 28 pixels (MNIST's size).
"""

import torch
from application import Outcome, Training, parallelized, run
from digits import digits, recognised

import meshwright as mw
from meshwright.data.loaders import TensorLoader
from meshwright.models import MLP, classification_loss


def pixels() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Training and held-out digits as vectors: ``inputs`` [n, 784] and ``label`` [n]."""
    train, held_out = ({"inputs": part["image"].flatten(1), "label": part["label"]} for part in digits(28))
    return train, held_out


def training(ranks: int) -> Training:
    """The trainer for this number of ranks, and batches of 64 digits."""
    torch.manual_seed(0)
    loader = TensorLoader(pixels()[0], batch_size=64, drop_last=True)
    return parallelized(MLP((784, 10)), classification_loss, loader, mw.Layout(dp=ranks), lr=1e-2)


def main(ranks: int, steps: int = 300, goal: float = 94.0) -> list[Outcome]:
    """Train, and count the held-out digits that the model gets right."""
    model = training(ranks)
    model.run(steps)
    return [recognised(model.trainer, *pixels(), goal)]


if __name__ == "__main__":
    run(main, __doc__)
