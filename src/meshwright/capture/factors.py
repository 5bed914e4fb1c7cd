"""Joins factors along the graph's edges: factors of several operators get one class if they describe the same dim.

If operators divide a dim in different ways, the dim is refined into smaller factors that the operators have in common.
A GPT-2 projection makes 2304 features. A split reads them as ``(3 f)``, and a view reads ``f`` as ``(h d)``. Joining
refines the projection's single factor to ``(3 h d)``, so that a split of ``h`` cuts each of the weight's three blocks:

    mm      "m j, j f -> m f"                      mm      "(b s) k, k (3 h d) -> (b s) (3 h d)"
    view    "m f -> _0 _1 f"            becomes    view    "(b s) (3 h d) -> b s (3 h d)"
    split   "_0 _1 (3 _2) -> ..."                  split   "b s (3 h d) -> b s (h d), b s (h d), b s (h d)"
    view    "_0 _1 (_2 _3) -> ..."                 view    "b s (h d) -> b s h d"
"""

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from meshwright.ir.rule import Dim, Factor, Pattern, PatternOperand, Rule

PRIORITY = ("h", "v", "b", "s", "n", "c", "k", "f", "d", "e", "t", "y", "x", "z", "p", "q", "j", "m", "r")
"""Letters, the most meaningful first. A factor class gets the most meaningful letter that any of its operators uses."""


@dataclass(eq=False)
class Atom:
    """A factor that may turn out to be a product of smaller factors."""

    size: int
    parent: "Atom | None" = None
    parts: "list[Atom] | None" = None
    hint: str = ""

    def root(self) -> "Atom":
        """The atom that represents this atom and all atoms joined with it."""
        atom = self
        while atom.parent is not None:
            atom = atom.parent
        while self.parent is not None and self.parent is not atom:
            self.parent, self = atom, self.parent
        return atom


