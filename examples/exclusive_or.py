"""Exclusive-or: one linear layer cannot learn it, two layers can.

    python examples/exclusive_or.py

The four points (0,0) (0,1) (1,0) (1,1) have the labels 0 1 1 0. No straight line separates the ones from the zeros
(Minsky and Papert, Perceptrons, 1969), so one layer gets at most three of four points right. A hidden layer is enough.
"""

import argparse

import torch

import meshwright as mw
from meshwright.models import MLP, classification_loss

POINTS = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
BATCH = {"inputs": POINTS, "label": torch.tensor([0, 1, 1, 0])}


def accuracy_of(sizes: tuple[int, ...], steps: int) -> float:
    """Train an MLP of these layer sizes; the part of the four points that it then gets right."""
    torch.manual_seed(0)
    trainer = mw.parallelize(
        MLP(sizes, activation=torch.nn.Tanh),
        classification_loss,
        BATCH,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    )
    for _ in range(steps):
        trainer.step(BATCH)
    loss = trainer.evaluate(BATCH)
    accuracy = float(trainer.metrics["correct"]) / len(POINTS)
    if trainer.rank == 0:
        layers = " -> ".join(map(str, sizes))
        print(f"{layers:<12}  loss {float(loss):.4f}  accuracy {accuracy:.0%}")
    return accuracy


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=200)
    steps = arguments.parse_args().steps
    assert accuracy_of((2, 2), steps) <= 0.75
    assert accuracy_of((2, 8, 2), steps) == 1.0


if __name__ == "__main__":
    main()
