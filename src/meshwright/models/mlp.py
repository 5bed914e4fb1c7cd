"""A multi-layer perceptron, and the dense layers at the end of other networks."""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers of the given sizes with an activation between them (none after the last).

    ``MLP((2, 2))`` has one layer, ``MLP((2, 8, 2))`` has two. Inputs of any shape [b, ...] are flattened to [b,
    sizes[0]].

    Raises:
        ValueError: fewer than two sizes, or a size below 1.
    """

    def __init__(self, sizes: Sequence[int], activation: type[nn.Module] = nn.ReLU, bias: bool = True) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(f"an MLP needs at least two sizes of at least 1, not {tuple(sizes)}")
        self.layers = dense_layers(sizes, activation=activation, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``inputs`` [b, ...] with ``sizes[0]`` values per sample to [b, sizes[-1]]."""
        return cast(Tensor, self.layers(inputs.flatten(1)))


def dense_layers(
    sizes: Sequence[int], dropout: float = 0.0, activation: type[nn.Module] = nn.ReLU, bias: bool = True
) -> nn.Sequential:
    """Dense layers with an activation between them, and dropout before all but the last if ``dropout`` is above 0."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes[:-1]):
        layers += [nn.Dropout(dropout)] * (dropout > 0)
        layers += [nn.Linear(inputs, outputs, bias=bias), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1], bias=bias))
