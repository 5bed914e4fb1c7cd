"""A small residual network with batch normalization, for images of 8x8 to 32x32 pixels."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm beside a shortcut: [b, c, y, x] -> [b, c', y / stride, x / stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of basic blocks, ``width``, 2 and 4 times ``width`` wide (He et al., 2016, section 4.2).

    Args:
        depth: layers with weights on the main path: 6 n + 2 for n blocks per stage (8, 14, 20, 32, ...).
        width: channels of the first stage.
        image_channels: colours: 1 or 3.
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
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(BasicBlock(inputs, width * 2**stage, stride))
                inputs = width * 2**stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, classes] of images [b, image_channels, y, x]."""
        x = F.relu(self.stem_norm(self.stem(images)))
        x = self.blocks(x)
        return cast(Tensor, self.head(x.mean(dim=(2, 3))))
