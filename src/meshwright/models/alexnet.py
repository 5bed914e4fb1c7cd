"""AlexNet: five convolutions, then large dense layers that hold nearly all of its weights."""

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from meshwright.models.mlp import dense_layers


class AlexNet(nn.Module):
    """AlexNet in one tower (Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014), or in
    two (Krizhevsky, Sutskever, Hinton, "ImageNet Classification with Deep Convolutional Neural Networks", 2012).

    ``convolutions`` and ``dense`` are two submodules, so that the two halves can be split differently.

    Args:
        image_size: height and width of the images, in pixels; at least 63.
        image_channels: number of colour channels, 1 or 3.
        classes: number of logits.
        channels: output channels of the five convolutions.
        dense: sizes of the hidden dense layers.
        dropout: probability of dropping an input of the hidden dense layers (0.5 in Krizhevsky et al., 2012).
        towers: groups of channels; convolutions 2, 4 and 5 read only the channels of their own group.

    Raises:
        ValueError: ``channels`` does not have five numbers, the towers do not divide them, or the image is too small.
    """

    def __init__(
        self,
        image_size: int = 224,
        image_channels: int = 3,
        classes: int = 1000,
        channels: Sequence[int] = (64, 192, 384, 256, 256),
        dense: Sequence[int] = (4096, 4096),
        dropout: float = 0.0,
        towers: int = 1,
    ) -> None:
        super().__init__()
        if len(channels) != 5:
            raise ValueError(f"{len(channels)} numbers of channels; AlexNet has five convolutions")
        if towers < 1 or any(count % towers for count in channels):
            raise ValueError(f"{towers} towers do not divide the channels {', '.join(map(str, channels))}")
        size = (image_size + 4 - 11) // 4 + 1
        for _ in range(3):
            size = (size - 3) // 2 + 1
        if size < 1:
            raise ValueError(f"image_size {image_size} leaves nothing after three poolings; it must be at least 63")
        a, b, c, d, e = channels
        self.convolutions = nn.Sequential(
            nn.Conv2d(image_channels, a, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(a, b, 5, padding=2, groups=towers), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(b, c, 3, padding=1), nn.ReLU(),
            nn.Conv2d(c, d, 3, padding=1, groups=towers), nn.ReLU(),
            nn.Conv2d(d, e, 3, padding=1, groups=towers), nn.ReLU(), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.dense = dense_layers((e * size * size, *dense, classes), dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of images [b, image_channels, image_size, image_size]."""
        return cast(Tensor, self.dense(self.convolutions(images).flatten(1)))
