"""How an operator may be split: einops-like patterns whose letters are factors."""

import re
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from meshwright.errors import RuleError

ONE_AXIS = ("ring", "all_to_all")
"""Decompositions that work over one mesh axis only."""
OWN = "own"
"""The factor that splits batch norm's samples into parts with separate statistics. Its decomposition begins with the
same word."""
HALO = "halo"
"""The decomposition that exchanges rows with neighbours."""
PARTS = "parts"
"""The decomposition that communicates nothing, but needs parts that are contiguous rows."""
DECOMPOSITIONS = ("sum", "gather", *ONE_AXIS, HALO, PARTS)
"""The ways to combine the parts of a factor."""

_TOKEN = re.compile(r"[()]|[!~]?[A-Za-z_][A-Za-z0-9_]*|\d+|(\S.*)")
"""A bracket, a letter with its mark, a size, or the rest of the text if it cannot be read."""


class Factor(msgspec.Struct, frozen=True):
    """One letter inside a dim of a pattern. ``name`` is empty for a literal size (which cannot be split). ``fixed`` is
    the mark ``!``, ``stencil`` the mark ``~``."""

    name: str
    size: int | None = None
    fixed: bool = False
    stencil: bool = False

    def __str__(self) -> str:
        if not self.name:
            return str(self.size)
        return ("!" if self.fixed else "~" if self.stencil else "") + self.name


Dim = tuple[Factor, ...]


class Operand(msgspec.Struct, frozen=True):
    """One tensor of a pattern: its dims, and its number of ``^`` (0: the operator is not linear in it)."""

    dims: tuple[Dim, ...]
    linear: int = 0

    def __str__(self) -> str:
        if not self.dims:
            return "^" * self.linear + "."
        return "^" * self.linear + " ".join(
            str(dim[0]) if len(dim) == 1 else "(" + " ".join(map(str, dim)) + ")" for dim in self.dims
        )

    def find(self, name: str) -> tuple[int, int] | None:
        """The place of factor ``name``: (dim, position inside that dim), or None."""
        for index, dim in enumerate(self.dims):
            for position, factor in enumerate(dim):
                if factor.name == name:
                    return index, position
        return None


class Pattern(msgspec.Struct, frozen=True):
    """A parsed pattern: input operands and output operands."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.inputs)) + " -> " + ", ".join(map(str, self.outputs))

    def factor_names(self) -> tuple[str, ...]:
        """Every letter, in order of appearance."""
        return tuple(dict.fromkeys(factor.name for factor in self._factors() if factor.name))

    def fixed_names(self) -> frozenset[str]:
        """The letters that carry ``!`` anywhere: they cannot be split."""
        return frozenset(factor.name for factor in self._factors() if factor.fixed)

    def stencil_names(self) -> frozenset[str]:
        """The letters that carry ``~`` anywhere: splitting them needs a halo."""
        return frozenset(factor.name for factor in self._factors() if factor.stencil)

    def _factors(self) -> Iterator[Factor]:
        return (factor for operand in (*self.inputs, *self.outputs) for dim in operand.dims for factor in dim)


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one operator may be split.

    ``pattern`` reads ``"b s k, k f -> b s f"``: one operand per tensor, separated by commas. A letter is a factor,
    ``(b s)`` a dim made of several factors (outermost first), a number a literal size, ``.`` a scalar. A factor that is
    missing on the right is reduced: splitting it leaves the outputs Partial(``reduction``). ``!f`` cannot be split.
    ``~y`` is a stencil, which reads neighbours: a decomposition that exchanges halos splits it. ``^`` before operands:
    the operator is linear in all operands with this number of carets together, so a Partial may pass through unreduced.

    ``sizes`` are the global sizes of the letters. ``decompositions`` maps the factors that only a decomposition can
    split to the way in which their parts are combined: ``{"v": "gather"}``. Outputs without the factor are whole after
    ``sum``, ``gather``, ``ring`` and ``all_to_all``; the last two work over one mesh axis only. ``halo`` exchanges rows
    with neighbours, ``parts`` exchanges nothing; both need parts that are contiguous rows. ``joint`` names factors that
    stand for several letters. They split each operand by the first of these letters that it has: ``{"te": ("t", "e")}``
    divides tokens and experts over the same ranks, ``{"yy": ("y", "y1")}`` the rows that a stride of 2 reads and the
    rows that it makes. Only a decomposition can combine their parts. ``equal`` names factors whose parts must be equal;
    parts of other factors may differ by one unit. The factor ``own`` splits batch norm's samples, but only on request,
    because it changes the result: ``{"own": "own 1 2"}`` takes statistics of each part, so that outputs number 1 and 2
    are each rank's own, and other outputs without the factor are terms of a sum."""

    pattern: str
    sizes: dict[str, int]
    reduction: str = "sum"
    decompositions: dict[str, str] = {}
    joint: dict[str, tuple[str, ...]] = {}
    equal: tuple[str, ...] = ()

    @property
    def parsed(self) -> Pattern:
        """The pattern as operands (cached by text)."""
        return parse_pattern(self.pattern)

    def members(self, name: str) -> tuple[str, ...]:
        """The letters that factor ``name`` splits: itself, or the letters that it joins."""
        return self.joint.get(name, (name,))

    def splittable(self, name: str) -> bool:
        """Whether factor ``name`` may be split, by the pattern or by a decomposition."""
        return name in self.sizes and (name in self.decompositions or name not in _marked(self.pattern))

    def decomposition(self, name: str) -> str:
        """How the parts of factor ``name`` are combined; empty if the pattern alone splits it."""
        return self.decompositions.get(name, "").partition(" ")[0]

    def sums(self, name: str) -> bool:
        """Whether outputs without the factor ``name`` become partial sums if ``name`` is split."""
        return self.decomposition(name) in ("", OWN, HALO, PARTS)

    def owns(self, name: str, output: int) -> bool:
        """Whether splitting ``name`` gives each rank its own output number ``output``."""
        return self.decomposition(name) == OWN and str(output) in self.decompositions[name].split()[1:]

    def reduced(self, name: str, output: int) -> bool:
        """Whether splitting ``name`` leaves output number ``output`` Partial."""
        whole = _written(self.pattern)[output].isdisjoint(self.members(name))
        return whole and self.sums(name) and not self.owns(name, output)


@lru_cache(maxsize=8192)
def parse_pattern(text: str) -> Pattern:
    """Parse ``"^b k, ^^k f -> b f"``.

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
    """The letters of each output."""
    return tuple(frozenset(factor.name for dim in out.dims for factor in dim) for out in parse_pattern(text).outputs)


def _operand(part: str, text: str) -> Operand:
    part = part.strip()
    linear = len(part) - len(part.lstrip("^"))
    part = part.lstrip("^").strip()
    if part == ".":
        return Operand((), linear)
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
    return Operand(tuple(dims), linear)


def _factor(token: str) -> Factor:
    if token.isdigit():
        return Factor("", size=int(token))
    return Factor(token.lstrip("!~"), fixed=token[0] == "!", stencil=token[0] == "~")
