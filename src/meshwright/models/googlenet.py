"""GoogLeNet: modules of four parallel branches, whose output channels are concatenated."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODULES = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
"""Szegedy et al., 2015, table 1, 3a to 5b: channels of the 1x1 branch, of the 3x3 branch (before and after the 3x3
convolution), of the 5x5 branch (before and after), and of the branch with the pooling."""


class Convolution(nn.Module):
    """A convolution with batch norm and ReLU. The image keeps its size, divided by the stride."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, inputs, y, x] to [batch, outputs, y / stride, x / stride], rounded up."""
        return F.relu(self.norm(self.conv(x)))


class Inception(nn.Module):
    """Four branches: 1x1; 1x1 then 3x3; 1x1 then 5x5; 3x3 max pooling then 1x1: [b, c, y, x] to [b, f, y, x]."""

    def __init__(
        self,
        inputs: int,
        one_by_one: int,
        three_in: int,
        three_by_three: int,
        five_in: int,
        five_by_five: int,
        pooled: int,
    ) -> None:
        super().__init__()
        self.one = Convolution(inputs, one_by_one, 1)
        self.three = nn.Sequential(Convolution(inputs, three_in, 1), Convolution(three_in, three_by_three, 3))
        self.five = nn.Sequential(Convolution(inputs, five_in, 1), Convolution(five_in, five_by_five, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), Convolution(inputs, pooled, 1))
        self.channels = one_by_one + three_by_three + five_by_five + pooled

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, inputs, y, x] to [batch, channels, y, x]: the branches' channels, concatenated."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], dim=1)


class GoogLeNet(nn.Module):
    """Nine modules of branches (Szegedy et al., 2015), with batch norm (Ioffe, Szegedy, 2015) and without the auxiliary
    classifiers.

    Args:
        width: channels of the stem, a multiple of 8 (64 in the paper); all other channels are in proportion to it.
        image_channels: number of colour channels, 1 or 3.
        classes: number of logits.

    Raises:
        ValueError: the width is not a multiple of 8.
    """

    def __init__(self, width: int = 64, image_channels: int = 3, classes: int = 1000) -> None:
        super().__init__()
        if width < 8 or width % 8:
            raise ValueError(f"width must be a multiple of 8, not {width}")
        self.stem = nn.Sequential(
            Convolution(image_channels, width, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1),
            Convolution(width, width, 1), Convolution(width, 3 * width, 3), nn.MaxPool2d(3, stride=2, padding=1),
        )  # fmt: skip
        inputs, modules = 3 * width, []
        for channels in MODULES:
            modules.append(Inception(inputs, *(count * width // 64 for count in channels)))
            inputs = modules[-1].channels
        self.modules_3 = nn.Sequential(*modules[:2])
        self.modules_4 = nn.Sequential(*modules[2:7])
        self.modules_5 = nn.Sequential(*modules[7:])
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of images [b, image_channels, y, x]; y and x are at least 32."""
        x = self.pool(self.modules_3(self.stem(images)))
        x = self.modules_5(self.pool(self.modules_4(x)))
        return cast(Tensor, self.head(x.mean(dim=(2, 3))))
