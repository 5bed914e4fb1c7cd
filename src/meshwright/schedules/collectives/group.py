"""Building blocks of collectives: rounds in which some ranks send elements and add them up in place.

``ranks`` may be any subset of the ranks. ``owned[i]`` lists the spans that ``ranks[i]`` owns: the rank holds the sum of
these elements after a reduce-scatter, and the elements themselves before an all-gather. A reduce-scatter adds and an
all-gather copies. Each all-gather is a reduce-scatter in reverse.
"""

from collections.abc import Callable, Iterable, Sequence

from meshwright.schedules.collectives.steps import Move, Rounds, Span, cut, message

Owned = Sequence[Sequence[Span]]
"""The spans that each rank of a group owns, in the order of the ranks."""
Half = Callable[[Sequence[int], Owned], Rounds]
"""A reduce-scatter or an all-gather: half of an all-reduce."""
Whole = Callable[[Sequence[int], Span], Rounds]
"""A collective over a whole span, such as an all-reduce or a reduce to the first rank."""


def backwards(rounds: Rounds) -> Rounds:
    """The rounds in reverse: every move goes from its target to its source, and copies instead of adding."""
    return [[Move(m.target, m.source, m.into, m.begin, m.length) for m in moves] for moves in rounds[::-1]]


def owns(span: Span, parts: int) -> list[list[Span]]:
    """``parts`` nearly equal pieces of a span, one list for each rank."""
    return [[piece] for piece in cut(span, parts)]


def distances(size: int) -> list[int]:
    """The powers of two below ``size``: 1, 2, 4, ..."""
    return [1 << power for power in range((size - 1).bit_length())]


def _round(messages: Iterable[tuple[int, int, Iterable[Span]]], *, adds: bool = False) -> list[Move]:
    """The moves of one round, from messages given by source, target and spans."""
    return [move for source, target, spans in messages for move in message(source, target, spans, adds=adds)]


# --- reduce-scatters and all-gathers ---------------------------------------------------------------------------------


