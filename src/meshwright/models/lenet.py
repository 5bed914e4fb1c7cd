"""A LeNet-5 style image classifier: convolutions with pooling, then dense layers."""

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from meshwright.models.mlp import dense_layers


class LeNet(nn.Module):
    """Convolution, ReLU and 2x2 max pooling, repeated; then dense layers (LeCun et al., 1998, section II.B).

    ``convolutions`` and ``dense`` are two submodules, so that the two halves can be split differently. The defaults
    (same-size convolutions) take images of any size that the poolings divide: 8x8, 28x28, 32x32. The network of
    the paper has ``image_size=32, padding=0``.

    Args:
        image_size: height and width of the images, in pixels.
        image_channels: number of colour channels, 1 or 3.
        classes: number of logits.
        channels: output channels of each convolution.
        dense: sizes of the hidden dense layers.
        kernel: height and width of the convolutions, in pixels.
        padding: pixels of zero around each convolution's input; ``None`` keeps the size (odd kernels only).

    Raises:
        ValueError: the input of a pooling has an odd or too small size, or an even kernel has no ``padding``.
    """

    def __init__(
        self,
        image_size: int = 28,
        image_channels: int = 1,
        classes: int = 10,
        channels: Sequence[int] = (6, 16),
        dense: Sequence[int] = (120, 84),
        kernel: int = 5,
        padding: int | None = None,
    ) -> None:
        super().__init__()
        if padding is None:
            if kernel % 2 == 0:
                raise ValueError(f"an even kernel ({kernel}) cannot keep the image size: give padding=")
            padding = kernel // 2
        layers: list[nn.Module] = []
        size, before = image_size, image_channels
        for after in channels:
            size = size + 2 * padding - kernel + 1
            if size < 2 or size % 2:
                raise ValueError(
                    f"image_size {image_size} with kernel {kernel} and padding {padding} gives a map of "
                    f"{max(size, 0)} by {max(size, 0)} pixels before a 2x2 pooling; it must be even and at least 2"
                )
            layers += [nn.Conv2d(before, after, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
            size, before = size // 2, after
        self.convolutions = nn.Sequential(*layers)
        self.dense = dense_layers((before * size * size, *dense, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of images [b, image_channels, image_size, image_size]."""
        return cast(Tensor, self.dense(self.convolutions(images).flatten(1)))
