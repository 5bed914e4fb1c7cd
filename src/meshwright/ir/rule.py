"""Rules: patterns like those of einops that say how an operator may be split. A letter of a pattern is a factor."""

import re
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from meshwright.errors import RuleError

RING = "ring"
ONE_AXIS = (RING, "all_to_all")
"""Decompositions that work over one mesh axis only."""
OWN = "own"
"""The name of the factor that splits batch norm's samples into parts with separate statistics. Its decomposition begins
with the same word."""
HALO = "halo"
"""The decomposition in which ranks exchange rows with their neighbours."""
PARTS = "parts"
"""The decomposition in which ranks exchange nothing, but every part must be contiguous rows."""
DECOMPOSITIONS = ("sum", "gather", *ONE_AXIS, HALO, PARTS)
"""The ways in which the results of ranks are combined if a factor is split by a decomposition."""

_TOKEN = re.compile(r"[()]|[!~]?[A-Za-z_][A-Za-z0-9_]*|\d+|(\S.*)")
"""Matches a bracket, a letter with its mark, a size, or the rest of the text if it cannot be read."""


class Factor(msgspec.Struct, frozen=True):
    """One letter or literal size inside a dim of a pattern.

    ``name`` is the letter. It is empty for a literal size, which cannot be split. ``fixed`` says whether the letter has
    the mark ``!``. ``stencil`` says whether it has the mark ``~``."""

    name: str
    size: int | None = None
    fixed: bool = False
    stencil: bool = False

    def __str__(self) -> str:
        if not self.name:
            return str(self.size)
        return ("!" if self.fixed else "~" if self.stencil else "") + self.name


Dim = tuple[Factor, ...]


class PatternOperand(msgspec.Struct, frozen=True):
    """One tensor of a pattern. ``linear`` is its number of carets (0: the operator is not linear in this tensor)."""

    dims: tuple[Dim, ...]
    linear: int = 0

    def __str__(self) -> str:
        if not self.dims:
            return "^" * self.linear + "."
        return "^" * self.linear + " ".join(
            str(dim[0]) if len(dim) == 1 else "(" + " ".join(map(str, dim)) + ")" for dim in self.dims
        )

    def find(self, name: str) -> tuple[int, int] | None:
        """The place of factor ``name``: (dim, position inside that dim); None if the tensor lacks the factor."""
        for index, dim in enumerate(self.dims):
            for position, factor in enumerate(dim):
                if factor.name == name:
                    return index, position
        return None


