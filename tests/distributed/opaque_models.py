"""Models with a part that capture refuses, and a batch for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, BATCH = 8, 4, 8


class Cubed(torch.autograd.Function):
    """A function with a gradient of its own, whose forward reads a value."""

    @staticmethod
    def forward(context: Any, x: Tensor, scale: Tensor) -> Tensor:
        context.save_for_backward(x, scale)
        return x**3 * float(scale)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = context.saved_tensors
        return grad * 3 * x**2 * scale, (grad * x**3).sum()


class OwnFunction(nn.Module):
    """Computes each sample by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return Cubed.apply(x, self.scale)


class Halving(nn.Module):
    """Halves the batch until its norm is small: every sample depends on all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        while x.norm() > 1:
            x = x / 2
        return x


class Sparse(nn.Module):
    """Multiplies each sample by a sparse matrix with trained values."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(2 * WIDTH))
        places = [(row, (row * step + 1) % WIDTH) for row in range(WIDTH) for step in (1, 3)]
        self.register_buffer("places", torch.tensor(places).t().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        places: Any = self.places
        matrix = torch.sparse_coo_tensor(places, self.values, (WIDTH, WIDTH), check_invariants=False)
        return torch.sparse.mm(matrix, x.t()).t()


class Clipped(nn.Module):
    """Reads a value of the batch (`.item()`), and returns two tensors, one of them of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, most: float) -> dict[str, Tensor]:
        largest = x.abs().max().item()
        y = self.layer(x * min(1.0, most / largest))
        return {"y": y, "signs": (y > 0).to(torch.int64)}


class Dropped(nn.Module):
    """Draws random numbers, behind a branch on values. Linear in its weight."""

    def __init__(self, probability: float = 0.5) -> None:
        super().__init__()
        self.weight, self.probability = nn.Parameter(torch.randn(WIDTH, WIDTH)), probability

    def forward(self, x: Tensor) -> Tensor:
        if not x.isfinite().all():
            return x
        return F.dropout(x @ self.weight, self.probability, self.training)


class Normed(nn.Module):
    """Batch norm, whose buffers change, behind a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if float(x.detach().abs().sum()) > 0 else x


class Recomputed(nn.Module):
    """Runs its layers again in backward, which then need the rank's parameters."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad or not x.isfinite().all():
            plain: Tensor = self.layers(x)
            return plain
        result: Tensor = checkpoint(self.layers, x, use_reentrant=self.reentrant)
        return result


class Turned(nn.Module):
    """Gives the samples to its part in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = OwnFunction()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x.t()).t()
        return result


class Flattened(Turned):
    """Gives two rows of each sample to its part."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x.reshape(-1, WIDTH // 2)).reshape(-1, WIDTH)
        return result


class Model(nn.Module):
    """A part between two layers, called `calls` times."""

    def __init__(self, part: nn.Module, calls: int = 1, **options: Any) -> None:
        super().__init__()
        self.up, self.part, self.down = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, CLASSES)
        self.calls, self.options = calls, options

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for _ in range(self.calls):
            y = self.part(x, **self.options)
            x = y["y"] * (1 + 0.1 * y["signs"]) if isinstance(y, dict) else y
        return self.down(torch.tanh(x))


PARTS: dict[str, Callable[[], nn.Module]] = {
    "function": lambda: Model(OwnFunction()),
    "loop": lambda: Model(Halving()),
    "sparse": lambda: Model(Sparse()),
    "item": lambda: Model(Clipped(), most=0.5),
    "norm": lambda: Model(Normed()),
    "twice": lambda: Model(OwnFunction(), calls=2),
    "reentrant": lambda: Model(Recomputed(True)),
    "recomputed": lambda: Model(Recomputed(False)),
    "turned": lambda: Model(Turned()),
    "flattened": lambda: Model(Flattened()),
}
"""What a part does that capture refuses, and a model with it."""
ROW_WISE = ("function", "sparse", "twice", "flattened")


def make_part(name: str) -> nn.Module:
    torch.manual_seed(1)
    return PARTS[name]()


def batch(size: int = BATCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "x": torch.randn(size, WIDTH, generator=generator),
        "label": torch.randint(CLASSES, (size,), generator=generator),
    }


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"])


def loss_fn_of_run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["inputs"]), batch["label"])
