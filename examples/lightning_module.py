"""A LightningModule, unmodified, trains by a plan of Meshwright: it learns to read handwritten digits.

python examples/lightning_module.py --devices 2
torchrun --nproc-per-node 2 examples/lightning_module.py --devices 2 --tp 2
"""

import argparse
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.bridges.lightning import PlannedStrategy


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("right", (self.layers(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1, help="ranks that divide hidden features")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    images, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits))
    train, held_out = torch.utils.data.random_split(data, [1500, 297], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="auto", devices=arguments.devices, max_epochs=arguments.epochs, gradient_clip_val=1.0, logger=False,
        strategy=PlannedStrategy(plan=mw.Layout(dp=-1, tp=arguments.tp)), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(train, batch_size=50), DataLoader(held_out, batch_size=297))
    if trainer.is_global_zero:
        right = 100 * float(trainer.callback_metrics["right"])
        print(f"loss {trainer.callback_metrics['loss']:.4f}; held-out digits right: {right:.1f}%")


if __name__ == "__main__":
    main()
