"""LeNet on real handwritten digits: convolutions data-parallel and dense layers tensor-parallel, on the same ranks.

    python examples/lenet_digits.py
    torchrun --nproc-per-node 2 examples/lenet_digits.py

Convolutions have few weights and large activations, dense layers many weights and small activations. So the first are
split over the batch and the second over their features, on one axis `tp` of the mesh (Krizhevsky, "One weird trick for
parallelizing convolutional neural networks", 2014). Between the two halves the activations are gathered. The digits are
scikit-learn's, enlarged from 8 x 8 to 28 x 28 pixels (MNIST's size).
"""

import torch
from application import Outcome, Training, parallelized, run
from digits import digits, recognised

import meshwright as mw
from meshwright.data.loaders import TensorLoader
from meshwright.models import LeNet, classification_loss


def training(ranks: int) -> Training:
    """The trainer for this number of ranks, and batches of 64 digits."""
    torch.manual_seed(0)
    loader = TensorLoader(digits(28)[0], batch_size=64, drop_last=True)
    layout = mw.Layout(tp=ranks, pin={"convolutions*": "batch@tp"})
    return parallelized(LeNet(), classification_loss, loader, layout, lr=3e-3)


def main(ranks: int, steps: int = 300, goal: float = 96.0) -> list[Outcome]:
    """Train, and count the held-out digits that the model gets right."""
    model = training(ranks)
    model.run(steps)
    return [recognised(model.trainer, *digits(28), goal)]


if __name__ == "__main__":
    run(main, __doc__)
