"""Wide residual networks of bottleneck blocks for large images."""

from collections.abc import Sequence
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norm beside a shortcut: [b, c, y, x] -> [b, c', y / stride, x / stride].

    The 3x3 convolution has the stride.
    """

    def __init__(self, inputs: int, inside: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inside, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inside)
        self.conv2 = nn.Conv2d(inside, inside, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inside)
        self.conv3 = nn.Conv2d(inside, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class WideResNet(nn.Module):
    """Groups of bottleneck blocks whose inner convolutions are ``widened`` times as wide as those of a ResNet.

    The defaults are WRN-50-2-bottleneck (Zagoruyko, Komodakis, 2016, table 8); ``widened=1`` is ResNet-50.

    Args:
        blocks: how many there are in each group.
        width: channels of the stem; a block of group i has ``4 * width * 2**i`` outside.
        widened: how many times ``width * 2**i`` channels it has inside.
        image_channels: colours: 1 or 3.
        classes: number of logits.
    """

    def __init__(
        self,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        widened: int = 2,
        image_channels: int = 3,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(image_channels, width, 7, stride=2, padding=3, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs, groups = width, []
        for group, count in enumerate(blocks):
            inside, outputs = widened * width * 2**group, 4 * width * 2**group
            stride = 1 if group == 0 else 2
            first = Bottleneck(inputs, inside, outputs, stride)
            groups.append(nn.Sequential(first, *(Bottleneck(outputs, inside, outputs) for _ in range(count - 1))))
            inputs = outputs
        self.groups = nn.Sequential(*groups)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of images [b, image_channels, y, x]; y and x of 32 and more."""
        x = self.pool(F.relu(self.stem_norm(self.stem(images))))
        x = self.groups(x)
        return cast(Tensor, self.head(x.mean(dim=(2, 3))))
