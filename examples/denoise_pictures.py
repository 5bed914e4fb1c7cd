"""A U-Net denoises photographs of 2048 x 2048 pixels, one at a time, on ranks that share each of them.

    python examples/denoise_pictures.py
    torchrun --nproc-per-node 4 examples/denoise_pictures.py

A batch is one picture, so that data parallelism ends at one rank: the plan says so, and cuts height and width in two.
Each rank makes only its own part of every picture (`trainer.input_parts`, `step(local=True)`), and holds only its part
of what the network makes of it. The pictures are scikit-learn's two photographs, enlarged, with Gaussian noise; the
network learns to say what the noise was.
"""

import argparse
import os

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images

import meshwright as mw
from meshwright.models import UNet

NOISE = 0.2  # standard deviation, where colours are 0 to 1
SPATIAL = {1: (1,), 2: (2,), 4: (2, 2), 8: (4, 2)}


def denoising_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean squared error of the noise that is found in a picture."""
    return F.mse_loss(model(batch["image"]), batch["noise"])


def picture(photographs: list[np.ndarray], step: int, size: int, part: tuple[slice, ...]) -> dict[str, torch.Tensor]:
    """Rows and columns of a crop, enlarged to ``size`` pixels: ``image`` [1, 3, y, x], noisy, and its ``noise``."""
    photograph, (rows, columns) = photographs[step % len(photographs)], part[2:]
    side = min(photograph.shape[:2])
    left = step * 37 % (photograph.shape[1] - side + 1)
    y, x = (np.arange(span.start, span.stop) * side // size for span in (rows, columns))
    clean = photograph[y][:, x + left].astype(np.float32).transpose(2, 0, 1) / 255
    by_row = (np.random.default_rng((step, row)).normal(0, NOISE, (3, size)) for row in range(rows.start, rows.stop))
    noise = np.stack([row[:, columns].astype(np.float32) for row in by_row], axis=1)  # of a row: any part can be made
    return {"image": torch.from_numpy(clean + noise)[None], "noise": torch.from_numpy(noise)[None]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", type=int, default=2048, help="height and width of the pictures, in pixels")
    arguments = parser.parse_args()
    photographs = list(load_sample_images().images)  # [y, x, 3], 0 to 255
    torch.manual_seed(0)
    with torch.device("meta"):  # shapes are all that is needed here
        example = {name: torch.empty(1, 3, arguments.size, arguments.size) for name in ("image", "noise")}
    trainer = mw.parallelize(
        UNet(depth=2, width=8, classes=3),
        denoising_loss,
        example,
        plan=mw.Layout(spatial=SPATIAL[int(os.environ.get("WORLD_SIZE", "1"))]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    )
    part = trainer.input_parts["image"]
    if trainer.rank == 0:
        print(trainer.plan.explain())
        print(f"rank 0 makes rows {part[2].start} to {part[2].stop}, columns {part[3].start} to {part[3].stop}")
    for step in range(arguments.steps):
        loss = trainer.step(picture(photographs, step, arguments.size, part), local=True)
        if trainer.rank == 0:
            print(f"step {step + 1}/{arguments.steps}  loss {float(loss):.5f}")


if __name__ == "__main__":
    main()
