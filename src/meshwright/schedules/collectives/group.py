"""What collectives are made of: rounds among some ranks, on some elements, in place. Each rank owns part of them.

``ranks`` may be any; ``owned[i]`` is what ``ranks[i]`` owns: where its sum shall lie after a reduce-scatter, where its
part lies before an all-gather. Reduce-scatters add, all-gathers copy; each all-gather is its reduce-scatter backwards.
"""

from collections.abc import Callable, Iterable, Sequence

from meshwright.schedules.collectives.steps import Move, Rounds, Span, cut, message

Owned = Sequence[Sequence[Span]]
Half = Callable[[Sequence[int], Owned], Rounds]
Whole = Callable[[Sequence[int], Span], Rounds]


def backwards(rounds: Rounds) -> Rounds:
    """The same rounds in reverse, from the targets to the sources, that copy instead of adding."""
    return [[Move(one.target, one.source, one.into, one.begin, one.length) for one in sent] for sent in rounds[::-1]]


def owns(span: Span, parts: int) -> list[list[Span]]:
    """Equal pieces, one for each."""
    return [[piece] for piece in cut(span, parts)]


def distances(size: int) -> list[int]:
    """1, 2, 4, ... below ``size``."""
    return [1 << power for power in range((size - 1).bit_length())]


def _round(messages: Iterable[tuple[int, int, Iterable[Span]]], *, adds: bool = False) -> list[Move]:
    """Messages that are sent at the same time, by source, target and elements."""
    return [one for source, target, spans in messages for one in message(source, target, spans, adds=adds)]


# --- everyone adds up, or collects -----------------------------------------------------------------------------------


