"""The table [model] of a run file, with one struct for each model."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

AUTO: Literal["auto"] = "auto"
"""Stands in ``opaque`` for all submodules that need it."""
Positive = Annotated[int, Meta(ge=1)]
Layers = Annotated[int, Meta(ge=1, le=10_000)]
Count = Annotated[int, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0.0)]
Fraction = Annotated[float, Meta(ge=0.0, lt=1.0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of RUN.toml. Its values cannot be changed, and unknown keys are errors."""


class _Model(Section, frozen=True, kw_only=True, tag_field="name"):
    loss: str = ""
    """The loss: ``language_model``, ``classification``, ``segmentation`` or ``package.module:function``; empty: the
    usual loss of this model."""


class GPTModel(_Model, frozen=True, kw_only=True, tag="gpt"):
    """``meshwright.models.GPT``: a decoder-only language model."""

    layers: Layers = 4
    """Number of transformer blocks."""
    width: Positive = 256
    """Size of the hidden state; a multiple of ``heads``."""
    heads: Positive = 4
    """Attention heads per block."""
    vocabulary: Positive = 256
    """Number of different tokens. Text data has 256, because its tokens are bytes."""
    sequence_length: Count = 0
    """The number of positions of the model; 0: ``data.sequence_length``."""
    dropout: Fraction = 0.0
    """Probability of dropping an activation."""
    tied_head: bool = True
    """Whether the output head shares the token embedding's weight."""


class MLPModel(_Model, frozen=True, kw_only=True, tag="mlp"):
    """``meshwright.models.MLP``: linear layers with ReLU between them."""

    sizes: Annotated[tuple[Positive, ...], Meta(min_length=2)] = (64, 64, 10)
    """The number of values per sample, then the number of outputs of each layer. The last is the number of classes."""
    bias: bool = True
    """Whether the layers have a bias."""


class _ImageModel(_Model, frozen=True, kw_only=True):
    image_channels: Positive = 3
    """Number of colour channels: 1 or 3."""
    classes: Positive = 1000
    """Number of classes."""


class _DenseImageModel(_ImageModel, frozen=True, kw_only=True):
    dense: tuple[Positive, ...] = (4096, 4096)
    """Sizes of the hidden dense layers."""
    dropout: Fraction = 0.0
    """Probability of dropping an input of the hidden dense layers."""


class LeNetModel(_ImageModel, frozen=True, kw_only=True, tag="lenet"):
    """``meshwright.models.LeNet``: convolutions with pooling, then dense layers."""

    image_size: Positive = 28
    """Height and width of the images, in pixels."""
    image_channels: Positive = 1
    classes: Positive = 10
    channels: tuple[Positive, ...] = (6, 16)
    """Output channels of each convolution."""
    dense: tuple[Positive, ...] = (120, 84)
    """Sizes of the hidden dense layers."""
    kernel: Positive = 5
    """Height and width of the convolutions, in pixels."""


class ResNetModel(_ImageModel, frozen=True, kw_only=True, tag="resnet"):
    """``meshwright.models.ResNet``: a small residual network with batch normalization."""

    depth: Layers = 8
    """Number of layers with weights on the main path: 8, 14, 20, ..."""
    width: Positive = 16
    """Channels of the first stage."""
    classes: Positive = 10


class AlexNetModel(_DenseImageModel, frozen=True, kw_only=True, tag="alexnet"):
    """``meshwright.models.AlexNet``: five convolutions, then large dense layers."""

    image_size: Positive = 224
    """Height and width of the images, in pixels; at least 63."""
    channels: tuple[Positive, ...] = (64, 192, 384, 256, 256)
    """Output channels of the five convolutions."""


class VGGModel(_DenseImageModel, frozen=True, kw_only=True, tag="vgg"):
    """``meshwright.models.VGG``: groups of 3x3 convolutions with pooling, then large dense layers."""

    convolutions: tuple[Positive, ...] = (2, 2, 3, 3, 3)
    """Number of convolutions in each group."""
    width: Positive = 64
    """Channels of the first group."""
    image_size: Positive = 224
    """Height and width of the images, in pixels: a multiple of 2 for each group."""


class GoogLeNetModel(_ImageModel, frozen=True, kw_only=True, tag="googlenet"):
    """``meshwright.models.GoogLeNet``: modules of four parallel branches."""

    width: Positive = 64
    """Channels of the stem, a multiple of 8. The channels of all other layers are in proportion to it."""


class WideResNetModel(_ImageModel, frozen=True, kw_only=True, tag="wide-resnet"):
    """``meshwright.models.WideResNet``: residual bottleneck blocks for large images."""

    blocks: tuple[Positive, ...] = (3, 4, 6, 3)
    """Number of blocks in each group."""
    width: Positive = 64
    """Channels of the stem. A block of group i has ``4 * width * 2**i`` outer channels."""
    widened: Positive = 2
    """A block of group i has ``widened * width * 2**i`` inner channels."""


class UNetModel(_ImageModel, frozen=True, kw_only=True, tag="unet"):
    """``meshwright.models.UNet``: halves the image several times, doubles it again, and gives each pixel a class.

    Its ``loss`` is ``segmentation``, which reads ``image`` and ``label`` [n, y, x]."""

    depth: Positive = 2
    """Number of times that the image is halved."""
    width: Positive = 8
    """Channels of the outermost level, a multiple of 2."""
    classes: Positive = 4
    """Number of classes of a pixel."""
    norm: Literal["group", "batch"] = "group"
    """Group norm or batch norm."""


class FactoryModel(_Model, frozen=True, kw_only=True, tag="factory"):
    """Any model that ``factory(**arguments)`` returns. ``name`` may be left out; ``loss`` must be given."""

    factory: str
    """A function or class, as ``package.module:function``. It lies in the current folder, except with ``--trust``."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the factory."""
    opaque: tuple[str, ...] = ()
    """Submodules that are not captured, but run as they are, each as one operator (`mw.opaque`): by path
    (``encoder.router``), or one of each repeated block (``layers.*.router``). ``auto``: every innermost submodule whose
    capture fails."""

    @property
    def opaque_choice(self) -> Literal["", "auto"]:
        """Whether capture may make submodules opaque by itself."""
        return AUTO if AUTO in self.opaque else ""


Model = (
    GPTModel | MLPModel | LeNetModel | ResNetModel | AlexNetModel | VGGModel | GoogLeNetModel | WideResNetModel
    | UNetModel | FactoryModel
)  # fmt: skip
