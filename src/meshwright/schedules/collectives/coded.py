"""Coded collectives: what each message of a collective's steps carries if elements travel in coded form.

The vector is cut into *atoms*, which no message divides. A rank that sends an atom encodes it, and from then on holds
what it has sent: its elements become the decoded elements. An atom that was received and kept is sent on as it came.

    ring, 2 ranks, atoms a and b; E1 is the first encoding; a rank keeps the decoded sum in place of its own sum

    round 1   rank 0 sends E1 = code of its b          rank 1 sends E2 = code of its a
              rank 0 holds a + E2                      rank 1 holds b + E1
    round 2   rank 0 sends E3 = code of (a + E2)       rank 1 sends E4 = code of (b + E1)
              rank 0 holds E3, E4                      rank 1 holds E3, E4

The errors of E1 and E3 go to rank 0's residual, those of E2 and E4 to rank 1's. The sum of all results and residuals is
then exact, because each encoding is in the result once. Steps of which this is not true are refused.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

import msgspec

from meshwright.errors import ScheduleError
from meshwright.ir.codec import Codec
from meshwright.schedules.collectives.hierarchy import leaves, read
from meshwright.schedules.collectives.steps import Move, RequiredSum, Span, Steps

SURE = "ring, partitioned, shares, rabenseifner"
"""All-reduces that every codec may ride, for errors."""


class Part(msgspec.Struct, frozen=True, gc=False):
    """What a message carries of one atom: the sum of ``terms`` ranks' elements, in the bytes of encoding ``code``.

    ``code`` is an index of ``CodedSteps.encodings``; None if the elements travel as they are."""

    atom: int
    terms: int
    code: int | None


class CodedMove(msgspec.Struct, frozen=True, gc=False):
    """A message from ``source`` to ``target``, which adds it to its own elements (``adds``) or keeps it."""

    source: int
    target: int
    adds: bool
    parts: tuple[Part, ...]


class Encoding(msgspec.Struct, frozen=True, gc=False):
    """``rank`` encodes an atom, in which it holds the sum of ``terms`` ranks' elements. ``in_use``: the rank uses its
    elements later, so that they must become the decoded elements."""

    rank: int
    atom: int
    terms: int
    in_use: bool


class CodedSteps(msgspec.Struct, frozen=True, kw_only=True):
    """A collective in coded form: its atoms, and the messages of each round."""

    steps: Steps
    atoms: tuple[Span, ...]
    rounds: tuple[tuple[CodedMove, ...], ...]
    encodings: tuple[Encoding, ...]


def coded(steps: Steps, codec: Codec, *, everywhere: bool = False) -> CodedSteps:
    """The steps in coded form. In algorithms along levels (``star+ring@2x4``), only messages between boxes are coded,
    unless messages are coded ``everywhere``.

    Raises:
        ScheduleError: with this codec, the ranks would end with different bits, or an error would be in no rank's
            residual, or in several.
    """
    return _Run(steps, is_lossy=codec_loses(codec), everywhere=everywhere).all()


def codec_loses(codec: Codec) -> bool:
    """Whether an encoding of a partial sum has an error. Selections have none: they choose each rank's elements once,
    before the first message."""
    return codec.values is not None if codec.exchange == "merges" else codec.is_lossy


def chunks(span: Span, chunk: int) -> Iterator[Span]:
    """The chunks of an atom, from its start; the last one may be shorter."""
    for begin in range(span[0], span[1], chunk):
        yield begin, min(begin + chunk, span[1])


def crosses(algorithm: str) -> Callable[[int, int], bool]:
    """Whether messages from a source to a target are coded: all, or those between the outermost boxes."""
    leveled = read(algorithm)
    if leveled is None:
        return lambda source, target: True
    box_of = {rank: index for index, box in enumerate(leveled.boxes) for rank in leaves(box)}
    return lambda source, target: box_of[source] != box_of[target]


# --- symbolic run ----------------------------------------------------------------------------------------------------


class _Held:
    """What a rank holds of an atom: a symbolic value, and the encoding whose decoded elements these are, if any."""

    __slots__ = ("code", "value")

    def __init__(self, value: int, code: int | None = None) -> None:
        self.value, self.code = value, code


class _Values:
    """Symbolic values, numbered: equal numbers are equal bits. ``terms`` counts the ranks in a sum, ``codes`` the
    encodings. a + b counts as b + a, because both round to the same value."""

    def __init__(self) -> None:
        self.terms: list[Counter[int]] = [Counter()]
        self.codes: list[Counter[int]] = [Counter()]
        self._numbers: dict[tuple[str, int, int], int] = {}

    def of_rank(self, rank: int) -> int:
        return self._number(("rank", rank, 0), Counter([rank]), Counter())

    def add(self, left: int, right: int) -> int:
        if not left or not right:
            return left or right
        terms, codes = self.terms[left] + self.terms[right], self.codes[left] + self.codes[right]
        return self._number(("sum", min(left, right), max(left, right)), terms, codes)

    def decoded(self, value: int, code: int) -> int:
        return self._number(("code", value, code), self.terms[value], self.codes[value] + Counter([code]))

    def _number(self, key: tuple[str, int, int], terms: Counter[int], codes: Counter[int]) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.terms)
            self.terms.append(terms)
            self.codes.append(codes)
        return self._numbers[key]


class _Run:
    def __init__(self, steps: Steps, *, is_lossy: bool, everywhere: bool) -> None:
        self._steps, self._is_lossy, self._everywhere = steps, is_lossy, everywhere
        self._crosses = crosses(steps.algorithm)
        self._place = f"{steps.operation} {steps.algorithm}"
        moves = [move for moves in steps.rounds for move in moves]
        if any(move.begin != move.into for move in moves):
            raise self._refused("its messages are added up at another place than they come from")
        self._borders = sorted(
            {0, steps.length, *(border for move in moves for border in (move.begin, move.begin + move.length))}
            | {border for spans in steps.before for span in spans for border in span}
            | {border for parts in steps.after for part in parts for border in part.span}
        )
        self._atoms = tuple(pairwise(self._borders))
        self._values = _Values()
        self._held = [[_Held(0) for _ in self._atoms] for _ in steps.before]
        for rank, spans in enumerate(steps.before):
            for span in spans:
                for atom in self._inside(span):
                    self._held[rank][atom].value = self._values.of_rank(rank)
        self._encodings: list[tuple[int, int, int]] = []
        self._codes_of: dict[int, list[int]] = defaultdict(list)
        self._own: dict[tuple[int, int], int] = {}  # by (rank, atom): the rank's last encoding of elements it still has
        self._used: set[int] = set()
        self._ends: dict[int, int] = {}

    def all(self) -> CodedSteps:
        rounds = []
        for moves in self._steps.rounds:
            sent = [self._send(move) for move in moves]
            for move, values in sent:
                self._take(move, values)
            rounds.append(tuple(move for move, _ in sent))
        for rank, required in enumerate(self._steps.after):
            for part in required:
                self._check_end(rank, part)
        encodings = tuple(Encoding(*each, code in self._used) for code, each in enumerate(self._encodings))
        return CodedSteps(steps=self._steps, atoms=self._atoms, rounds=tuple(rounds), encodings=encodings)

    def _inside(self, span: Span) -> range:
        return range(bisect_left(self._borders, span[0]), bisect_left(self._borders, span[1]))

    def _send(self, move: Move) -> tuple[CodedMove, list[int]]:
        """The message, and the values that it carries."""
        is_coded = self._everywhere or self._crosses(move.source, move.target)
        parts, values = list[Part](), list[int]()
        for atom in self._inside((move.begin, move.begin + move.length)):
            held = self._held[move.source][atom]
            if not is_coded:
                self._read(move.source, atom)
            elif held.code is None:
                self._encode(move.source, atom)
            parts.append(Part(atom, self._values.terms[held.value].total(), held.code if is_coded else None))
            values.append(held.value)
        return CodedMove(move.source, move.target, move.adds, tuple(parts)), values

    def _encode(self, rank: int, atom: int) -> None:
        held = self._held[rank][atom]
        terms = self._values.terms[held.value]
        for other, ranks_held in enumerate(self._held if self._is_lossy else ()):
            if other != rank and self._values.terms[ranks_held[atom].value] == terms:
                first, second = sorted((rank, other))
                raise self._refused(f"ranks {first} and {second} hold the same sum when it is coded")
        self._read(rank, atom)
        held.code = self._own[rank, atom] = len(self._encodings)
        self._encodings.append((rank, atom, terms.total()))
        self._codes_of[atom].append(held.code)
        if self._is_lossy:
            held.value = self._values.decoded(held.value, held.code)

    def _read(self, rank: int, atom: int) -> None:
        """Note that the rank uses its elements: if it has encoded them, the decoded ones."""
        if (rank, atom) in self._own:
            self._used.add(self._own[rank, atom])

    def _take(self, move: CodedMove, values: list[int]) -> None:
        for part, value in zip(move.parts, values, strict=True):
            held = self._held[move.target][part.atom]
            if move.adds:
                self._read(move.target, part.atom)
                held.value, held.code = self._values.add(held.value, value), None
            else:
                self._own.pop((move.target, part.atom), None)
                held.value, held.code = value, part.code

    def _check_end(self, rank: int, part: RequiredSum) -> None:
        wanted = Counter(source for source, _ in part.terms)
        for atom in self._inside(part.span):
            self._read(rank, atom)
            value = self._held[rank][atom].value
            if value != self._ends.setdefault(atom, value):
                raise self._refused("ranks end with different bits")
            if self._values.terms[value] != wanted:
                raise self._refused(f"rank {rank} ends without each contribution once")
            if self._is_lossy and self._values.codes[value] != Counter(self._codes_of[atom]):
                raise self._refused(f"rank {rank} ends without each coded message once")

    def _refused(self, problem: str) -> ScheduleError:
        return ScheduleError(problem, where=self._place, remedy=f"choose another algorithm for this codec: {SURE}")