class Pattern(msgspec.Struct, frozen=True):
    """A parsed pattern, with the operands for inputs and for outputs."""

    inputs: tuple[PatternOperand, ...]
    outputs: tuple[PatternOperand, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.inputs)) + " -> " + ", ".join(map(str, self.outputs))

    def factor_names(self) -> tuple[str, ...]:
        """All letters of the pattern, in order of appearance."""
        return tuple(dict.fromkeys(factor.name for factor in self._factors() if factor.name))

    def fixed_names(self) -> frozenset[str]:
        """The letters with the mark ``!`` in any operand: the pattern alone cannot split them."""
        return frozenset(factor.name for factor in self._factors() if factor.fixed)

    def stencil_names(self) -> frozenset[str]:
        """The letters with the mark ``~`` in any operand: splitting them needs a halo."""
        return frozenset(factor.name for factor in self._factors() if factor.stencil)

    def _factors(self) -> Iterator[Factor]:
        return (factor for operand in (*self.inputs, *self.outputs) for dim in operand.dims for factor in dim)


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one operator may be split.

    ``pattern`` is text such as ``"b s k, k f -> b s f"``, with one operand for each tensor, separated by commas. A
    letter is a factor. ``(b s)`` is a dim made of several factors, outermost first. A number is a literal size. ``.``
    is a scalar. If a factor occurs only on the left, splitting it leaves the outputs Partial(``reduction``). A factor
    ``!f`` cannot be split by the pattern alone. For a factor ``~y``, the operator reads neighbouring indices, so a
    split needs a decomposition that exchanges halos. Carets mark operands. The operator is linear in all operands with
    the same number of carets, taken together. So these operands may be Partial, and then the outputs are Partial.

    ``sizes`` maps each letter to its global size. ``decompositions`` maps each factor that only a decomposition can
    split to the way in which the ranks' results are combined: ``{"v": "gather"}``. After ``sum``, ``gather``, ``ring``
    and ``all_to_all``, the outputs without the factor are whole. ``ring`` and ``all_to_all`` work over one mesh axis
    only. With ``halo``, ranks exchange rows with neighbours; with ``parts``, they exchange nothing. Both need parts
    that are contiguous rows.

    ``joint`` maps a factor that stands for several letters to these letters. The factor splits each operand by the
    first of the letters that the operand has. ``{"te": ("t", "e")}`` splits tokens and experts over the same ranks.
    ``{"yy": ("y", "y1")}`` splits the input rows and the output rows of an operator with a stride of 2. Only a
    decomposition can split such a factor. ``equal`` names factors whose parts must have equal sizes. The parts of
    other factors may differ in size by one index.

    The factor ``own`` splits batch norm's samples so that each part has its own statistics. This changes the result, so
    only a user's request splits it. ``{"own": "own 1 2"}`` says that outputs number 1 and 2 (the statistics) are
    different on each rank. Other outputs without the factor are terms of a sum."""

    pattern: str
    sizes: dict[str, int]
    reduction: str = "sum"
    decompositions: dict[str, str] = {}
    joint: dict[str, tuple[str, ...]] = {}
    equal: tuple[str, ...] = ()

    @property
    def parsed(self) -> Pattern:
        """The parsed pattern. Equal texts are parsed once."""
        return parse_pattern(self.pattern)

    def members(self, name: str) -> tuple[str, ...]:
        """The letters that factor ``name`` splits: the letters in ``joint``, or only ``name`` itself."""
        return self.joint.get(name, (name,))

    def splittable(self, name: str) -> bool:
        """Whether factor ``name`` may be split, by the pattern or by a decomposition."""
        return name in self.sizes and (name in self.decompositions or name not in _marked(self.pattern))

    def decomposition(self, name: str) -> str:
        """The decomposition that splits factor ``name``; empty if the pattern alone can split the factor."""
        return self.decompositions.get(name, "").partition(" ")[0]

    def sums(self, name: str) -> bool:
        """Whether outputs that lack the factor ``name`` become partial sums if ``name`` is split."""
        return self.decomposition(name) in ("", OWN, HALO, PARTS)

    def owns(self, name: str, output: int) -> bool:
        """Whether every rank has its own output number ``output`` (such as its own statistics) if ``name`` is split."""
        return self.decomposition(name) == OWN and str(output) in self.decompositions[name].split()[1:]

    def reduced(self, name: str, output: int) -> bool:
        """Whether splitting factor ``name`` leaves output number ``output`` Partial."""
        whole = _written(self.pattern)[output].isdisjoint(self.members(name))
        return whole and self.sums(name) and not self.owns(name, output)


@lru_cache(maxsize=8192)
def parse_pattern(text: str) -> Pattern:
    """Parse the text of a pattern, such as ``"^b k, ^^k f -> b f"``.

    Raises:
        RuleError: the text has no arrow, an empty operand, unbalanced brackets, an unknown mark, or a letter twice in
            one operand.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"pattern {text!r} has no '->'", remedy="write 'inputs -> outputs'")
    inputs = tuple(_operand(part, text) for part in left.split(",")) if left.strip() else ()
    outputs = tuple(_operand(part, text) for part in right.split(",")) if right.strip() else ()
    return Pattern(inputs, outputs)


@lru_cache(maxsize=8192)
def _marked(text: str) -> frozenset[str]:
    pattern = parse_pattern(text)
    return pattern.fixed_names() | pattern.stencil_names()


@lru_cache(maxsize=8192)
def _written(text: str) -> tuple[frozenset[str], ...]:
    """The letters of each output of a pattern."""
    return tuple(frozenset(factor.name for dim in out.dims for factor in dim) for out in parse_pattern(text).outputs)


def _operand(part: str, text: str) -> PatternOperand:
    part = part.strip()
    linear = len(part) - len(part.lstrip("^"))
    part = part.lstrip("^").strip()
    if part == ".":
        return PatternOperand((), linear)
    if not part:
        raise RuleError(f"an operand of {text!r} is empty", remedy="write '.' for a scalar")
    dims: list[Dim] = []
    group: list[Factor] | None = None
    seen: set[str] = set()
    for match in _TOKEN.finditer(part):
        token = match[0]
        if match[1]:
            raise RuleError(f"cannot read {token!r} in pattern {text!r}", remedy="use letters, numbers, ! ~ ^ ( )")
        if token == "(":
            if group is not None:
                raise RuleError(f"nested '(' in pattern {text!r}", remedy="a dim is one flat group of factors")
            group = []
        elif token == ")":
            if group is None:
                raise RuleError(f"unbalanced ')' in pattern {text!r}", remedy="balance the brackets")
            dims.append(tuple(group))
            group = None
        else:
            factor = _factor(token)
            if factor.name:
                if factor.name in seen:
                    raise RuleError(
                        f"factor {factor.name!r} stands twice in one operand of {text!r}",
                        remedy="give the second dim a letter of its own",
                    )
                seen.add(factor.name)
            if group is None:
                dims.append((factor,))
            else:
                group.append(factor)
    if group is not None:
        raise RuleError(f"unbalanced '(' in pattern {text!r}", remedy="balance the brackets")
    return PatternOperand(tuple(dims), linear)


def _factor(token: str) -> Factor:
    if token.isdigit():
        return Factor("", size=int(token))
    return Factor(token.lstrip("!~"), fixed=token[0] == "!", stencil=token[0] == "~")
