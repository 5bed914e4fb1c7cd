"""Words for the factors of operators on images, whatever letters they have: channel, filter, height, width, depth.

    convolution   "n c ~y ~x, f c !p !q -> n f ~y1 ~x1"      channel: c   filter: f   height: yy   width: xx

Which of a convolution's operands stays where it is gives splits of channels and filters their names (Dryden et al.,
"Channel and Filter Parallelism for Large-Scale CNN Training", 2019, section 3):

    stationary-x   channels: each rank keeps its channels of the input, and outputs are added up to their filters
    stationary-y   filters: inputs are gathered, and each rank makes its filters of the output
    stationary-w   channels over one axis and filters over another: inputs and outputs move, weights lie in blocks
"""

from meshwright.ir.graph import Operator

IMAGES = ("aten.convolution", "aten.max_pool", "aten.avg_pool", "aten.adaptive_", "aten._adaptive_", "aten.upsample_",
          "aten.reflection_pad", "aten.replication_pad")  # fmt: skip
"""How the targets of operators begin whose last dims are those of images."""
SPACE = {"width": 1, "height": 2, "depth": 3}
"""By word, which dim it is, counted from the back."""
STATIONARY = {"stationary-x": ("channel",), "stationary-y": ("filter",), "stationary-w": ("channel", "filter")}
"""By name, what is split, over one axis each."""
WORDS = ("channel", "filter", *SPACE)


def factors_of(operator: Operator, word: str) -> list[str]:
    """The factors that a word means: none, one, or of channels that are also grouped several, outermost first."""
    if word in SPACE:
        return [name for name in (rows_of(operator, SPACE[word]),) if name]
    if operator.rule is None or not operator.target.startswith("aten.convolution"):
        return []
    inputs, outputs = operator.rule.parsed.inputs, operator.rule.parsed.outputs
    backward = operator.target.startswith("aten.convolution_backward")
    image, made = (inputs[1], inputs[0]) if backward else (inputs[0], outputs[0])
    return [factor.name for factor in (image if word == "channel" else made).dims[1] if factor.name]


def word_of(operator: Operator, factor: str) -> str:
    """The word for a factor of a convolution, or the factor itself."""
    if not operator.target.startswith("aten.convolution"):
        return factor
    return next((word for word in WORDS if factor in factors_of(operator, word)), factor)


def rows_of(operator: Operator, from_the_back: int) -> str | None:
    """The factor that splits a dim of an operator on images: of one letter, or of the rows read and made together."""
    if operator.rule is None or not operator.target.startswith(IMAGES):
        return None
    operand = operator.rule.parsed.inputs[0]
    if from_the_back > space_rank(operator, len(operand.dims)):
        return None
    letter = next((factor.name for factor in operand.dims[-from_the_back] if factor.name), "")
    joint = (name for name, members in operator.rule.joint.items() if letter in members)
    return next(joint, letter or None)


def space_rank(operator: Operator, dims: int) -> int:
    """How many spatial dims an operator on images works over."""
    if operator.target.startswith("aten.convolution"):
        return dims - 2
    return next(count for count in (1, 2, 3) if f"{count}d" in operator.target)
