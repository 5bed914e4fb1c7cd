"""Convolutional networks by name, layer by layer: residual and wide residual networks, AlexNet, VGG and LeNet."""

from collections.abc import Callable, Sequence
from functools import partial

from meshwright.errors import LayoutError
from meshwright.ir import files
from meshwright.ir.convnet import ConvNet, NetLayer


class _Chain:
    """A chain of layers under construction; ``channels`` and ``size`` belong to the last output."""

    def __init__(self, channels: int, size: int) -> None:
        self.image = (channels, size)
        self.channels, self.size = channels, size
        self.layers: list[NetLayer] = []

    def convolve(
        self, name: str, outputs: int, kernel: int, *, stride: int = 1, padding: int | None = None, groups: int = 1,
        norm: bool = False, inputs: int = 0,
    ) -> None:  # fmt: skip
        """Append a convolution. ``padding=None`` keeps the size (divided by the stride). With ``inputs`` the
        convolution is a parallel branch with that number of input channels, and its output has the size of the chain's
        output."""
        pad = (kernel - 1) // 2 if padding is None else padding
        size = self.size if inputs else (self.size + 2 * pad - kernel) // stride + 1
        before = self.size * stride if inputs else self.size
        self.layers.append(
            NetLayer(
                name=name, kind="convolution", inputs=inputs or self.channels, outputs=outputs, kernel=kernel,
                groups=groups, pixels_in=before**2, pixels_out=size**2, bias=not norm, norm=norm,
            )
        )  # fmt: skip
        self.channels, self.size = outputs, size

    def pool(self, kernel: int, stride: int, padding: int = 0) -> None:
        self.size = (self.size + 2 * padding - kernel) // stride + 1

    def residual(self, name: str, *convolutions: tuple[str, int, int, int]) -> None:
        """Append convolutions (name, outputs, kernel, stride) with norms. If sizes change, the shortcut also gets a
        convolution."""
        before, stride = self.channels, max(stride for *_, stride in convolutions)
        for what, outputs, kernel, own_stride in convolutions:
            self.convolve(f"{name}.{what}", outputs, kernel, stride=own_stride, norm=True)
        if stride > 1 or before != self.channels:
            self.convolve(f"{name}.shortcut", self.channels, 1, stride=stride, norm=True, inputs=before)

    def dense(self, name: str, outputs: int, *, average: bool = False) -> None:
        """Append a dense layer. ``average``: its input is averaged over all positions first."""
        inputs = self.channels if average else self.channels * self.size**2
        self.layers.append(NetLayer(name=name, kind="dense", inputs=inputs, outputs=outputs))
        self.channels, self.size = outputs, 1

    def net(self, name: str, source: str) -> ConvNet:
        return ConvNet(name=name, image=self.image, layers=tuple(self.layers), source=source)


def bottleneck_resnet(
    name: str, source: str, blocks: Sequence[int], *, base: int = 64, reduced: int = 1, widened: int = 1,
    classes: int = 1000,
) -> ConvNet:  # fmt: skip
    """A residual network of bottleneck blocks for images of 224 x 224 (He et al. 2015, table 1).

    The stem has ``base`` output channels. Group i has a width of ``base * 2**i``: its blocks have ``reduced`` times
    this width after the first convolution, ``widened`` times after the second, and 4 times at their output. The 3 x 3
    convolution has the stride.
    """
    chain = _Chain(3, 224)
    chain.convolve("stem", base, 7, stride=2, norm=True)
    chain.pool(3, 2, 1)
    for group, count in enumerate(blocks):
        width = base * 2**group
        for block in range(count):
            stride = 2 if group and not block else 1
            chain.residual(
                f"{group}.{block}", ("reduce", reduced * width, 1, 1), ("convolve", widened * width, 3, stride),
                ("expand", 4 * width, 1, 1),
            )  # fmt: skip
    chain.dense("head", classes, average=True)
    return chain.net(name, source)


