"""The rule of the spatial axes: sz, sy and sx split the depth, height and width of images.

The rule applies to all tensors that are made from images. In convolutions, pooling, padding and resizing, the depth,
height and width are the last dims. The sizes of these dims differ between the resolutions in a network. Each operator
splits its own spatial dims, unless its rule does not allow this split.
"""

from collections.abc import Iterator

from meshwright.errors import LayoutError
from meshwright.ir.graph import Operator
from meshwright.ir.plan import Note, starred
from meshwright.ir.rule import Rule
from meshwright.planner.factors import FactorChoices
from meshwright.planner.notes import ModuleNotes
from meshwright.planner.words import IMAGES, rows_of, space_rank

_FROM_THE_BACK = {"sx": 1, "sy": 2, "sz": 3}


class SpatialRule:
    """Splits spatial dims over the spatial axes. Notes say which modules are split, and why some operators stay
    whole."""

    def __init__(self, factors: FactorChoices, notes: ModuleNotes) -> None:
        self.factors, self.notes = factors, notes
        self.whole: list[Note] = []

    def split(self, axes: list[str], *, required: bool) -> list[Note]:
        """Split the spatial dims of all operators over ``axes``. Return notes on the operators that cannot be split.

        Raises:
            LayoutError: ``required`` is set, and no operator can be split over one of the axes.
        """
        graph, parameters = self.factors.graph, set(self.factors.graph.parameters)
        spatial = {axis: self._classes(axis) for axis in axes}
        for axis in axes:
            others = set[str]().union(*(names for other, names in spatial.items() if other != axis))
            names, hits = spatial[axis] - others, 0
            for operator in graph.operators:
                strategy = self.factors.strategies[operator.name]
                if axis in strategy:
                    continue
                if operator.target.startswith(IMAGES):
                    choice = self._of_image(operator, axis)
                    if choice is not None and not self.factors.fits(operator, choice, axis):
                        self._note_whole(operator, axis, choice)
                        choice = None
                else:
                    choice = self.factors.letter_of(operator, names, axis)
                if choice is not None:
                    strategy[axis] = choice
                    hits += 1
                    weighs = operator.target.startswith(IMAGES) or parameters.intersection(operator.inputs)
                    if not operator.backward and weighs:
                        self.notes[operator.module].setdefault(axis, (f"{choice}@{axis}", "rows of images"))
            if not hits and required:
                raise self._refused(axis)
        return self.whole

    def _images(self, axis: str) -> Iterator[tuple[Operator, Rule, str]]:
        """Yield each image operator with its rule and the factor that the axis splits."""
        for operator in self.factors.graph.operators:
            if operator.target.startswith(IMAGES) and operator.rule is not None:
                choice = self._of_image(operator, axis)
                if choice is not None:
                    yield operator, operator.rule, choice

    def _classes(self, axis: str) -> set[str]:
        """The factor classes that ``axis`` splits. If a dim has several classes, this is the outermost class, because
        each rank has a run of neighbouring rows."""
        classes = {
            operator.classes[letter]
            for operator, rule, choice in self._images(axis)
            for letter in rule.members(choice)
            if letter in operator.classes
        }
        return {name for name in classes if not self.factors.is_batch(name)}

    def _of_image(self, operator: Operator, axis: str) -> str | None:
        """The factor of an image operator that splits the dim of ``axis``; None if the operator has no such dim."""
        if operator.rule is None:
            return None
        if space_rank(operator, len(operator.rule.parsed.inputs[0].dims)) == 1:  # ``sy`` splits the one dim of a signal
            return rows_of(operator, 1) if axis == "sy" else None
        return rows_of(operator, _FROM_THE_BACK[axis])

    def _note_whole(self, operator: Operator, axis: str, choice: str) -> None:
        if operator.backward:
            return
        assert operator.rule is not None
        parts, rule = self.factors.sizes[axis], operator.rule
        sizes = [rule.sizes[letter] for letter in dict.fromkeys(rule.members(choice))]
        rows = f"{sizes[0]} rows" + (f" that become {sizes[1]}" if len(sizes) > 1 else "")
        reason = f"{rows} are too few for {parts} ranks" if min(sizes) < parts else (
            f"{rows} do not divide over {parts} ranks, as its windows must" if any(size % parts for size in sizes) else
            f"its windows cannot be cut (factor {choice!r} of {rule.pattern!r})"
        )  # fmt: skip
        self.whole.append(Note(module=starred(operator.name), split=f"whole on {axis}", reason=reason))

    def _refused(self, axis: str) -> LayoutError:
        sizes = sorted(
            {rule.sizes[letter] for _, rule, choice in self._images(axis) for letter in rule.members(choice)}
        )
        if not sizes:
            return LayoutError(
                f"{axis}={self.factors.sizes[axis]}, and there are no convolutions or pooling over such a dim",
                where="layout: spatial",
                remedy="leave spatial out, or give one size for signals, two for images, three for volumes",
            )
        return LayoutError(
            f"no rows of {', '.join(map(str, sizes))} can be cut over {axis}={self.factors.sizes[axis]}",
            where="layout: spatial",
            remedy="use larger images, or fewer parts",
        )
