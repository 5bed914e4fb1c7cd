"""Residual networks with batch normalization: a small network for 8x8 to 32x32 pixels, and a wide network."""

import math
from collections.abc import Sequence
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """A residual block, convolutions with batch norm plus a shortcut: [b, c, y, x] -> [b, c', y / stride, x / stride].

    Args:
        inputs: channels c of the input.
        convolutions: (output channels, kernel, stride) of two or three convolutions; each divides the image's size by
            its stride.
    """

    conv1: nn.Module
    norm1: nn.Module
    conv2: nn.Module
    norm2: nn.Module
    conv3: nn.Module
    norm3: nn.Module

    def __init__(self, inputs: int, *convolutions: tuple[int, int, int]) -> None:
        super().__init__()
        self.depth = len(convolutions)
        before = inputs
        for number, (outputs, kernel, stride) in enumerate(convolutions, start=1):
            convolution = nn.Conv2d(before, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
            self.add_module(f"conv{number}", convolution)
            self.add_module(f"norm{number}", nn.BatchNorm2d(outputs))
            before = outputs
        self.shortcut: nn.Module = nn.Identity()
        stride = math.prod(stride for _, _, stride in convolutions)
        if stride != 1 or inputs != before:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, before, 1, stride=stride, bias=False), nn.BatchNorm2d(before)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, inputs, y, x] to [batch, outputs, y / stride, x / stride], with the product of all
        strides."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.depth == 3:
            y = self.norm3(self.conv3(F.relu(y)))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of blocks with two 3x3 convolutions; stages have 1, 2 and 4 times ``width`` channels.

    K. He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2.

    Args:
        depth: layers with weights on the main path: 6 n + 2 for n blocks per stage (8, 14, 20, 32, ...).
        width: channels of the first stage.
        image_channels: number of colour channels, 1 or 3.
        classes: number of logits.

    Raises:
        ValueError: the depth is not 6 n + 2.
    """

    def __init__(self, depth: int = 8, width: int = 16, image_channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth {depth} is not 6 n + 2 (8, 14, 20, ...)")
        self.stem = nn.Conv2d(image_channels, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        blocks = []
        inputs = width
        for stage in range(3):
            for block in range((depth - 2) // 6):
                outputs, stride = width * 2**stage, 2 if stage > 0 and block == 0 else 1
                blocks.append(Residual(inputs, (outputs, 3, stride), (outputs, 3, 1)))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        draw_kernels(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of images [b, image_channels, y, x]."""
        x = self.blocks(F.relu(self.stem_norm(self.stem(images))))
        return cast(Tensor, self.head(x.mean(dim=(2, 3))))


class WideResNet(nn.Module):
    """Groups of bottleneck blocks whose inner convolutions are ``widened`` times as wide as those of a ResNet.

    A block has a 1x1, a 3x3 and a 1x1 convolution; the 3x3 convolution has the stride. The defaults are
    WRN-50-2-bottleneck (Zagoruyko, Komodakis, 2016, table 8); ``widened=1`` is ResNet-50. With ``reduced=1``, only the
    3x3 convolution is widened, as in the evaluation of Alpa (Zheng et al., OSDI 2022).

    Args:
        blocks: number of blocks in each group.
        width: channels of the stem; blocks of group i have ``4 * width * 2**i`` output channels.
        widened: the 3x3 convolution of a block in group i has ``widened * width * 2**i`` output channels.
        reduced: the first 1x1 convolution has ``reduced * width * 2**i`` output channels (0: as many as the 3x3
            convolution).
        image_channels: number of colour channels, 1 or 3.
        classes: number of logits.
    """

    def __init__(
        self,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        widened: int = 2,
        image_channels: int = 3,
        classes: int = 1000,
        reduced: int = 0,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(image_channels, width, 7, stride=2, padding=3, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs, groups = width, []
        for group, count in enumerate(blocks):
            first, inside, outputs = (times * width * 2**group for times in (reduced or widened, widened, 4))
            residuals = []
            for block in range(count):
                stride = 2 if group > 0 and block == 0 else 1
                residuals.append(Residual(inputs, (first, 1, 1), (inside, 3, stride), (outputs, 1, 1)))
                inputs = outputs
            groups.append(nn.Sequential(*residuals))
        self.groups = nn.Sequential(*groups)
        self.head = nn.Linear(inputs, classes)
        draw_kernels(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of images [b, image_channels, y, x]; y and x are at least 32."""
        x = self.groups(self.pool(F.relu(self.stem_norm(self.stem(images)))))
        return cast(Tensor, self.head(x.mean(dim=(2, 3))))


def draw_kernels(model: nn.Module) -> None:
    """Draw initial values of convolutions before a ReLU (He et al., "Delving Deep into Rectifiers", 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
