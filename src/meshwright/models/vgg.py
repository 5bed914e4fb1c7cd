"""VGG: groups of 3x3 convolutions, each group followed by a pooling; then large dense layers."""

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from meshwright.models.mlp import dense_layers
from meshwright.models.resnet import draw_kernels


class VGG(nn.Module):
    """Groups of 3x3 convolutions, then dense layers (Simonyan, Zisserman, 2015, table 1).

    The defaults are configuration D with 16 layers of weights; ``(2, 2, 4, 4, 4)`` is configuration E with 19. Channels
    double from group to group, to at most ``8 * width``.

    Args:
        convolutions: number of convolutions in each group.
        width: channels of the first group.
        image_size: height and width of the images, in pixels; divisible by 2 once for each group.
        image_channels: number of colour channels, 1 or 3.
        classes: number of logits.
        dense: sizes of the hidden dense layers.
        dropout: probability of dropping an input of the hidden dense layers (0.5 in the paper).

    Raises:
        ValueError: the image cannot be halved once for each group.
    """

    def __init__(
        self,
        convolutions: Sequence[int] = (2, 2, 3, 3, 3),
        width: int = 64,
        image_size: int = 224,
        image_channels: int = 3,
        classes: int = 1000,
        dense: Sequence[int] = (4096, 4096),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if image_size % 2 ** len(convolutions):
            raise ValueError(f"images of {image_size} pixels cannot be halved {len(convolutions)} times")
        layers: list[nn.Module] = []
        inputs = image_channels
        for group, count in enumerate(convolutions):
            outputs = width * min(2**group, 8)
            for _ in range(count):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.convolutions = nn.Sequential(*layers)
        size = image_size // 2 ** len(convolutions)
        self.dense = dense_layers((inputs * size * size, *dense, classes), dropout)
        draw_kernels(self.convolutions)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of images [b, image_channels, image_size, image_size]."""
        return cast(Tensor, self.dense(self.convolutions(images).flatten(1)))
