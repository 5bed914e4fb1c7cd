"""Sobel's edges of a photograph by hand, and a 3x3 convolution that learns them, with the pictures cut in two.

    python examples/sobel_edges.py
    torchrun --nproc-per-node 2 examples/sobel_edges.py

By hand, the edge of a pixel along x is the weighted sum of three pixels at its right minus that of three at its left
(weights 1, 2, 1), and along y the same from below and above. On two ranks each has half of the rows, and the pixels at
the cut need a row of the other half. The plan fetches that row (a halo); without it, the edges are wrong there, as the
program shows. The convolution starts with random weights, learns from the edges of noise, in which every pattern
occurs, and then finds those of a photograph.
"""

from itertools import repeat

import torch
import torch.nn.functional as F
from application import Outcome, Training, layout_of, parallelized, run
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import DataError

ROWS, COLUMNS = 426, 640
LAYOUTS = {1: mw.Layout(), 2: mw.Layout(spatial=(2,)), 4: mw.Layout(spatial=(2, 2))}


def photograph() -> Tensor:
    """A grey photograph [1, 1, 426, 640], from 0 to 1. Raise a DataError if scikit-learn or pillow is missing."""
    try:
        from sklearn.datasets import load_sample_image

        colours = load_sample_image("china.jpg")
    except ImportError as error:
        raise DataError(f"no photograph: {error}", remedy="pip install 'meshwright[demo]'") from None
    return torch.tensor(colours[:ROWS], dtype=torch.float32).mean(dim=-1)[None, None] / 255


def by_hand(picture: Tensor) -> dict[str, Tensor]:
    """A picture [1, 1, y, x], which zeros surround, and its ``edges`` [1, 2, y, x]: sums of shifted pictures."""
    rows, columns = picture.shape[2:]
    padded = F.pad(picture[0, 0], (1, 1, 1, 1))

    def at(down: int, right: int) -> Tensor:
        return padded[1 + down : 1 + down + rows, 1 + right : 1 + right + columns]

    along_x = at(-1, 1) - at(-1, -1) + 2 * (at(0, 1) - at(0, -1)) + at(1, 1) - at(1, -1)
    along_y = at(1, -1) - at(-1, -1) + 2 * (at(1, 0) - at(-1, 0)) + at(1, 1) - at(-1, 1)
    return {"image": picture, "edges": torch.stack([along_x, along_y])[None]}


def edge_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean squared difference between the edges that the model finds, and those by hand."""
    return F.mse_loss(model(batch["image"]), batch["edges"])


def training(ranks: int) -> Training:
    """The trainer for this number of ranks; each batch is the same picture of noise."""
    torch.manual_seed(0)
    batch = by_hand(torch.rand(1, 1, ROWS, COLUMNS) - 0.5)
    model = nn.Conv2d(1, 2, 3, padding=1, bias=False)
    return parallelized(model, edge_loss, repeat(batch), layout_of(ranks, LAYOUTS), lr=0.1)


def main(ranks: int, steps: int = 200, goal: float = 0.01) -> list[Outcome]:
    """Train, and compare the edges of the photograph with those by hand: the root of the mean squared difference."""
    batch = by_hand(photograph())
    model = training(ranks)
    halves = [by_hand(half)["edges"] for half in batch["image"].split(ROWS // 2, dim=2)]
    wrong = (torch.cat(halves, dim=2) - batch["edges"]).abs().amax(dim=(0, 1, 3)) > 1e-6
    if model.speaks:
        print(f"halves without a row of each other: wrong edges in rows {wrong.nonzero().flatten().tolist()}")
    untrained = float(model.trainer.evaluate(batch)) ** 0.5
    model.run(steps)
    error = float(model.trainer.evaluate(batch)) ** 0.5
    return [Outcome("error of the photograph's edges", error, "untrained", untrained, goal, unit="", lower=True)]


if __name__ == "__main__":
    run(main, __doc__)
