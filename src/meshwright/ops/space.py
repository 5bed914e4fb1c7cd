"""The spatial dims of operators that read windows of an image: their letters in patterns, and how they are split.

n c ~y ~x, f c !p !q -> n f ~y ~x           equal numbers of rows on both sides: one letter
n c ~y ~x, f c !p !q -> n f ~y1 ~x1         other sizes: the factor ``yy`` splits both ``y`` and ``y1``
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshwright.ir.rule import HALO, PARTS, Rule
from meshwright.ops.base import Call, Target, make_rule
from meshwright.ops.patterns import letters, operand

SPACE = {1: "x", 2: "yx", 3: "zyx"}
"""Maps a number of spatial dims to their letters."""
_RANK = re.compile(r"([123])d")


def space_rank(target: Target) -> int:
    """Return the number of spatial dims of a pooling, padding or resizing: 2 for max_pool2d."""
    match = _RANK.search(str(target))
    assert match is not None
    return int(match[1])


def is_gradient(target: Target) -> bool:
    """Whether the operator is the gradient of another."""
    return "backward" in str(target)


def image_and_output(call: Call) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shapes of the image and of the output computed from it, for an operator or its gradient."""
    pair = call.tensors[0].shape, call.outputs[0].shape
    return (pair[1], pair[0]) if is_gradient(call.target) else pair


def largest_flops(call: Call, rule: Rule | None) -> float:
    """Count one operation for each element of the largest tensor."""
    return float(max(tensor.numel() for tensor in (*call.tensors, *call.outputs)))


@dataclass
class SpatialDims:
    """Spatial dims in a pattern: the dims of the image (``left``) and of the output computed from it (``right``)."""

    left: list[str] = field(default_factory=list)
    right: list[str] = field(default_factory=list)
    decompositions: dict[str, str] = field(default_factory=dict)
    joint: dict[str, tuple[str, ...]] = field(default_factory=dict)
    equal: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, image: Sequence[int], output: Sequence[int], halos: Sequence[bool], *, contiguous: bool = False,
        equal: bool = False,
    ) -> "SpatialDims":  # fmt: skip
        """Return the spatial dims of an image and a result. ``halos`` says whether splitting each dim needs a halo."""
        result = cls()
        for index, (name, halo) in enumerate(zip(SPACE[len(halos)], halos, strict=True)):
            sizes = image[index - len(halos)], output[index - len(halos)]
            result.add(name, sizes, halo=halo, contiguous=contiguous, equal=equal)
        return result

    def add(
        self, name: str, sizes: tuple[int, int], *, halo: bool, contiguous: bool = False, equal: bool = False
    ) -> None:
        """Add a dim that may be split. With ``halo``, its parts read rows of other parts. With ``contiguous``, parts
        must be runs of rows even without a halo. With ``equal``, parts must have one size if the dim changes its size.
        """
        alike = sizes[0] == sizes[1]
        marked = halo or contiguous or not alike
        if marked:
            self.decompositions[name if alike else both(name)] = HALO if halo else PARTS
        if not alike:
            self.joint[both(name)] = name, f"{name}1"
            self.equal += [both(name)] if equal else []
        self.left.append(f"~{name}" if marked else name)
        self.right.append(self.left[-1] if alike else f"~{name}1")

    def whole(self, name: str, sizes: tuple[int, int]) -> None:
        """Add a dim that cannot be split."""
        self.left.append(f"!{name}")
        self.right.append(f"!{name}" if sizes[0] == sizes[1] else f"!{name}1")

    def rule(self, call: Call, pattern: Callable[[str, str], str], **sizes: int) -> Rule:
        """Return the call's rule. ``pattern`` is a function that makes its text from the dims of image and result."""
        text = pattern(" ".join(self.left), " ".join(self.right))
        return make_rule(call, text, decompositions=self.decompositions, joint=self.joint, equal=self.equal, **sizes)  # type: ignore[arg-type]

    def spatial_rule(self, call: Call, *, linear: bool) -> Rule:
        """Return the rule ``n c ~y ~x -> n c ~y1 ~x1``, or the reverse for a gradient. The second tensor of a gradient
        is the image; its third tensor has the pattern of the first."""
        lead = letters(call.tensors[0].dim() - len(self.left), "n")
        image, result = operand([*lead, *self.left]), operand([*lead, *self.right])
        inputs, output = ([result, image, result], image) if is_gradient(call.target) else ([image], result)
        text = f"{'^' * linear}{', '.join(inputs[: len(call.tensors)])} -> {', '.join([output] * len(call.outputs))}"
        return self.rule(call, lambda *_: text)


def both(name: str) -> str:
    """Return the factor that splits a dim of image and result together if their sizes differ: ``yy`` for ``y``."""
    return 2 * name
