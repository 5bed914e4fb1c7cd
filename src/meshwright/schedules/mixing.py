"""Mixing of replicas' states: topologies of gossip, and the weights with which neighbours are averaged.

A matrix W has a row for each member: the new state of member i is the sum of W[i][j] times the state of member j. If W
is doubly stochastic (its rows and columns have sum 1), the mean of all states does not change (D-PSGD, Lian et al.
2017). Push-sum needs only columns with sum 1 (Assran et al. 2019).
"""

import math
import random
from collections import Counter
from collections.abc import Sequence

from meshwright.errors import PlanError
from meshwright.ir.consistency import Gossip

NEAR = 1e-9


def outgoing(rule: Gossip, members: Sequence[int], replica: int, step: int) -> tuple[int, ...]:
    """The replicas to which ``replica`` sends its state in a step, except itself. ``members``: the replicas that
    are alive, in rising order."""
    if rule.topology == "edges":
        ends = [(a, b) for a, b, _ in rule.edges] + [(b, a) for a, b, _ in rule.edges]
        return tuple(sorted({b for a, b in ends if a == replica and b in members}))
    at, count = members.index(replica), len(members)
    if rule.topology == "torus":
        near = _torus(at, count)
    else:
        near = [(at + shift) % count for shift in _shifts(rule, count, step)]
    return tuple(dict.fromkeys(members[index] for index in near if index != at))


def incoming(rule: Gossip, members: Sequence[int], replica: int, step: int) -> tuple[int, ...]:
    """The replicas that send their state to ``replica`` in a step, except itself, in rising order."""
    return tuple(peer for peer in members if peer != replica and replica in outgoing(rule, members, peer, step))


def weights(rule: Gossip, members: Sequence[int], replica: int, step: int) -> dict[int, float]:
    """A row of the matrix: the weight of each replica's state in the new state of ``replica``, in rising order of
    replicas."""
    peers = incoming(rule, members, replica, step)
    if rule.topology in ("torus", "edges"):
        row = {peer: _pair_weight(rule, members, replica, peer, step) for peer in peers}
    else:  # every member has the same number of neighbours
        row = dict.fromkeys(peers, 1 / (1 + len(peers)))
    row[replica] = 1 - math.fsum(row.values())
    return dict(sorted(row.items()))


def push_weight(rule: Gossip, members: Sequence[int], replica: int, step: int) -> float:
    """The fraction of its state and of its push-sum weight that ``replica`` sends to each peer. It keeps the same
    fraction."""
    return 1 / (1 + len(outgoing(rule, members, replica, step)))


def matrix(rule: Gossip, num_members: int, step: int) -> list[list[float]]:
    """The whole matrix of a step for replicas 0 to ``num_members`` - 1."""
    members = range(num_members)
    rows = [weights(rule, members, member, step) for member in members]
    return [[row.get(peer, 0.0) for peer in members] for row in rows]


def check_topology(rule: Gossip, num_replicas: int, where: str) -> None:
    """Check that the states of all replicas mix.

    Raises:
        PlanError: an edge names a replica that does not exist, the replicas are not connected, or the weights of edges
            do not give a doubly stochastic matrix.
    """
    pairs = Counter(frozenset((a, b)) for a, b, _ in rule.edges)
    for a, b, weight in rule.edges:
        if pairs[frozenset((a, b))] > 1:
            raise PlanError(f"edge {a}-{b} stands twice", where=where, remedy="give each pair once")
        if not (0 <= a < num_replicas and 0 <= b < num_replicas and a != b):
            problem = f"edge {a}-{b} does not join two of the replicas 0 to {num_replicas - 1}"
            raise PlanError(problem, where=where, remedy="name two replicas")
        if not 0 <= weight <= 1:
            problem = f"edge {a}-{b} has the weight {weight:g}"
            raise PlanError(problem, where=where, remedy="give a weight above 0, and at most 1")
    reached, border = {0}, [0]
    while border:
        replica = border.pop()
        new = set(outgoing(rule, range(num_replicas), replica, 0)) - reached if rule.topology == "edges" else set()
        reached |= new
        border += new
    if rule.topology == "edges" and len(reached) < num_replicas:
        missing = min(set(range(num_replicas)) - reached)
        problem = f"the topology is not connected: no path joins replicas 0 and {missing}"
        raise PlanError(problem, where=where, remedy="add edges until every replica is reached")
    for replica, row in enumerate(matrix(rule, num_replicas, 0)):
        if row[replica] < -NEAR:
            problem = f"the weights of the edges of replica {replica} sum up to {1 - row[replica]:g}"
            remedy = "give weights that sum up to at most 1 at each replica, or none: then Metropolis' are taken"
            raise PlanError(f"the mixing matrix is not doubly stochastic: {problem}", where=where, remedy=remedy)


def _shifts(rule: Gossip, count: int, step: int) -> list[int]:
    """The distances from a member to the members to which it sends."""
    powers = [2**power for power in range(max(1, math.ceil(math.log2(count))))] if count > 1 else []
    match rule.topology:
        case "ring":
            return [1, count - 1]
        case "exponential":
            return powers
        case "one-peer":
            return [powers[step % len(powers)]] if powers else []
        case "random":
            return [random.Random(f"gossip {step}").randrange(1, count)] if count > 1 else []
        case _:
            return list(range(1, count))


def _torus(at: int, count: int) -> list[int]:
    """The neighbours on a torus. Its number of rows is the largest divisor that is at most the square root of
    ``count``."""
    rows = next(size for size in range(math.isqrt(count), 0, -1) if count % size == 0)
    columns = count // rows
    row, column = divmod(at, columns)
    return [
        ((row + down) % rows) * columns + (column + right) % columns
        for down, right in ((0, 1), (0, -1), (1, 0), (-1, 0))
    ]


def _pair_weight(rule: Gossip, members: Sequence[int], replica: int, peer: int, step: int) -> float:
    """The weight of an undirected pair. Without a given weight, it is Metropolis' weight 1 / (1 + the larger number of
    neighbours), with which the matrix is symmetric and doubly stochastic."""
    edge_weight = next((weight for a, b, weight in rule.edges if {a, b} == {replica, peer}), 0.0)
    if rule.edges:  # edges to dead replicas count too; without them, rows could have sums above 1
        degrees = [sum(each in pair[:2] for pair in rule.edges) for each in (replica, peer)]
    else:
        degrees = [len(outgoing(rule, members, each, step)) for each in (replica, peer)]
    return edge_weight or 1 / (1 + max(degrees))