def small_resnet(
    depth: int = 8, width: int = 16, image_channels: int = 3, size: int = 32, classes: int = 10
) -> ConvNet:
    """A residual network of three groups of basic blocks for small images (He et al. 2015, section 4.2)."""
    chain = _Chain(image_channels, size)
    chain.convolve("stem", width, 3, norm=True)
    for group in range(3):
        for block in range((depth - 2) // 6):
            outputs, stride = width * 2**group, 2 if group and not block else 1
            chain.residual(f"{group}.{block}", ("conv1", outputs, 3, stride), ("conv2", outputs, 3, 1))
    chain.dense("head", classes, average=True)
    return chain.net(f"resnet{depth}", "He et al. 2015, section 4.2")


def lenet(
    size: int = 28, image_channels: int = 1, channels: Sequence[int] = (6, 16), dense: Sequence[int] = (120, 84, 10)
) -> ConvNet:
    """LeNet with convolutions that keep the size (LeCun et al. 1998)."""
    chain = _Chain(image_channels, size)
    for index, outputs in enumerate(channels):
        chain.convolve(f"convolution{index}", outputs, 5)
        chain.pool(2, 2)
    for index, outputs in enumerate(dense):
        chain.dense(f"dense{index}", outputs)
    return chain.net("lenet", "LeCun et al. 1998")


def alexnet(name: str, source: str, *, one_tower: bool) -> ConvNet:
    """AlexNet: with the two towers of the paper, or with torchvision's single tower."""
    chain = _Chain(3, 224)
    widths, groups = ((64, 192, 384, 256, 256), 1) if one_tower else ((96, 256, 384, 384, 256), 2)
    chain.convolve("convolution1", widths[0], 11, stride=4, padding=2)
    chain.pool(3, 2)
    chain.convolve("convolution2", widths[1], 5, groups=groups)
    chain.pool(3, 2)
    chain.convolve("convolution3", widths[2], 3)
    chain.convolve("convolution4", widths[3], 3, groups=groups)
    chain.convolve("convolution5", widths[4], 3, groups=groups)
    chain.pool(3, 2)
    for index, outputs in enumerate((4096, 4096, 1000), start=6):
        chain.dense(f"dense{index}", outputs)
    return chain.net(name, source)


def vgg(name: str, source: str, convolutions: Sequence[int]) -> ConvNet:
    """VGG: five groups of 3 x 3 convolutions (``convolutions`` has their numbers), then three dense layers."""
    chain = _Chain(3, 224)
    for group, (count, outputs) in enumerate(zip(convolutions, (64, 128, 256, 512, 512), strict=True)):
        for index in range(count):
            chain.convolve(f"{group}.{index}", outputs, 3)
        chain.pool(2, 2)
    for index, outputs in enumerate((4096, 4096, 1000)):
        chain.dense(f"dense{index}", outputs)
    return chain.net(name, source)


_ALPA = (
    "Zheng et al. 2022 (Alpa), Wide-ResNet models; 50 layers, {} base channels, 3 x 3 convolutions {} times as wide as "
    "what they read"
)
_BUILDERS: dict[str, Callable[[str], ConvNet]] = {
    "alexnet": partial(alexnet, source="Krizhevsky 2014, as in torchvision (one tower)", one_tower=True),
    "alexnet-2012": partial(alexnet, source="Krizhevsky et al. 2012 (two towers)", one_tower=False),
    "vgg16": partial(vgg, source="Simonyan & Zisserman 2014, table 1, D", convolutions=(2, 2, 3, 3, 3)),
    "vgg19": partial(vgg, source="Simonyan & Zisserman 2014, table 1, E", convolutions=(2, 2, 4, 4, 4)),
    "resnet50": partial(bottleneck_resnet, source="He et al. 2015, table 1", blocks=(3, 4, 6, 3)),
    "resnet101": partial(bottleneck_resnet, source="He et al. 2015, table 1", blocks=(3, 4, 23, 3)),
    "wide-resnet50": partial(
        bottleneck_resnet, source="Zagoruyko & Komodakis 2016, table 8", blocks=(3, 4, 6, 3), reduced=2, widened=2
    ),
    **{
        f"wide-resnet-{size}": partial(
            bottleneck_resnet, source=_ALPA.format(base, factor), blocks=(3, 4, 6, 3), base=base, widened=factor,
            classes=1024,
        )
        for size, base, factor in (
            ("250m", 160, 2), ("500m", 224, 2), ("1b", 320, 2), ("2b", 448, 2), ("4b", 640, 2), ("6b8", 320, 16),
            ("13b", 320, 32),
        )
    },
}  # fmt: skip


def network_names() -> list[str]:
    """The names of the catalog's convolutional networks."""
    return sorted(_BUILDERS)


def load_network(name: str) -> ConvNet:
    """A convolutional network by name.

    Raises:
        LayoutError: no network has that name; the message suggests similar names.
    """
    if name not in _BUILDERS:
        remedy = files.did_you_mean(name, _BUILDERS, f"networks: {', '.join(network_names())}")
        raise LayoutError(f"unknown network {name!r}", remedy=remedy)
    return _BUILDERS[name](name)
