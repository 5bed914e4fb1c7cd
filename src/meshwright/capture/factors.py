"""Joins factors along edges: dims that are one and the same get one class, refined to common factors.

A GPT-2 projection makes 2304 features; a split takes them as ``(3 f)``, a view takes ``f`` as ``(h d)``. Joining
refines the projection's single factor to ``(3 h d)``, so that splitting heads splits its weight in three blocks:

    mm      "m j, j f -> m f"                      mm      "(b s) k, k (3 h d) -> (b s) (3 h d)"
    view    "m f -> _0 _1 f"            becomes    view    "(b s) (3 h d) -> b s (3 h d)"
    split   "_0 _1 (3 _2) -> ..."                  split   "b s (3 h d) -> b s (h d), b s (h d), b s (h d)"
    view    "_0 _1 (_2 _3) -> ..."                 view    "b s (h d) -> b s h d"
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.ir.rule import Dim, Factor, Operand, Pattern, Rule

PRIORITY = ("h", "v", "b", "s", "n", "c", "k", "f", "d", "e", "t", "y", "x", "z", "p", "q", "j", "m")
"""Letters by how much they say; a class takes the best name that any of its operators gives it."""


@dataclass(eq=False)
class Atom:
    """A factor that may turn out to be a product of smaller ones."""

    size: int
    parent: "Atom | None" = None
    parts: "list[Atom] | None" = None
    hint: str = ""

    def root(self) -> "Atom":
        atom = self
        while atom.parent is not None:
            atom = atom.parent
        while self.parent is not None and self.parent is not atom:
            self.parent, self = atom, self.parent
        return atom


def leaves(atoms: Iterable[Atom]) -> list[Atom]:
    """The atoms that these have been refined to, outermost first."""
    result: list[Atom] = []
    for atom in atoms:
        root = atom.root()
        if root.parts is None:
            result.append(root)
        else:
            result.extend(leaves(root.parts))
    return result


def _rank(hint: str) -> int:
    letter = hint[:1]
    return PRIORITY.index(letter) if letter in PRIORITY else len(PRIORITY)


def _union(a: Atom, b: Atom) -> None:
    if a is b:
        return
    b.parent = a
    if _rank(b.hint) < _rank(a.hint):
        a.hint = b.hint


def _cut(atom: Atom, size: int) -> None:
    """Refine a leaf into (size, rest)."""
    atom.parts = [Atom(size, hint=""), Atom(atom.size // size, hint=atom.hint)]


def unify(left: Sequence[Atom], right: Sequence[Atom]) -> bool:
    """Join two descriptions of one dim, refining both; False (and nothing done further) where they do not fit."""
    a, b = leaves(left), leaves(right)
    i = j = 0
    while i < len(a) and j < len(b):
        one, two = a[i].root(), b[j].root()
        if one.parts is not None:
            a[i : i + 1] = leaves([one])
            continue
        if two.parts is not None:
            b[j : j + 1] = leaves([two])
            continue
        if one.size == two.size:
            _union(one, two)
            i, j = i + 1, j + 1
        elif one.size == 1:
            i += 1
        elif two.size == 1:
            j += 1
        else:
            large, small = (one, two) if one.size > two.size else (two, one)
            if small.size == 0 or large.size % small.size:
                return False
            _cut(large, small.size)
    return True


@dataclass
class BoundRule:
    """A rule whose letters are atoms."""

    rule: Rule
    letters: dict[str, list[Atom]]
    contiguous: frozenset[str]
    literals: dict[tuple[bool, int, int, int], Atom] = field(default_factory=dict)


def bind(rule: Rule, contiguous: frozenset[str] = frozenset()) -> BoundRule:
    """Fresh atoms for the letters and literal sizes of a rule."""
    pattern = rule.parsed
    letters = {
        name: [Atom(size, hint="" if name.startswith("_") else name.rstrip("0123456789"))]
        for name, size in rule.sizes.items()
    }
    bound = BoundRule(rule, letters, contiguous)
    for output, operands in ((False, pattern.inputs), (True, pattern.outputs)):
        for index, operand in enumerate(operands):
            for dim_index, dim in enumerate(operand.dims):
                for position, factor in enumerate(dim):
                    if not factor.name:
                        bound.literals[output, index, dim_index, position] = Atom(factor.size or 0)
    return bound


def dim_atoms(bound: BoundRule, operand: Operand, output: bool, index: int) -> list[list[Atom]]:
    """The atoms of each dim of an operand."""
    result = []
    for dim_index, dim in enumerate(operand.dims):
        atoms: list[Atom] = []
        for position, factor in enumerate(dim):
            atoms.extend(
                bound.letters[factor.name] if factor.name else [bound.literals[output, index, dim_index, position]]
            )
        result.append(atoms)
    return result


def rendered(bound: BoundRule, names: dict[int, str]) -> tuple[Rule, dict[str, str], dict[str, tuple[str, ...]]]:
    """The refined rule, the class of each of its letters, and what each original letter became.

    ``names`` gives the class name of each leaf atom (by id). A letter that needs contiguous parts, has a decomposition,
    or is a stencil can only be split at its outermost factor. Letters of one class stay apart (the queries and the
    keys of self-attention are both the sequence): splitting the one does not split the other.
    """
    letter_of: dict[tuple[str, int], str] = {}
    classes: dict[str, str] = {}
    sizes: dict[str, int] = {}
    became: dict[str, tuple[str, ...]] = {}
    decompositions: dict[str, str] = {}
    fixed: set[str] = set()
    stencils: set[str] = set()
    fixed_originals, stencil_originals = bound.rule.parsed.fixed_names(), bound.rule.parsed.stencil_names()
    outermost_only = bound.contiguous | bound.rule.decompositions.keys() | stencil_originals
    for original, atoms in bound.letters.items():
        mine: list[str] = []
        for position, atom in enumerate(leaves(atoms)):
            if (original, id(atom)) not in letter_of:
                stem = (atom.hint or "x")[:1]
                letter, count = stem, 0
                while letter in classes:
                    count += 1
                    letter = f"{stem}{count}"
                letter_of[original, id(atom)] = letter
                classes[letter] = names[id(atom)]
                sizes[letter] = atom.size
            letter = letter_of[original, id(atom)]
            mine.append(letter)
            if position and original in outermost_only:
                fixed.add(letter)
            elif original in bound.rule.decompositions:
                decompositions[letter] = bound.rule.decompositions[original]
            if original in fixed_originals:
                fixed.add(letter)
            if original in stencil_originals and not position:
                stencils.add(letter)
        became[original] = tuple(mine)
    # a letter whose parts are one and the same factor (a square that was flattened) cannot be split
    doubled = {letter for mine in became.values() for letter in mine if mine.count(letter) > 1}
    fixed |= doubled
    pattern = bound.rule.parsed

    def refined(operand: Operand, output: bool, index: int) -> Operand:
        dims: list[Dim] = []
        used: set[str] = set()
        for dim_index, dim in enumerate(operand.dims):
            factors: list[Factor] = []
            for position, factor in enumerate(dim):
                literal = [] if factor.name else leaves([bound.literals[output, index, dim_index, position]])
                factors += [Factor("", size=atom.size) for atom in literal]
                for atom, letter in zip(
                    leaves(bound.letters.get(factor.name, [])), became.get(factor.name, ()), strict=True
                ):
                    marks = {"fixed": letter in fixed, "stencil": letter in stencils - fixed}
                    factors.append(Factor("", size=atom.size) if letter in used else Factor(letter, **marks))
                    used.add(letter)
            dims.append(tuple(factors))
        return Operand(tuple(dims), operand.linear)

    text = Pattern(
        tuple(refined(operand, False, index) for index, operand in enumerate(pattern.inputs)),
        tuple(refined(operand, True, index) for index, operand in enumerate(pattern.outputs)),
    )
    kept = {name: value for name, value in decompositions.items() if name not in doubled}
    joint: dict[str, tuple[str, ...]] = {}
    for name, members in bound.rule.joint.items():
        outermost = tuple(became[member][0] for member in members if became[member])
        if len(outermost) == len(members) and not (fixed - set(kept)) & set(outermost):
            joint[name], became[name] = outermost, (name,)
            sizes[name] = math.gcd(*(sizes[letter] for letter in outermost))
            kept[name] = bound.rule.decompositions[name]
    equal = tuple(letter for name in bound.rule.equal for letter in became.get(name, ()) if letter in sizes)
    rule = Rule(
        pattern=str(text), sizes=sizes, reduction=bound.rule.reduction, decompositions=kept, joint=joint, equal=equal
    )
    return rule, classes, became


class Rendered:
    """``rendered``, once for all operators of one rule whose letters were refined alike: the blocks of a model."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Rule, Rule, dict[str, int], dict[str, tuple[str, ...]]]] = {}

    def __call__(
        self, bound: BoundRule, names: dict[int, str]
    ) -> tuple[Rule, dict[str, str], dict[str, tuple[str, ...]]]:
        """What ``rendered`` returns."""
        seen: dict[int, int] = {}
        letters = tuple(
            tuple((seen.setdefault(id(atom), len(seen)), atom.hint[:1], atom.size) for atom in leaves(atoms))
            for atoms in bound.letters.values()
        )
        literals = tuple(tuple(atom.size for atom in leaves([one])) for one in bound.literals.values())
        key = (id(bound.rule), bound.contiguous, letters, literals)
        classes = [names[one] for one in seen]
        if key not in self._known:  # rendered with the atoms' numbers in place of names; the rule is kept, with its id
            rule, numbers, became = rendered(bound, {one: str(number) for one, number in seen.items()})
            self._known[key] = (bound.rule, rule, {letter: int(one) for letter, one in numbers.items()}, became)
        _, rule, of, became = self._known[key]
        return rule, {letter: classes[number] for letter, number in of.items()}, dict(became)
