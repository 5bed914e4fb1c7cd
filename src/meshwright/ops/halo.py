"""The spatial dims of operators that read windows of an image: their letters, how they are split, and their halos.

    n c ~y ~x, f c !p !q -> n f ~y ~x           as many rows as before: one letter
    n c ~y ~x, f c !p !q -> n f ~y1 ~x1         other sizes: ``yy`` joins the rows that are read and that are made

Parts are runs of rows. A part makes its rows of the small side, and for that reads those rows of the large side that
its windows cover, from whichever ranks they lie on; then the operator runs without padding in that dim. Its adjoint
gives gradients of all these rows, which go back to the ranks whose rows they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshwright.ir.halo import Rows, window_ranges
from meshwright.ir.rule import HALO, PARTS, Rule
from meshwright.ops.base import Call, Local, Value, make_rule

Edges = tuple[int, ...]
"""Where the parts of a dim begin, and where the last one ends."""
SPACE = {1: "x", 2: "yx", 3: "zyx"}
"""The letters of spatial dims, by how many there are."""


@dataclass
class Space:
    """Spatial dims in a pattern: those of the image (``left``) and of what is made from it (``right``)."""

    left: list[str] = field(default_factory=list)
    right: list[str] = field(default_factory=list)
    decompositions: dict[str, str] = field(default_factory=dict)
    joint: dict[str, tuple[str, ...]] = field(default_factory=dict)
    equal: list[str] = field(default_factory=list)

    def add(
        self, name: str, sizes: tuple[int, int], *, halo: bool, contiguous: bool = False, equal: bool = False
    ) -> None:
        """A dim that is split with a halo, or without one where nothing reads another part's rows; ``contiguous``: even
        then its parts must be runs of rows; ``equal``: where sizes differ, parts must be equal for that."""
        if sizes[0] == sizes[1]:
            marked = halo or contiguous
            names = [f"~{name}" if marked else name] * 2
            if marked:
                self.decompositions[name] = HALO if halo else PARTS
        else:
            names = [f"~{name}", f"~{name}1"]
            self.joint[both(name)] = name, f"{name}1"
            self.equal += [both(name)] if equal else []
            self.decompositions[both(name)] = HALO if halo else PARTS
        self.left.append(names[0])
        self.right.append(names[1])

    def whole(self, name: str, sizes: tuple[int, int]) -> None:
        """A dim that cannot be split."""
        self.left.append(f"!{name}")
        self.right.append(f"!{name}" if sizes[0] == sizes[1] else f"!{name}1")

    def rule(self, call: Call, pattern: Callable[[str, str], str], **sizes: int) -> Rule:
        """The call's rule; ``pattern`` makes its text of the dims of the image and of the other side."""
        text = pattern(" ".join(self.left), " ".join(self.right))
        return make_rule(call, text, decompositions=self.decompositions, joint=self.joint, equal=self.equal, **sizes)  # type: ignore[arg-type]


def both(name: str) -> str:
    """The factor that splits a dim on both sides, where they differ in size: ``y`` -> ``yy``."""
    return 2 * name


@dataclass(frozen=True)
class Window:
    """What an operator reads along a dim for each row of the small side: ``extent`` rows, dilation counted."""

    stride: int
    extent: int
    padding: int

    @property
    def alone(self) -> bool:
        """Whether a row is made of one row."""
        return (self.stride, self.extent, self.padding) == (1, 1, 0)

    def ranges(self, small: Edges) -> tuple[Rows, ...]:
        """By part of the small side, which has these edges, the rows of the large side that its windows read."""
        return window_ranges(small, stride=self.stride, window=self.extent, padding=self.padding)

    def rows(self, small: int) -> int:
        """How many rows the windows of ``small`` rows cover."""
        return (small - 1) * self.stride + self.extent


@dataclass(frozen=True)
class Side:
    """One split dim of a call on a rank: its place among the ``space`` dims, its factor, and the edges of the parts of
    the image and of what is made from it."""

    index: int
    space: int
    factor: str
    image: Edges
    made: Edges

    @property
    def dim(self) -> int:
        """Counted from the back."""
        return self.index - self.space


def split_sides(local: Local, space: int, windows: Sequence[Window] = ()) -> list[Side]:
    """The spatial dims that are split here, in runs of rows; not those whose windows are single rows."""
    found = []
    for index, name in enumerate(SPACE[space]):
        if windows and windows[index].alone:
            continue
        if local.is_split(name):
            found.append(Side(index, space, name, local.bounds(name), local.bounds(name)))
        elif local.is_split(both(name)):
            factor = both(name)
            found.append(Side(index, space, factor, local.bounds(factor, name), local.bounds(factor, f"{name}1")))
    return found


def fetch(
    local: Local, value: Value, side: Side, window: Window, large: Edges, small: Edges, fill: float = 0.0
) -> Value:
    """The rows of the large side that this rank's windows read."""
    return local.halo(value, side.factor, side.dim, large, window.ranges(small), fill)


def give_back(local: Local, value: Value, side: Side, window: Window, large: Edges, small: Edges) -> Value:
    """The adjoint: terms for the rows that this rank's windows read, added up where the rows are."""
    return local.halo_sum(value, side.factor, side.dim, large, window.ranges(small))


def each(value: int | Sequence[int], space: int) -> list[int]:
    """A setting of every spatial dim: one number stands for all."""
    given = [value] if isinstance(value, int) else list(value)
    return given * space if len(given) == 1 else given


def windows(
    kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[Window]:
    """The windows of each dim."""
    return [
        Window(step, far * (size - 1) + 1, pad)
        for size, step, pad, far in zip(kernel, stride, padding, dilation, strict=True)
    ]
