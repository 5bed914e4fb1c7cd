"""AlexNet on two ranks, as on the two GPUs of 2012: each has half of the channels, and half of the dense features.

    python examples/alexnet_2012.py
    torchrun --nproc-per-node 2 examples/alexnet_2012.py

Krizhevsky, Sutskever and Hinton ("ImageNet Classification with Deep Convolutional Neural Networks", 2012, section 3.5)
gave each GPU one tower. Convolutions 2, 4 and 5 read only the channels of their own tower (`groups=2`); the GPUs
exchange channels before convolution 3, and features between the dense layers. Here the model is plain PyTorch, and the
planner finds that split: the printed plan cuts convolutions 1 and 3 by filters, 2, 4 and 5 by their groups of channels.
The towers are narrow, and the pictures are scikit-learn's digits, enlarged to 64 x 64 pixels.
"""

import torch
from application import Outcome, Training, parallelized, run
from digits import digits, recognised

import meshwright as mw
from meshwright.data.loaders import TensorLoader
from meshwright.models import AlexNet, classification_loss


def training(ranks: int) -> Training:
    """The trainer for this number of ranks, and batches of 64 digits."""
    torch.manual_seed(0)
    loader = TensorLoader(digits(64)[0], batch_size=64, drop_last=True)
    model = AlexNet(64, 1, classes=10, channels=(24, 64, 96, 96, 64), dense=(256, 256), dropout=0.5, towers=2)
    return parallelized(model, classification_loss, loader, mw.Layout(tp=ranks), lr=2e-3)


def main(ranks: int, steps: int = 400, goal: float = 85.0) -> list[Outcome]:
    """Train, and count the held-out digits that the model gets right."""
    model = training(ranks)
    model.run(steps)
    return [recognised(model.trainer, *digits(64), goal)]


if __name__ == "__main__":
    run(main, __doc__)
