"""Exclusive-or: one linear layer cannot learn it, two layers can.

    python examples/exclusive_or.py
    torchrun --nproc-per-node 2 examples/exclusive_or.py

The four points (0,0) (0,1) (1,0) (1,1) have the labels 0 1 1 0. No straight line separates the ones from the zeros
(Minsky and Papert, Perceptrons, 1969), so one layer gets at most three of four points right. A hidden layer is enough.
On two ranks each has two of the points; neither could learn the function from these alone.
"""

import torch
from application import Outcome, Training, parallelized, run

import meshwright as mw
from meshwright.data.loaders import TensorLoader
from meshwright.models import MLP, classification_loss

POINTS = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
BATCH = {"inputs": POINTS, "label": torch.tensor([0, 1, 1, 0])}


def training(ranks: int, sizes: tuple[int, ...] = (2, 8, 2)) -> Training:
    """The trainer of an MLP of these layer sizes for this number of ranks; each batch has the four points."""
    torch.manual_seed(0)
    model = MLP(sizes, activation=torch.nn.Tanh)
    return parallelized(model, classification_loss, TensorLoader(BATCH, 4, shuffle=False), mw.Layout(dp=ranks), lr=0.05)


def accuracy_of(model: Training, steps: int) -> float:
    """Train; percent of the four points that the model then gets right."""
    model.run(steps)
    model.trainer.evaluate(BATCH)
    return 100 * float(model.trainer.metrics["correct"]) / len(POINTS)


def main(ranks: int, steps: int = 300, goal: float = 100.0) -> list[Outcome]:
    """Train two layers, and one layer beside them."""
    one_layer, two_layers = (accuracy_of(training(ranks, sizes), steps) for sizes in ((2, 2), (2, 8, 2)))
    return [Outcome("points right", two_layers, "one layer", one_layer, goal)]


if __name__ == "__main__":
    run(main, __doc__)
