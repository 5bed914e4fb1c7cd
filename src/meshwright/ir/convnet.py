"""A convolutional network described by its layers, so that its step time can be predicted without a captured model."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from meshwright.errors import LayoutError, Problem, refuse


class NetLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A convolution or dense layer, together with its bias, batch norm and activation.

    ``inputs`` and ``outputs`` are numbers of channels, or of features for a dense layer. ``kernel`` is the height and
    width of the filters. ``groups`` is the number of channel groups. ``pixels_in`` and ``pixels_out`` are the numbers
    of pixels (height times width) of one image before and after the layer. They are 1 for a dense layer.

    Raises:
        LayoutError: a size is less than 1, or the groups do not divide the channels.
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
        """The number of parameters of the filters."""
        return self.outputs * self.depth

    @property
    def parameters(self) -> int:
        """The number of parameters of the filters, bias and batch norm."""
        return self.weights + self.outputs * (int(self.bias) + 2 * int(self.norm))

    @property
    def forward_flops(self) -> float:
        """FLOPs of one image's forward pass: a multiplication and an addition per weight and output position."""
        return 2.0 * self.weights * self.pixels_out


class ConvNet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Layers in running order. Poolings and additions are left out: they have no parameters and few FLOPs."""

    name: str
    image: tuple[int, int]
    """The number of channels of an image, and its height in pixels, which is also its width."""
    layers: tuple[NetLayer, ...]
    source: str = ""

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole network."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def forward_flops(self) -> float:
        """FLOPs of all layers in one image's forward pass."""
        return sum(layer.forward_flops for layer in self.layers)

    def step_flops(self, images: int) -> float:
        """FLOPs of all layers in a training step on ``images`` images.

        This is three times the forward pass, minus the gradient of the images, which is not computed."""
        return images * (3.0 * self.forward_flops - self.layers[0].forward_flops)

    def share(self, kind: Literal["convolution", "dense"]) -> tuple[float, float]:
        """The fraction of the forward FLOPs, and the fraction of the parameters, in layers of this kind."""
        chosen = [layer for layer in self.layers if layer.kind == kind]
        flops = sum(layer.forward_flops for layer in chosen) / self.forward_flops
        return flops, sum(layer.parameters for layer in chosen) / self.parameters