def leaves(atoms: Iterable[Atom]) -> list[Atom]:
    """Return the atoms into which ``atoms`` have been refined, outermost first."""
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
    """Refine a leaf into two atoms: the first of size ``size``, the second of the remaining size."""
    atom.parts = [Atom(size, hint=""), Atom(atom.size // size, hint=atom.hint)]


def unify(left: Sequence[Atom], right: Sequence[Atom]) -> bool:
    """Join two lists of atoms that describe the same dim, and refine both. If they do not fit, return False."""
    a, b = leaves(left), leaves(right)
    i = j = 0
    while i < len(a) and j < len(b):
        first, second = a[i].root(), b[j].root()
        if first.parts is not None:
            a[i : i + 1] = leaves([first])
            continue
        if second.parts is not None:
            b[j : j + 1] = leaves([second])
            continue
        if first.size == second.size:
            _union(first, second)
            i, j = i + 1, j + 1
        elif first.size == 1:
            i += 1
        elif second.size == 1:
            j += 1
        else:
            large, small = (first, second) if first.size > second.size else (second, first)
            if small.size == 0 or large.size % small.size:
                return False
            _cut(large, small.size)
    return True


BoundOperand = list[list[list[Atom]]]
"""For each dim, the atoms of each of its factors."""


@dataclass
class BoundRule:
    """A rule with atoms for its letters and for its literal sizes (``literals``)."""

    rule: Rule
    letters: dict[str, list[Atom]]
    contiguous: frozenset[str]
    literals: list[Atom]
    inputs: list[BoundOperand]
    outputs: list[BoundOperand]


def bind(rule: Rule, contiguous: frozenset[str] = frozenset()) -> BoundRule:
    """Make new atoms for the letters and literal sizes of a rule."""
    literals: list[Atom] = []
    letters = {
        name: [Atom(size, hint="" if name.startswith("_") else name.rstrip("0123456789"))]
        for name, size in rule.sizes.items()
    }

    def atoms(factor: Factor) -> list[Atom]:
        if factor.name:
            return letters[factor.name]
        literals.append(Atom(factor.size or 0))
        return literals[-1:]

    inputs, outputs = (
        [[[atoms(factor) for factor in dim] for dim in operand.dims] for operand in operands]
        for operands in (rule.parsed.inputs, rule.parsed.outputs)
    )
    return BoundRule(rule, letters, contiguous, literals, inputs, outputs)


def dim_atoms(operand: BoundOperand) -> list[list[Atom]]:
    """The atoms of each dim of an operand."""
    return [[atom for factor in dim for atom in factor] for dim in operand]


def unused(stem: str, taken: Container[str]) -> str:
    """``stem`` if no name in ``taken`` equals it; else ``stem`` with the lowest number that makes a new name."""
    numbered = (f"{stem}{number or ''}" for number in count())
    return next(name for name in numbered if name not in taken)


def rendered(bound: BoundRule, names: dict[int, str]) -> tuple[Rule, dict[str, str], dict[str, tuple[str, ...]]]:
    """Return the refined rule, the factor class of each of its letters, and the new letters of each original letter.

    ``names`` maps the id of each leaf atom to the name of its class. A letter that needs contiguous parts, has a
    decomposition, or is a stencil can only be split at its outermost factor. Letters of one class stay separate:
    splitting one letter does not split another. In self-attention, for example, the letters of queries and of keys are
    both of the class of the sequence.
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
        letters: list[str] = []
        for position, atom in enumerate(leaves(atoms)):
            if (original, id(atom)) not in letter_of:
                letter = letter_of[original, id(atom)] = unused((atom.hint or "x")[:1], classes)
                classes[letter] = names[id(atom)]
                sizes[letter] = atom.size
            letter = letter_of[original, id(atom)]
            letters.append(letter)
            if position and original in outermost_only:
                fixed.add(letter)
            elif original in bound.rule.decompositions:
                decompositions[letter] = bound.rule.decompositions[original]
            if original in fixed_originals:
                fixed.add(letter)
            if original in stencil_originals and not position:
                stencils.add(letter)
        became[original] = tuple(letters)
    # a letter that contains one factor twice (a flattened tensor [s, s]) cannot be split
    doubled = {letter for letters in became.values() for letter in letters if letters.count(letter) > 1}
    fixed |= doubled
    pattern = bound.rule.parsed

    def refined(operand: PatternOperand, atoms: BoundOperand) -> PatternOperand:
        dims: list[Dim] = []
        used: set[str] = set()
        for dim, parts in zip(operand.dims, atoms, strict=True):
            factors: list[Factor] = []
            for factor, part in zip(dim, parts, strict=True):
                pieces = leaves(part)
                for atom, letter in zip(pieces, became.get(factor.name, [""] * len(pieces)), strict=True):
                    marks = {"fixed": letter in fixed, "stencil": letter in stencils - fixed}
                    is_letter = letter and letter not in used
                    factors.append(Factor(letter, **marks) if is_letter else Factor("", size=atom.size))
                    used.add(letter)
            dims.append(tuple(factors))
        return PatternOperand(tuple(dims), operand.linear)

    text = Pattern(
        tuple(map(refined, pattern.inputs, bound.inputs)), tuple(map(refined, pattern.outputs, bound.outputs))
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
    """Runs ``rendered`` once for all operators of the same rule and refinement, such as those of repeated blocks."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Rule, Rule, dict[str, int], dict[str, tuple[str, ...]]]] = {}

    def __call__(
        self, bound: BoundRule, names: dict[int, str]
    ) -> tuple[Rule, dict[str, str], dict[str, tuple[str, ...]]]:
        """Return the result of ``rendered``. If an equal call was made before, its result is reused."""
        seen: dict[int, int] = {}
        letters = tuple(
            tuple((seen.setdefault(id(atom), len(seen)), atom.hint[:1], atom.size) for atom in leaves(atoms))
            for atoms in bound.letters.values()
        )
        literals = tuple(tuple(atom.size for atom in leaves([literal])) for literal in bound.literals)
        key = (id(bound.rule), bound.contiguous, letters, literals)
        classes = [names[atom_id] for atom_id in seen]
        if key not in self._known:  # numbers stand for class names; the cached rule keeps its id from being reused
            rule, numbers, became = rendered(bound, {atom_id: str(number) for atom_id, number in seen.items()})
            self._known[key] = (bound.rule, rule, {letter: int(text) for letter, text in numbers.items()}, became)
        _, rule, of, became = self._known[key]
        return rule, {letter: classes[number] for letter, number in of.items()}, dict(became)
