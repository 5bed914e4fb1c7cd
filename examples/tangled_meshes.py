"""A network finds the cells of large meshes that will be tangled; each mesh is shared by all ranks.

    python examples/tangled_meshes.py
    torchrun --nproc-per-node 2 examples/tangled_meshes.py
    torchrun --nproc-per-node 4 examples/tangled_meshes.py --size 1024

Simulations of flowing material move the nodes of a mesh. A cell is tangled when a corner turns inside out: the area
that its two edges span there is no longer positive. A mesh is a picture here: a pixel for each node, with its offset
from the regular mesh, and its velocity, as channels. A label says whether the cell of that node is tangled after the
next time step. Pictures are too large for several to a batch, so that the ranks cut height and width, as Dryden et al.
did for a mesh-tangling data set ("Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism",
2019). Few cells are tangled, so that quality
is the F1 score, not accuracy.
"""

from itertools import cycle

import torch
import torch.nn.functional as F
from application import Outcome, Training, layout_of, parallelized, run
from torch import Tensor, nn

import meshwright as mw

LAYOUTS = {ranks: mw.Layout(spatial=parts) for ranks, parts in ((1, (1,)), (2, (2,)), (4, (2, 2)))}
TIME_STEP, WEIGHT, MESHES = 1.0, 5.0, 16


def mesh(number: int, size: int) -> dict[str, Tensor]:
    """Mesh ``number``: ``image`` [1, 4, size, size], offsets and velocities in widths of a cell, and ``label``."""
    random = torch.Generator().manual_seed(number)
    coarse = torch.randn(1, 4, size // 8, size // 8, generator=random)
    image = 0.3 * F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
    image = image + 0.2 * torch.randn(1, 4, size, size, generator=random)
    return {"image": image, "label": tangled(image[0, :2] + TIME_STEP * image[0, 2:])[None].long()}


def tangled(offset: Tensor) -> Tensor:
    """Which cells [y, x] have a corner of no positive area. The cell of node (y, x) ends at (y + 1, x + 1); there are
    none at the last row and column. ``offset`` [2, y, x]: of each node along x and y, in widths of a cell."""
    size = offset.shape[-1]
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    node = offset + torch.stack([x, y])
    corners = [node[:, :-1, :-1], node[:, :-1, 1:], node[:, 1:, 1:], node[:, 1:, :-1]]  # around the cell
    worst = torch.full((size - 1, size - 1), float("inf"))
    for before, here, after in zip(corners[-1:] + corners[:-1], corners, corners[1:] + corners[:1], strict=True):
        (ax, ay), (bx, by) = after - here, before - here
        worst = torch.minimum(worst, ax * by - ay * bx)
    return F.pad(worst <= 0, (0, 1, 0, 1))


def tangle_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy over the cells, in which tangled cells weigh more; numbers of cells for the F1 score."""
    logit, label = model(batch["image"])[:, 0], batch["label"]
    weight = 1 + (WEIGHT - 1) * label
    loss = (F.binary_cross_entropy_with_logits(logit, label.float(), reduction="none") * weight).mean()
    predicted = (logit > 0).long()
    return loss, {"both": (predicted * label).sum(), "found": predicted.sum(), "tangled": label.sum()}


def network() -> nn.Module:
    """A 3x3 convolution, which sees the neighbours of a node, and two products at each node; all keep the size."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU(), nn.Conv2d(32, 1, 1)
    )


def training(ranks: int, size: int = 256) -> Training:
    """The trainer for this number of ranks, and batches of one of 16 meshes."""
    torch.manual_seed(0)
    meshes = cycle([mesh(number, size) for number in range(MESHES)])
    return parallelized(network(), tangle_loss, meshes, layout_of(ranks, LAYOUTS), lr=2e-2)


def main(ranks: int, steps: int = 300, size: int = 256, goal: float = 80.0) -> list[Outcome]:
    """Train, and compute the F1 score (in percent) of four meshes that were not trained on."""
    model = training(ranks, size)
    model.run(steps)
    count = dict.fromkeys(("both", "found", "tangled"), 0)
    for number in range(4):
        model.trainer.evaluate(mesh(-1 - number, size))
        count = {name: count[name] + int(model.trainer.metrics[name]) for name in count}
    share = count["tangled"] / (4 * (size - 1) ** 2)
    if model.speaks:
        print(f"{share:.1%} of the cells are tangled; of {count['found']} that were found, {count['both']} are right")
    score = 200 * count["both"] / (count["found"] + count["tangled"])
    return [Outcome("F1 of tangled cells", score, "every cell is tangled", 200 * share / (1 + share), goal)]


if __name__ == "__main__":
    run(main, __doc__)
