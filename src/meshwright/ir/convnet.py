"""The convolutional network by its layers: what a prediction needs to know of it when nothing has been captured."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from meshwright.errors import LayoutError, Problem, refuse


class NetLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A convolution, or a dense layer, with what follows it (bias, batch norm, activation).

    ``inputs`` and ``outputs`` are channels (features of a dense layer), ``kernel`` the height and width of the filters,
    ``groups`` the parts in which channels are convolved. ``pixels_in`` and ``pixels_out`` count positions, height times
    width, of one image before and after; 1 for a dense layer.

    Raises:
        LayoutError: a size is impossible or sizes do not divide.
    """

    name: str
    kind: Literal["convolution", "dense"]
    inputs: int
    outputs: int
    kernel: int = 1
    groups: int = 1
    pixels_in: int = 1
    pixels_out: int = 1
    bias: bool = True
    norm: bool = False

    def __post_init__(self) -> None:
        refuse(LayoutError, self._problems())

    def _problems(self) -> Iterator[Problem]:
        for key in ("inputs", "outputs", "kernel", "groups", "pixels_in", "pixels_out"):
            if getattr(self, key) < 1:
                yield self.name, f"{key} is {getattr(self, key)}, less than 1", "give a whole number"
        if self.inputs % self.groups or self.outputs % self.groups:
            problem = f"{self.inputs} and {self.outputs} channels do not divide into {self.groups} groups"
            yield self.name, problem, "correct one of them"

    @property
    def depth(self) -> int:
        """The reduction length: how many products are added up in one output."""
        return self.inputs // self.groups * self.kernel**2

    @property
    def weights(self) -> int:
        """Parameters of the filters."""
        return self.outputs * self.depth

    @property
    def parameters(self) -> int:
        """Parameters with bias and batch norm."""
        return self.weights + self.outputs * (int(self.bias) + 2 * int(self.norm))

    @property
    def forward_flops(self) -> float:
        """FLOPs of one image's forward pass: a product and an addition for each weight and output position."""
        return 2.0 * self.weights * self.pixels_out


class ConvNet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Layers in the order in which they run; poolings and additions between them have no parameters and few FLOPs."""

    name: str
    image: tuple[int, int]
    """Channels of an image, and its height (and width) in pixels."""
    layers: tuple[NetLayer, ...]
    source: str = ""

    @property
    def parameters(self) -> int:
        """Parameters of the whole network."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def forward_flops(self) -> float:
        """FLOPs of the products of one image's forward pass."""
        return sum(layer.forward_flops for layer in self.layers)

    def step_flops(self, images: int) -> float:
        """FLOPs of the products of a training step: three times the forward pass, but that no gradient of the images
        is computed."""
        return images * (3.0 * self.forward_flops - self.layers[0].forward_flops)

    def share(self, kind: Literal["convolution", "dense"]) -> tuple[float, float]:
        """What part of the forward FLOPs, and of the parameters, layers of this kind have."""
        chosen = [layer for layer in self.layers if layer.kind == kind]
        flops = sum(layer.forward_flops for layer in chosen) / self.forward_flops
        return flops, sum(layer.parameters for layer in chosen) / self.parameters
