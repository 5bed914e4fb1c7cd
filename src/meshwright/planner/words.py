"""Words for the factors of image operators that do not depend on their letters: channel, filter, height, width, depth.

    convolution   "n c ~y ~x, f c !p !q -> n f ~y1 ~x1"      channel: c   filter: f   height: yy   width: xx

Splits of channels and filters are named after the operand of a convolution that does not move (Dryden et al.,
"Channel and Filter Parallelism for Large-Scale CNN Training", 2019, section 3):

    stationary-x   channels: each rank keeps its channels of the input; outputs are summed and split by filters
    stationary-y   filters: inputs are gathered; each rank makes its filters of the output
    stationary-w   channels over one axis and filters over another: inputs and outputs move; weights stay in blocks
"""

from meshwright.ir.graph import Operator

IMAGES = ("aten.convolution", "aten.max_pool", "aten.avg_pool", "aten.adaptive_", "aten._adaptive_", "aten.upsample_",
          "aten.reflection_pad", "aten.replication_pad")  # fmt: skip
"""Target prefixes of the operators whose last dims are the spatial dims of images."""
SPACE = {"width": 1, "height": 2, "depth": 3}
"""Maps each word to its spatial dim, counted from the last dim (1)."""
STATIONARY = {"stationary-x": ("channel",), "stationary-y": ("filter",), "stationary-w": ("channel", "filter")}
"""Maps the name of each split to the words of its factors. Each factor is split over its own mesh axis."""
WORDS = ("channel", "filter", *SPACE)


def factors_of(operator: Operator, word: str) -> list[str]:
    """The factors of an operator that a word stands for. There may be none, one, or several (outermost first) for
    grouped channels."""
    if word in SPACE:
        return [name for name in (rows_of(operator, SPACE[word]),) if name]
    if operator.rule is None or not operator.target.startswith("aten.convolution"):
        return []
    inputs, outputs = operator.rule.parsed.inputs, operator.rule.parsed.outputs
    backward = operator.target.startswith("aten.convolution_backward")
    image, output = (inputs[1], inputs[0]) if backward else (inputs[0], outputs[0])
    return [factor.name for factor in (image if word == "channel" else output).dims[1] if factor.name]


def word_of(operator: Operator, factor: str) -> str:
    """The word for a factor of a convolution; the factor itself if it has no word."""
    if not operator.target.startswith("aten.convolution"):
        return factor
    return next((word for word in WORDS if factor in factors_of(operator, word)), factor)


def rows_of(operator: Operator, from_the_back: int) -> str | None:
    """The factor that splits a spatial dim of an image operator. This is a joint factor, which splits input rows and
    output rows together, or else a letter. ``from_the_back`` counts dims from the last (1)."""
    if operator.rule is None or not operator.target.startswith(IMAGES):
        return None
    operand = operator.rule.parsed.inputs[0]
    if from_the_back > space_rank(operator, len(operand.dims)):
        return None
    letter = next((factor.name for factor in operand.dims[-from_the_back] if factor.name), "")
    joint = (name for name, members in operator.rule.joint.items() if letter in members)
    return next(joint, letter or None)


def space_rank(operator: Operator, dims: int) -> int:
    """The number of spatial dims of an image operator."""
    if operator.target.startswith("aten.convolution"):
        return dims - 2
    return next(count for count in (1, 2, 3) if f"{count}d" in operator.target)