def scatter_ring(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Sums go around a ring: in turn t, each rank sends the part that is owned by the rank t + 1 places before it."""
    size = len(ranks)
    return [
        _round(((ranks[i], ranks[(i + 1) % size], owned[(i - 1 - turn) % size]) for i in range(size)), adds=True)
        for turn in range(size - 1)
    ]


def gather_ring(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Parts go around a ring: in turn t, each rank sends the part of the rank t places before it."""
    size = len(ranks)
    return [
        _round((ranks[i], ranks[(i + 1) % size], owned[(i - turn) % size]) for i in range(size))
        for turn in range(size - 1)
    ]


def scatter_star(ranks: Sequence[int], owned: Owned) -> Rounds:
    """All ranks send to every owner in one round: a star for each rank, with that rank as its centre."""
    return [[move for sent in scatter_partitioned(ranks, owned) for move in sent]]


def gather_star(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Each rank sends its own part to all ranks in one round."""
    return backwards(scatter_star(ranks, owned))


def scatter_partitioned(ranks: Sequence[int], owned: Owned) -> Rounds:
    """In turn t, each rank sends to the rank t places after it, which owns the part that is sent. So no rank receives
    two messages at the same time."""
    size = len(ranks)
    return [
        _round(((ranks[i], ranks[(i + turn) % size], owned[(i + turn) % size]) for i in range(size)), adds=True)
        for turn in range(1, size)
    ]


def gather_partitioned(ranks: Sequence[int], owned: Owned) -> Rounds:
    """In turn t each rank sends its own part to the rank t places before it."""
    return backwards(scatter_partitioned(ranks, owned))[::-1]


def scatter_halving(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Recursive halving: in each round, each rank sends its partner the half that belongs to the partner's side.

    If the number of ranks is not a power of two, the ranks beyond the largest power first send their vectors to a rank
    that acts for them, and receive their part from it in the end (Rabenseifner 2004).
    """
    size, core = len(ranks), _power(len(ranks))
    parts = [[*owned[i], *(owned[i + core] if i + core < size else ())] for i in range(core)]
    rounds = _folded(ranks, [span for spans in owned for span in spans])
    for distance in reversed(distances(core)):
        sent = []
        for i in range(core):
            other = i ^ distance
            first = other // distance * distance
            sent.append((ranks[i], ranks[other], [span for part in parts[first : first + distance] for span in part]))
        rounds.append(_round(sent, adds=True))
    last = _round((ranks[i - core], ranks[i], owned[i]) for i in range(core, size))
    return [sent for sent in [*rounds, last] if sent]


def gather_doubling(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Recursive doubling: in each round, each rank and its partner exchange all parts that they have so far."""
    return backwards(scatter_halving(ranks, owned))


# --- to and from one rank --------------------------------------------------------------------------------------------


def reduce_star(ranks: Sequence[int], span: Span) -> Rounds:
    """All ranks send to the first rank, which adds the vectors up."""
    return [_round(((rank, ranks[0], [span]) for rank in ranks[1:]), adds=True)]


def reduce_tree(ranks: Sequence[int], span: Span) -> Rounds:
    """Reduce up a binomial tree to the first rank: in each round, half of the remaining ranks send their sums."""
    size = len(ranks)
    return [
        _round(((ranks[i], ranks[i - distance], [span]) for i in range(distance, size, 2 * distance)), adds=True)
        for distance in distances(size)
    ]


def reduce_binary_tree(ranks: Sequence[int], span: Span) -> Rounds:
    """Reduce up a binary tree: rank 0 is the root, and the children of rank i are ranks 2i + 1 and 2i + 2."""
    levels = [range(distance - 1, min(2 * distance - 1, len(ranks))) for distance in distances(len(ranks) + 1)[1:]]
    return [_round(((ranks[i], ranks[(i - 1) // 2], [span]) for i in level), adds=True) for level in reversed(levels)]


def gather_tree(ranks: Sequence[int], owned: Owned) -> Rounds:
    """Gather up a binomial tree to the first rank: each rank sends all parts of its subtree."""
    return [
        _round(
            (ranks[i], ranks[i - distance], [span for spans in owned[i : i + distance] for span in spans])
            for i in range(distance, len(ranks), 2 * distance)
        )
        for distance in distances(len(ranks))
    ]


def gather_to_first(ranks: Sequence[int], owned: Owned) -> Rounds:
    """All ranks send their parts to the first rank in one round."""
    return [_round((rank, ranks[0], spans) for rank, spans in zip(ranks[1:], owned[1:], strict=True))]


# --- all-reduces -----------------------------------------------------------------------------------------------------


def up_and_down(reduce: Whole) -> Whole:
    """An all-reduce: a reduce to the first rank, then its reverse, a broadcast."""

    def all_reduce(ranks: Sequence[int], span: Span) -> Rounds:
        up = reduce(ranks, span)
        return up + backwards(up)

    return all_reduce


def all_reduce_naive(ranks: Sequence[int], span: Span) -> Rounds:
    """Each rank sends its whole vector to every other rank in one round."""
    return [_round(((i, j, [span]) for i in ranks for j in ranks if i != j), adds=True)]


def all_reduce_butterfly(ranks: Sequence[int], span: Span) -> Rounds:
    """Recursive doubling: in each round, each rank and its partner exchange their sums.

    If the number of ranks is not a power of two, the ranks beyond the largest power first send their vectors to a rank
    that acts for them, and receive the sum from it in the end.
    """
    core, fold = _power(len(ranks)), _folded(ranks, [span])
    rounds = [
        _round(((ranks[i], ranks[i ^ distance], [span]) for i in range(core)), adds=True)
        for distance in distances(core)
    ]
    return fold + rounds + backwards(fold)


def in_halves(scatter: Half, gather: Half) -> Whole:
    """An all-reduce: a reduce-scatter, then an all-gather."""

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
    """All-reduce over two binary trees, each for half of the elements. Inner ranks of one tree are leaves of the other.

    Each half is cut into ``pieces``, so that a rank passes one piece on while it receives the next (Sanders, Speck,
    Träff 2009). With an odd number of ranks the second tree is the first tree shifted by one.
    """
    size = len(ranks)
    mirror = [size - 1 - i for i in range(size)] if size % 2 == 0 else [(i + 1) % size for i in range(size)]
    trees = [list(ranks), [ranks[i] for i in mirror]]
    parent = {i: _parent(i, size) for i in range(1, size)}
    order = _leaves_first(parent)
    rounds: dict[int, list[Move]] = {}
    for tree, half in zip(trees, cut(span, 2), strict=True):
        sent_up: dict[int, int] = {}  # by rank of the tree: the next round in which it can send up the tree
        got_down: dict[int, int] = {}
        for piece in cut(half, pieces):
            there: dict[int, int] = {}  # the first round in which a rank has the sum of its subtree
            for i in order:
                turn = max(there.get(i, 0), sent_up.get(i, 0))
                rounds.setdefault(turn, []).extend(message(tree[i], tree[parent[i]], [piece], adds=True))
                sent_up[i] = turn + 1
                there[parent[i]] = max(there.get(parent[i], 0), turn + 1)
            for i in reversed(order):
                turn = max(there[parent[i]], got_down.get(i, 0))
                rounds.setdefault(turn, []).extend(message(tree[parent[i]], tree[i], [piece]))
                got_down[i] = there[i] = turn + 1
    return [rounds[turn] for turn in sorted(rounds)]


def _parent(i: int, size: int) -> int:
    """The parent of i in a binary tree over 0, 1, ..., in which all odd numbers are leaves and 0 is the root."""
    bit = i & -i
    above = (i ^ bit) | (bit << 1)
    return above if above < size else i ^ bit


def _leaves_first(parent: dict[int, int]) -> list[int]:
    """All ranks except the root, the deepest first."""

    def depth(i: int) -> int:
        return 1 + depth(parent[i]) if i else 0

    return sorted(parent, key=depth, reverse=True)


def _power(size: int) -> int:
    """The largest power of two that is at most ``size``."""
    return 1 << (size.bit_length() - 1)


def _folded(ranks: Sequence[int], spans: Iterable[Span]) -> Rounds:
    """The round in which ranks beyond the largest power of two send to the ranks that act for them."""
    core = _power(len(ranks))
    return [_round(((ranks[i], ranks[i - core], spans) for i in range(core, len(ranks))), adds=True)]
