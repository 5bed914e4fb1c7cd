"""A small U-Net for images: an encoder and a decoder whose levels of equal size are joined by concatenation."""

from typing import cast

import torch
from torch import Tensor, nn

NORMS = ("group", "batch")


class UNetLevel(nn.Module):
    """Two 3x3 convolutions, each with a norm and a ReLU: [b, c, y, x] -> [b, c', y, x]."""

    def __init__(self, inputs: int, outputs: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = _norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, inputs, y, x] to [batch, outputs, y, x]."""
        x = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Levels that halve the size and double the channels, then the reverse (Ronneberger et al., 2015, figure 1).

    Unlike in the paper, convolutions keep the size, and every level has a norm.

    Args:
        depth: number of times that the image is halved.
        width: channels of the outermost level, a multiple of 2.
        image_channels: number of colour channels, 1 or 3.
        classes: number of logits of each pixel.
        norm: ``group`` (statistics of each sample, in groups of channels) or ``batch`` (statistics over the batch).

    Raises:
        ValueError: the norm is unknown, the depth is below 1, or the width is odd.
    """

    def __init__(
        self, depth: int = 2, width: int = 8, image_channels: int = 3, classes: int = 4, norm: str = "group"
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"norm is {norm!r}; it can be {' or '.join(map(repr, NORMS))}")
        if depth < 1 or width < 2 or width % 2:
            raise ValueError(f"depth must be at least 1 and width even, not {depth} and {width}")
        self.depth = depth
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            UNetLevel(inputs, outputs, norm) for inputs, outputs in zip([image_channels, *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.enlarge = nn.ModuleList(
            nn.ConvTranspose2d(2 * outputs, outputs, 2, stride=2) for outputs in reversed(widths[:-1])
        )
        self.up = nn.ModuleList(UNetLevel(2 * outputs, outputs, norm) for outputs in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes, y, x] of images [b, image_channels, y, x].

        Raises:
            ValueError: y or x cannot be halved ``depth`` times.
        """
        size, step = tuple(images.shape[2:]), 2**self.depth
        if any(length % step for length in size):
            raise ValueError(f"images of {size[0]} by {size[1]} pixels cannot be halved {self.depth} times")
        skipped = []
        x = self.down[0](images)
        for level in self.down[1:]:
            skipped.append(x)
            x = level(self.pool(x))
        for enlarge, level in zip(self.enlarge, self.up, strict=True):
            x = level(torch.cat([skipped.pop(), enlarge(x)], dim=1))
        return cast(Tensor, self.head(x))


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(2, channels)
