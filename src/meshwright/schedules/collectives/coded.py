"""Coded collectives: the content of each message if a collective sends elements in coded form.

The vector is cut into *atoms*, which are never divided by a message. A rank that sends an atom encodes it. From then
on, it uses the decoded elements instead of its own elements, so its values equal the values that it has sent. An atom
that was received and stored is forwarded unchanged.

    ring, 2 ranks, atoms a and b; E1 is the first encoding; a rank keeps the decoded sum in place of its own sum

    round 1   rank 0 sends E1 = code of its b          rank 1 sends E2 = code of its a
              rank 0 holds a + E2                      rank 1 holds b + E1
    round 2   rank 0 sends E3 = code of (a + E2)       rank 1 sends E4 = code of (b + E1)
              rank 0 holds E3, E4                      rank 1 holds E3, E4

The errors of E1 and E3 are added to rank 0's residual, and the errors of E2 and E4 to rank 1's. The sum of all results
and residuals is then exact, because each encoding is contained in the result exactly once. Algorithms without this
property are refused.
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
"""All-reduces that can carry every codec, for error messages."""


class AtomPart(msgspec.Struct, frozen=True, gc=False):
    """The content of a message for one atom: the sum of ``terms`` ranks' elements, in the bytes of the encoding
    ``code``.

    ``code`` is an index of ``CodedSteps.encodings``; None if the elements are not encoded."""

    atom: int
    terms: int
    code: int | None


class CodedMove(msgspec.Struct, frozen=True, gc=False):
    """A message from ``source`` to ``target``. The target adds it to its own elements (``adds``) or stores it."""

    source: int
    target: int
    adds: bool
    parts: tuple[AtomPart, ...]


class Encoding(msgspec.Struct, frozen=True, gc=False):
    """An encoding of an atom by ``rank``, which holds the sum of ``terms`` ranks' elements. ``in_use``: the rank uses
    these elements later, so it must replace them by the decoded elements."""

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
    """The steps in coded form. In hierarchical algorithms (``star+ring@2x4``), only messages between boxes are coded,
    unless ``everywhere`` is set.

    Raises:
        ScheduleError: with this codec, ranks would end with different bits, or an error would be missing from the
            residuals or be in several of them.
    """
    return _Run(steps, is_lossy=codec_loses(codec), everywhere=everywhere).all()


def codec_loses(codec: Codec) -> bool:
    """Whether an encoding of a partial sum has an error. Selections have no error: they choose each rank's elements
    once, before the first message."""
    return codec.values is not None if codec.exchange == "merges" else codec.is_lossy


def chunks(span: Span, chunk: int) -> Iterator[Span]:
    """Yield the chunks of an atom, from its start. The last chunk may be shorter."""
    for begin in range(span[0], span[1], chunk):
        yield begin, min(begin + chunk, span[1])


def crosses(algorithm: str) -> Callable[[int, int], bool]:
    """A function that says whether messages from a source to a target are coded: all messages, or only messages between
    the outermost boxes."""
    leveled = read(algorithm)
    if leveled is None:
        return lambda source, target: True
    box_of = {rank: index for index, box in enumerate(leveled.boxes) for rank in leaves(box)}
    return lambda source, target: box_of[source] != box_of[target]


# --- symbolic run ----------------------------------------------------------------------------------------------------


class _Held:
    """What a rank stores for an atom: a symbolic value, and the encoding from which these elements were decoded, if
    any."""

    __slots__ = ("code", "value")

    def __init__(self, value: int, code: int | None = None) -> None:
        self.value, self.code = value, code


class _Values:
    """Numbered symbolic values. Equal numbers mean equal bits. ``terms`` counts the ranks in a sum, and ``codes``
    counts the encodings. a + b counts as b + a, because both round to the same value."""

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
        self._own: dict[tuple[int, int], int] = {}  # by (rank, atom): the rank's last encoding of elements that it has
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
        """The message, and the symbolic values in it."""
        is_coded = self._everywhere or self._crosses(move.source, move.target)
        parts, values = list[AtomPart](), list[int]()
        for atom in self._inside((move.begin, move.begin + move.length)):
            held = self._held[move.source][atom]
            if not is_coded:
                self._read(move.source, atom)
            elif held.code is None:
                self._encode(move.source, atom)
            parts.append(AtomPart(atom, self._values.terms[held.value].total(), held.code if is_coded else None))
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
        """Record that the rank uses its elements. If it has encoded them, it uses the decoded elements."""
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