def scatter_ring(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Sums go around: what rank i sends in turn t is what the rank t + 1 before it owns."""
    size = len(ranks)
    return [
        _round(((ranks[i], ranks[(i + 1) % size], owned[(i - 1 - turn) % size]) for i in range(size)), adds=True)
        for turn in range(size - 1)
    ]


def gather_ring(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Parts go around."""
    size = len(ranks)
    return [
        _round((ranks[i], ranks[(i + 1) % size], owned[(i - turn) % size]) for i in range(size))
        for turn in range(size - 1)
    ]


def scatter_star(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Everyone sends to each owner at once: as many stars as ranks, each with its own centre."""
    return [[one for sent in scatter_partitioned(ranks, owned) for one in sent]]


def gather_star(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Everyone sends what it owns to all at once."""
    return backwards(scatter_star(ranks, owned))


def scatter_partitioned(ranks: Sequence[int], owned: Owned) -> Rounds:
    """In turn t everyone sends to the rank t further on what that rank owns: nobody takes two messages at once."""
    size = len(ranks)
    return [
        _round(((ranks[i], ranks[(i + turn) % size], owned[(i + turn) % size]) for i in range(size)), adds=True)
        for turn in range(1, size)
    ]


def gather_partitioned(ranks: Sequence[int], owned: Owned) -> Rounds:
    """In turn t everyone sends what it owns to the rank t further on."""
    return backwards(scatter_partitioned(ranks, owned))[::-1]


def scatter_halving(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Recursive halving: with the rank across, each gives away the half that it does not own.

    Of a number of ranks that is no power of two, those beyond first give all they have to the rank that stands for
    them, and get their part from it in the end (Rabenseifner 2004).
    """
    size, core = len(ranks), _power(len(ranks))
    mine = [[*owned[i], *(owned[i + core] if i + core < size else ())] for i in range(core)]
    rounds = _folded(ranks, [span for spans in owned for span in spans])
    for distance in reversed(distances(core)):
        sent = []
        for i in range(core):
            other = i ^ distance
            first = other // distance * distance
            sent.append((ranks[i], ranks[other], [span for part in mine[first : first + distance] for span in part]))
        rounds.append(_round(sent, adds=True))
    last = _round((ranks[i - core], ranks[i], owned[i]) for i in range(core, size))
    return [sent for sent in [*rounds, last] if sent]


def gather_doubling(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Recursive doubling: with the rank across, each exchanges what it has by then."""
    return backwards(scatter_halving(ranks, owned))


# --- to and from one of them -----------------------------------------------------------------------------------------


def reduce_star(ranks: Sequence[int], span: Span) -> Rounds:
    """All send to the first, which adds up."""
    return [_round(((rank, ranks[0], [span]) for rank in ranks[1:]), adds=True)]


def reduce_tree(ranks: Sequence[int], span: Span) -> Rounds:
    """Up a binomial tree to the first: in each round, half of those who are left send their sums and are done."""
    size = len(ranks)
    return [
        _round(((ranks[i], ranks[i - distance], [span]) for i in range(distance, size, 2 * distance)), adds=True)
        for distance in distances(size)
    ]


def reduce_binary_tree(ranks: Sequence[int], span: Span) -> Rounds:
    """Up a binary tree: rank 0 is the root, and 2i + 1 and 2i + 2 are below rank i."""
    levels = [range(distance - 1, min(2 * distance - 1, len(ranks))) for distance in distances(len(ranks) + 1)[1:]]
    return [_round(((ranks[i], ranks[(i - 1) // 2], [span]) for i in level), adds=True) for level in reversed(levels)]


def gather_tree(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Up a binomial tree to the first, each with what it has from below; the scatter is this backwards."""
    return [
        _round(
            (ranks[i], ranks[i - distance], [span for spans in owned[i : i + distance] for span in spans])
            for i in range(distance, len(ranks), 2 * distance)
        )
        for distance in distances(len(ranks))
    ]


def gather_to_first(ranks: Sequence[int], owned: Owned) -> Rounds:
    """All send what they own to the first at once."""
    return [_round((rank, ranks[0], spans) for rank, spans in zip(ranks[1:], owned[1:], strict=True))]


# --- all-reduces -----------------------------------------------------------------------------------------------------


def up_and_down(reduce: Whole) -> Whole:
    """An all-reduce of a reduce to the first rank and the broadcast that is the same backwards."""

    def all_reduce(ranks: Sequence[int], span: Span) -> Rounds:
        up = reduce(ranks, span)
        return up + backwards(up)

    return all_reduce


def all_reduce_naive(ranks: Sequence[int], span: Span) -> Rounds:
    """Everyone sends all it has to everyone at once."""
    return [_round(((i, j, [span]) for i in ranks for j in ranks if i != j), adds=True)]


def all_reduce_butterfly(ranks: Sequence[int], span: Span) -> Rounds:
    """Recursive doubling: in each round everyone exchanges its sum with the rank across.

    Of a number of ranks that is no power of two, those beyond first give what they have to the rank that stands for
    them, and get the sum from it in the end.
    """
    core, fold = _power(len(ranks)), _folded(ranks, [span])
    rounds = [
        _round(((ranks[i], ranks[i ^ distance], [span]) for i in range(core)), adds=True)
        for distance in distances(core)
    ]
    return fold + rounds + backwards(fold)


def in_halves(scatter: Half, gather: Half) -> Whole:
    """An all-reduce of a reduce-scatter and an all-gather."""

    def all_reduce(ranks: Sequence[int], span: Span) -> Rounds:
        owned = owns(span, len(ranks))
        return scatter(ranks, owned) + gather(ranks, owned)

    return all_reduce


def all_reduce_rabenseifner(ranks: Sequence[int], span: Span) -> Rounds:
    """Recursive halving, then recursive doubling (Thakur, Rabenseifner, Gropp 2005, section 4.4)."""
    core, fold = _power(len(ranks)), _folded(ranks, [span])
    halves = scatter_halving(ranks[:core], owns(span, core))
    return fold + halves + backwards(halves) + backwards(fold)


def all_reduce_double_tree(ranks: Sequence[int], span: Span, pieces: int = 4) -> Rounds:
    """Half of the elements up and down one binary tree, half another, whose inner ranks are the first one's leaves.

    Each half goes in ``pieces``, one behind the other, so that a rank passes one on while the next comes (Sanders,
    Speck, Träff 2009). With an odd number of ranks the second tree is the first shifted by one.
    """
    size = len(ranks)
    mirror = [size - 1 - i for i in range(size)] if size % 2 == 0 else [(i + 1) % size for i in range(size)]
    trees = [list(ranks), [ranks[i] for i in mirror]]
    parent = {i: _parent(i, size) for i in range(1, size)}
    order = _leaves_first(parent)
    found: dict[int, list[Move]] = {}
    for tree, half in zip(trees, cut(span, 2), strict=True):
        sent_up: dict[int, int] = {}  # by rank of the tree: the round in which it sent its last piece
        got_down: dict[int, int] = {}
        for piece in cut(half, pieces):
            there: dict[int, int] = {}  # the round after which it has the sum of what is below it
            for i in order:
                turn = max(there.get(i, 0), sent_up.get(i, 0))
                found.setdefault(turn, []).extend(message(tree[i], tree[parent[i]], [piece], adds=True))
                sent_up[i] = turn + 1
                there[parent[i]] = max(there.get(parent[i], 0), turn + 1)
            for i in reversed(order):
                turn = max(there[parent[i]], got_down.get(i, 0))
                found.setdefault(turn, []).extend(message(tree[parent[i]], tree[i], [piece]))
                got_down[i] = there[i] = turn + 1
    return [found[turn] for turn in sorted(found)]


def _parent(i: int, size: int) -> int:
    """In a binary tree over 0, 1, ... whose odd members are leaves and whose root is 0."""
    bit = i & -i
    above = (i ^ bit) | (bit << 1)
    return above if above < size else i ^ bit


def _leaves_first(parent: dict[int, int]) -> list[int]:
    """All ranks but the root."""

    def depth(i: int) -> int:
        return 1 + depth(parent[i]) if i else 0

    return sorted(parent, key=depth, reverse=True)


def _power(size: int) -> int:
    """The largest power of two that is not above ``size``."""
    return 1 << (size.bit_length() - 1)


def _folded(ranks: Sequence[int], spans: Iterable[Span]) -> Rounds:
    """Ranks beyond the largest power of two send to those that stand for them."""
    core = _power(len(ranks))
    return [_round(((ranks[i], ranks[i - core], spans) for i in range(core, len(ranks))), adds=True)]
