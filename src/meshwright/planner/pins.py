"""Pins: the factors that a user fixes for single modules. The planner chooses all other factors around the pins."""

import fnmatch
from collections.abc import Iterator

from meshwright.errors import LayoutError
from meshwright.ir.files import did_you_mean
from meshwright.ir.graph import Operator
from meshwright.ir.plan import Strategy
from meshwright.ir.rule import OWN
from meshwright.planner.factors import FactorChoices
from meshwright.planner.words import STATIONARY, WORDS, factors_of


def matches(glob: str, module: str) -> bool:
    """Whether a pin's glob matches the path of ``module``, or the path of a module that contains ``module``."""
    return fnmatch.fnmatchcase(module, glob) or (glob != "" and fnmatch.fnmatchcase(module, f"{glob}.*"))


def read_pins(factors: FactorChoices, pins: dict[str, str], axes: tuple[str, ...]) -> dict[str, Strategy]:
    """Read the pins. The result maps the name of each pinned operator to its pinned factors by axis.

    An empty factor means no split. If several pins match an operator on the same axis, the pin with the most exact glob
    is taken (see ``_closeness``). Pins with equally exact globs must agree.

    Args:
        pins: maps module globs to ``factor@axis``, or to several of these separated by spaces. A factor is ``batch``
            (or ``sample``), ``none``, a letter of an operator (``f``), or a word of ``planner.words``. If no matched
            operator has such a letter, a factor may also be a factor class of the graph (``f1``).
        axes: the names of the mesh's axes. Pins on axes of one rank are checked, but split nothing.

    Raises:
        LayoutError: a pin names an unknown module, axis or factor, or contradicts another pin.
    """
    strategies: dict[str, Strategy] = {}
    by: dict[tuple[str, str], str] = {}
    for glob, factor, axis in _every(pins, axes):
        text, where = f"{factor}@{axis}", f"layout: pin[{glob!r}]"
        members = [member for member in factors.graph.operators if matches(glob, member.module)]
        if not members:
            raise _nowhere(factors, glob, where)
        if axis not in factors.sizes:
            continue
        hits = 0
        by_class = not any(factor in member.classes for member in members)
        for operator in members:
            letter = _letter(factors, operator, factor, axis, by_class)
            hits += bool(letter)
            other = by.get((operator.name, axis))
            if other is not None:
                before, here = _closeness(other, operator.module), _closeness(glob, operator.module)
                if before == here and strategies.get(operator.name, {}).get(axis, letter) != letter:
                    raise LayoutError(
                        f"{text!r} contradicts pin[{other!r}] ({pins[other]!r}) at {operator.module or 'the model'}",
                        where=where, remedy="leave out one of the two, or name fewer modules in one",
                    )  # fmt: skip
                if before > here:
                    continue
                strategies.get(operator.name, {}).pop(axis, None)
            by[operator.name, axis] = glob
            if not letter and factor not in ("batch", "none"):  # the integer program decides for this operator
                continue
            strategies.setdefault(operator.name, {})[axis] = letter
        if not hits and factor != "none":
            raise _unknown_factor(factors, members, factor, axis, where)
    return strategies


def _every(pins: dict[str, str], axes: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Yield every (glob, factor, axis) of the pins."""
    for glob, text in pins.items():
        where = f"layout: pin[{glob!r}]"
        for pin in text.split() or [text]:
            factor, at, named = pin.partition("@")
            if not at:
                raise LayoutError(f"{pin!r} is not factor@axis", where=where, remedy="write for example 'batch@tp'")
            factors, over = STATIONARY.get(factor, ("batch" if factor == "sample" else factor,)), named.split(",")
            for axis in over:
                if axis not in axes:
                    remedy = did_you_mean(axis, axes, f"axes are {', '.join(axes)}")
                    raise LayoutError(f"unknown axis {axis!r}", where=where, remedy=remedy)
            if len(factors) != len(over) or len(set(over)) < len(over):
                example = f"{factor}@{','.join(axes[-len(factors) :])}"
                takes = "1 axis" if len(factors) == 1 else f"{len(factors)} axes"
                raise LayoutError(
                    f"{factor} takes {takes}, there are {len(set(over))}",
                    where=where,
                    remedy=f"write for example {example!r}",
                )
            yield from ((glob, *pair) for pair in zip(factors, over, strict=True))


def _letter(factors: FactorChoices, operator: Operator, factor: str, axis: str, by_class: bool) -> str:
    for letter, name in operator.classes.items():
        wanted = factors.is_batch(name) if factor == "batch" else factor == (name if by_class else letter)
        if wanted and factors.fits(operator, letter, axis):
            return letter
    joint = operator.rule.joint if operator.rule is not None else {}
    meant = factors_of(operator, factor) if factor in WORDS else []
    meant += [name for name, members in joint.items() if factor in (name, *members) and name != OWN]
    return next((candidate for candidate in meant if factors.fits(operator, candidate, axis)), "")


def _closeness(glob: str, module: str) -> tuple[bool, int]:
    """Sort key for how exactly a glob names a module. The full path of the module is the most exact glob. Other globs
    are compared by their number of characters that are not wildcards."""
    return glob == module, sum(letter not in "*?" for letter in glob)


def _unknown_factor(factors: FactorChoices, members: list[Operator], factor: str, axis: str, where: str) -> LayoutError:
    """The error for a factor that no matched operator can split. The message has the sizes of the factor, if they are
    known, and lists all known factors."""
    classes = {name for member in members for letter, name in member.classes.items() if factor in (letter, name)}
    sizes = sorted({factors.graph.factor_classes[name].size for name in classes})
    letters = sorted({letter for member in members for letter in member.classes})
    names = sorted({name for member in members for name in member.classes.values()}.difference(letters))
    words = [word for word in WORDS if any(factors_of(member, word) for member in members)]
    known = ["batch", "none", *letters, *names, *words]
    size = f", of size {' and '.join(map(str, sizes))}," if sizes else ""
    near = "" if sizes else did_you_mean(factor, known)
    return LayoutError(
        f"no operator there can split {factor!r}{size} over {axis}={factors.sizes[axis]}",
        where=where,
        remedy=f"{near} factors are: {', '.join(known)}".strip(),
    )


def _nowhere(factors: FactorChoices, glob: str, where: str) -> LayoutError:
    modules = sorted({operator.module for operator in factors.graph.operators if operator.module})
    remedy = f"{did_you_mean(glob, modules)} modules are: {', '.join(modules[:20])}".strip()
    return LayoutError("matches no module", where=where, remedy=remedy)
