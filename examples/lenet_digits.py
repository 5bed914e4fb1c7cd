"""LeNet on real handwritten digits: convolutions data-parallel and dense layers tensor-parallel, on the same ranks.

    python examples/lenet_digits.py
    torchrun --nproc-per-node 2 examples/lenet_digits.py

Convolutions have few weights and large activations, dense layers many weights and small activations. So the first are
split over the batch and the second over their features, on one axis `tp` of the mesh (Krizhevsky, "One weird trick for
parallelizing convolutional neural networks", 2014). Between the two halves the activations are gathered.
"""

import argparse

import torch
from digits import digits

import meshwright as mw
from meshwright.data.loaders import TensorLoader
from meshwright.models import LeNet, classification_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--goal", type=float, default=0.97, help="the accuracy on held-out digits that is asserted")
    arguments = parser.parse_args()
    train, held_out = digits()
    loader = TensorLoader(train, batch_size=64, drop_last=True)
    torch.manual_seed(0)
    model = LeNet(image_size=8, channels=(32, 64), dense=(256,), kernel=3)
    trainer = mw.parallelize(
        model,
        classification_loss,
        next(iter(loader)),
        plan=mw.Layout(tp=-1, pin={"convolutions*": "batch@tp"}),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    )
    if trainer.rank == 0:
        print(trainer.plan.explain())
    assert trainer.optimizer is not None
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, arguments.steps)
    for batch in loader:
        loss = trainer.step(batch)
        schedule.step()
        if trainer.rank == 0 and trainer.step_number % 50 == 0:
            print(f"step {trainer.step_number}/{arguments.steps}  loss {float(loss):.4f}")
        if trainer.step_number == arguments.steps:
            break
    trainer.evaluate(held_out)
    accuracy = float(trainer.metrics["correct"]) / len(held_out["label"])
    if trainer.rank == 0:
        print(f"held-out digits right: {accuracy:.1%} of {len(held_out['label'])}")
    assert accuracy >= arguments.goal, f"{accuracy:.1%} is less than {arguments.goal:.0%}"


if __name__ == "__main__":
    main()
