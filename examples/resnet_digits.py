"""A small ResNet on real handwritten digits: data-parallel, with batch norm over the global batch.

    python examples/resnet_digits.py
    torchrun --nproc-per-node 2 examples/resnet_digits.py

Each rank loads only its own part of every batch (`trainer.data_shard`, `step(local=True)`). Batch norm still sees the
mean and variance of the whole batch, because they are merged over the ranks: both commands compute the same losses.
"""

import argparse

import torch
from digits import digits

import meshwright as mw
from meshwright.data.loaders import TensorLoader
from meshwright.models import ResNet, classification_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64, help="of the global batch")
    arguments = parser.parse_args()
    train, held_out = digits()
    torch.manual_seed(0)
    model = ResNet(depth=8, width=8, image_channels=1)
    trainer = mw.parallelize(
        model,
        classification_loss,
        {name: tensor[: arguments.batch_size] for name, tensor in train.items()},  # an example of the global batch
        plan=mw.Layout(dp=-1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    )
    assert trainer.optimizer is not None
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, arguments.steps)
    loader = TensorLoader(train, arguments.batch_size, drop_last=True, shard=trainer.data_shard)
    for batch in loader:
        loss = trainer.step(batch, local=True)
        schedule.step()
        if trainer.rank == 0 and (trainer.step_number % 10 == 0 or trainer.step_number == arguments.steps):
            index, count = trainer.data_shard
            print(
                f"step {trainer.step_number}/{arguments.steps}  loss {float(loss):.4f}"
                f"  (rank 0 has part {index + 1} of {count}: {len(batch['label'])} digits)"
            )
        if trainer.step_number == arguments.steps:
            break
    trainer.evaluate(held_out)
    if trainer.rank == 0:
        right = int(trainer.metrics["correct"])
        print(f"held-out digits right: {right / len(held_out['label']):.1%} of {len(held_out['label'])}")


if __name__ == "__main__":
    main()
