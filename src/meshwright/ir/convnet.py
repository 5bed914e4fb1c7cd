"""A convolutional network described by its layers, so that it can be predicted without capturing a model."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from meshwright.errors import LayoutError, Problem, refuse


class NetLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A convolution or dense layer, including its bias, batch norm and activation.

    ``inputs`` and ``outputs`` count channels (features of a dense layer). ``kernel`` is the height and width of the
    filters, ``groups`` the number of channel groups. ``pixels_in`` and ``pixels_out`` are height times width of one
    image before and after the layer; 1 for a dense layer.

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
        """The reduction length: the number of products that are summed for one output."""
        return self.inputs // self.groups * self.kernel**2

    @property
    def weights(self) -> int:
        """Parameters of the filters."""
        return self.outputs * self.depth

    @property
    def parameters(self) -> int:
        """Parameters of the filters, bias and batch norm."""
        return self.weights + self.outputs * (int(self.bias) + 2 * int(self.norm))

    @property
    def forward_flops(self) -> float:
        """FLOPs of one image's forward pass: a multiplication and an addition per weight and output position."""
        return 2.0 * self.weights * self.pixels_out


class ConvNet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Layers in the order in which they run. Poolings and additions are left out: no parameters and few FLOPs."""

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
        """FLOPs of all layers in one image's forward pass."""
        return sum(layer.forward_flops for layer in self.layers)

    def step_flops(self, images: int) -> float:
        """FLOPs of all layers in a training step: three times the forward pass, less the gradient of the images, which
        is not computed."""
        return images * (3.0 * self.forward_flops - self.layers[0].forward_flops)

    def share(self, kind: Literal["convolution", "dense"]) -> tuple[float, float]:
        """The fractions of the forward FLOPs and of the parameters in layers of this kind."""
        chosen = [layer for layer in self.layers if layer.kind == kind]
        flops = sum(layer.forward_flops for layer in chosen) / self.forward_flops
        return flops, sum(layer.parameters for layer in chosen) / self.parameters
