"""Closed forms of the bytes that each rank sends in a coded collective."""

from collections.abc import Callable, Sequence

from meshwright.errors import ScheduleError
from meshwright.ir.codec import Codec
from meshwright.schedules.collectives.coded_bytes import MessageSizes
from meshwright.schedules.collectives.operations import BALANCED, DENSE_GATHER
from meshwright.schedules.collectives.steps import Span, cut

_Size = Callable[[int, int, bool], int]
"""Bytes of an atom, as a function of its length, the number of ranks in its sum, and whether the receiver adds it."""


def closed_form(
    operation: str, algorithm: str, num_ranks: int, length: int, codec: Codec, item_bytes: int, chunk: int
) -> tuple[int, ...]:
    """The bytes that each rank sends, equal to the count in ``coded_bytes.sent_bytes``, but without a list of steps.

    Raises:
        ScheduleError: no closed form is known for the algorithm.
    """
    sizes = MessageSizes(codec, algorithm, item_bytes, chunk)
    form = _FORMS.get((operation, algorithm))
    if form is None:
        raise ScheduleError(
            "no closed form of its bytes", where=f"{operation} {algorithm}", remedy="count the bytes of its steps"
        )
    sample = sizes.sample(num_ranks) * (num_ranks - 1)
    return tuple(sample + form(rank, num_ranks, length, sizes.total) for rank in range(num_ranks))


def _parts(length: int, count: int) -> list[int]:
    spans: Sequence[Span] = cut((0, length), count)
    return [end - begin for begin, end in spans]


def _scatter_ring(rank: int, size: int, length: int, bytes_of: _Size) -> int:
    """A rank sends every part but its own, which comes last. Part j has passed (rank - 1 - j) mod size ranks before."""
    parts = _parts(length, size)
    return sum(bytes_of(parts[j], (rank - 1 - j) % size + 1, True) for j in range(size) if j != rank)


def _gather_ring(terms: int | None) -> "_Form":
    def form(rank: int, size: int, length: int, bytes_of: _Size) -> int:
        parts = _parts(length, size)
        return sum(bytes_of(parts[j], terms or size, False) for j in range(size) if j != (rank + 1) % size)

    return form


def _scatter_shares(rank: int, size: int, length: int, bytes_of: _Size) -> int:
    return sum(bytes_of(part, 1, True) for j, part in enumerate(_parts(length, size)) if j != rank)


def _gather_shares(terms: int | None) -> "_Form":
    def form(rank: int, size: int, length: int, bytes_of: _Size) -> int:
        return (size - 1) * bytes_of(_parts(length, size)[rank], terms or size, False)

    return form


def _star(rank: int, size: int, length: int, bytes_of: _Size) -> int:
    return bytes_of(length, 1, True) if rank else (size - 1) * bytes_of(length, size, False)


def _tree(rank: int, size: int, length: int, bytes_of: _Size) -> int:
    """A rank sends the sum of its subtree up the tree, and all sums down to its children."""
    reach = rank & -rank if rank else size
    up = bytes_of(length, min(reach, size - rank), True) if rank else 0
    children = sum(rank + (1 << power) < size for power in range((reach - 1).bit_length()))
    return up + children * bytes_of(length, size, False)


def _butterfly(rank: int, size: int, length: int, bytes_of: _Size) -> int:
    core = _core(size)
    if rank >= core:
        return bytes_of(length, 1, True)
    sent = 0
    for distance in _powers(core):
        block = rank // distance * distance
        sent += bytes_of(length, sum(_weight(i, size) for i in range(block, block + distance)), True)
    return sent + (bytes_of(length, size, False) if rank + core < size else 0)


def _halving(rank: int, size: int, parts: Sequence[Sequence[int]], bytes_of: _Size) -> int:
    """Recursive halving among the ranks below the largest power of two. ``parts[i]``: the lengths that rank i owns."""
    core = _core(size)
    if rank >= core:
        return sum(bytes_of(part, 1, True) for each in parts for part in each)
    sent = 0
    for distance in _powers(core):
        terms = sum(_weight(i, size) for i in range(core) if i % (2 * distance) == rank % (2 * distance))
        block = (rank ^ distance) // distance * distance
        sent += sum(bytes_of(part, terms, True) for each in parts[block : block + distance] for part in each)
    return sent


def _doubling(rank: int, size: int, parts: Sequence[Sequence[int]], terms: int, bytes_of: _Size) -> int:
    """Recursive doubling; ranks beyond the largest power of two receive all parts at the end."""
    core = _core(size)
    if rank >= core:
        return 0
    sent = 0
    for distance in _powers(core):
        block = rank // distance * distance
        sent += sum(bytes_of(part, terms, False) for each in parts[block : block + distance] for part in each)
    last = sum(bytes_of(part, terms, False) for each in parts for part in each)
    return sent + (last if rank + core < size else 0)


def _rabenseifner(rank: int, size: int, length: int, bytes_of: _Size) -> int:
    parts = [[part] for part in _parts(length, _core(size))]
    return _halving(rank, size, parts, bytes_of) + _doubling(rank, size, parts, size, bytes_of)


def _scatter_halving(rank: int, size: int, length: int, bytes_of: _Size) -> int:
    owned, core = _parts(length, size), _core(size)
    last = bytes_of(owned[rank + core], size, False) if rank + core < size else 0
    return _halving(rank, size, _folded(owned), bytes_of) + last


def _gather_doubling(rank: int, size: int, length: int, bytes_of: _Size) -> int:
    owned, core = _parts(length, size), _core(size)
    first = bytes_of(owned[rank], 1, False) if rank >= core else 0
    return first + _doubling(rank, size, _folded(owned), 1, bytes_of)


def _folded(owned: Sequence[int]) -> list[list[int]]:
    core = _core(len(owned))
    return [[owned[i], *owned[i + core : i + core + 1]] for i in range(core)]


def _core(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def _powers(core: int) -> list[int]:
    return [1 << power for power in range(core.bit_length() - 1)]


def _weight(rank: int, size: int) -> int:
    """The number of ranks whose elements a rank below the largest power of two holds after the fold."""
    return 1 + (rank + _core(size) < size)


def _both(scatter: "_Form", gather: "_Form") -> "_Form":
    return lambda *each: scatter(*each) + gather(*each)


_Form = Callable[[int, int, int, _Size], int]
"""Bytes that a rank sends, from the rank, the number of ranks, the length, and the bytes of an atom."""
_FORMS: dict[tuple[str, str], _Form] = {
    ("all_reduce", "ring"): _both(_scatter_ring, _gather_ring(None)),
    ("all_reduce", "partitioned"): _both(_scatter_shares, _gather_shares(None)),
    ("all_reduce", "shares"): _both(_scatter_shares, _gather_shares(None)),
    ("all_reduce", BALANCED): _both(_scatter_shares, _gather_shares(None)),
    ("all_reduce", DENSE_GATHER): _both(_scatter_shares, _gather_ring(None)),
    ("all_reduce", "star"): _star,
    ("all_reduce", "tree"): _tree,
    ("all_reduce", "butterfly"): _butterfly,
    ("all_reduce", "rabenseifner"): _rabenseifner,
    ("reduce_scatter", "ring"): _scatter_ring,
    ("reduce_scatter", "star"): _scatter_shares,
    ("reduce_scatter", "partitioned"): _scatter_shares,
    ("reduce_scatter", "halving"): _scatter_halving,
    ("all_gather", "ring"): _gather_ring(1),
    ("all_gather", "star"): _gather_shares(1),
    ("all_gather", "partitioned"): _gather_shares(1),
    ("all_gather", "halving"): _gather_doubling,
}
