"""GoogLeNet, narrow, on real handwritten digits: nine modules of four branches, data-parallel.

    python examples/googlenet_digits.py
    torchrun --nproc-per-node 2 examples/googlenet_digits.py

The network has 57 convolutions, each with a batch norm (Szegedy et al., "Going Deeper with Convolutions", 2015), and an
eighth of the paper's channels. Each rank takes half of every batch; batch norm merges mean and variance over the ranks,
so that both commands compute the same losses up to rounding. The digits are scikit-learn's, enlarged to 32 x 32 pixels.
"""

import torch
from application import Outcome, Training, parallelized, run
from digits import digits, recognised

import meshwright as mw
from meshwright.data.loaders import TensorLoader
from meshwright.models import GoogLeNet, classification_loss


def training(ranks: int) -> Training:
    """The trainer for this number of ranks, and batches of 32 digits."""
    torch.manual_seed(0)
    loader = TensorLoader(digits(32)[0], batch_size=32, drop_last=True)
    model = GoogLeNet(width=8, image_channels=1, classes=10)
    return parallelized(model, classification_loss, loader, mw.Layout(dp=ranks), lr=3e-3)


def main(ranks: int, steps: int = 220, goal: float = 90.0) -> list[Outcome]:
    """Train, and count the held-out digits that the model gets right."""
    model = training(ranks)
    model.run(steps)
    return [recognised(model.trainer, *digits(32), goal)]


if __name__ == "__main__":
    run(main, __doc__)
