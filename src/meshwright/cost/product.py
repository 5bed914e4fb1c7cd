"""The predicted time of a matrix product on a grid, from its rounds: local products, and collectives that overlap with
them."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from meshwright.cost.collective import Group, Network
from meshwright.schedules.products.grid import AXIS, DIMS, Dim, Operand, ProductPlan
from meshwright.schedules.products.rounds import Round, backward, forward


class LocalProducts(NamedTuple):
    """The speed of the local products on each rank. ``multiply_s(m, k, n, num_ranks)``: seconds in which each of
    ``num_ranks`` ranks multiplies an m x k by a k x n matrix, while the other ranks are idle. ``overlap``: the fraction
    of the time of collectives that overlaps with products, where overlap is possible. ``round_s``: additional seconds
    for each further round with collectives, because ranks wait for each other between products. All numbers are worse
    if ranks share cores."""

    multiply_s: Callable[[int, int, int, int], float]
    overlap: float = 1.0
    round_s: float = 0.0


def product_s(
    plan: ProductPlan, network: Network, local: LocalProducts, item_bytes: int, *, gradients: bool = False
) -> float:
    """Seconds of the forward product, and with ``gradients`` of both backward products, for the largest blocks."""
    seconds = _rounds_s(plan, forward(plan), network, local, item_bytes)
    if gradients:
        seconds += _rounds_s(plan, backward(plan), network, local, item_bytes)
    return seconds


def _rounds_s(
    plan: ProductPlan, rounds: Sequence[Round], network: Network, local: LocalProducts, item_bytes: int
) -> float:
    """The products of a round overlap with the gathers of the next round and the reductions of the previous round. This
    holds only for collectives with one round: an algorithm with several rounds starts its later rounds only when a rank
    waits for it. On CPUs, ranks that share memory copy with the same cores that multiply. So only collectives between
    boxes are hidden.
    """
    kinds: dict[tuple[str, Operand, int], tuple[float, bool]] = {}

    def collected(operation: str, operands: Sequence[Operand], panel: int) -> tuple[float, float]:
        """Seconds of the collectives that overlap with products, and seconds of the collectives that ranks wait for."""
        hidden = shown = 0.0
        for operand in operands:
            key = operation, operand, min(panel, 0)
            if key not in kinds:
                kinds[key] = _collective_s(plan, operation, operand, panel, network, item_bytes)
            seconds, hides = kinds[key]
            hidden, shown = hidden + seconds * hides, shown + seconds * (not hides)
        return hidden, shown

    meetings = sum(any(plan.sharing(each) > 1 for each in (*round_.gathers, *round_.reduces)) for round_ in rounds)
    total = local.round_s * max(0, meetings - 1)
    total += sum(collected("all_gather", rounds[0].gathers, rounds[0].panel))
    for number, this_round in enumerate(rounds):
        after = rounds[number + 1] if number + 1 < len(rounds) else Round(-1)
        before = rounds[number - 1] if number else Round(-1)
        gathered = collected("all_gather", after.gathers, after.panel)
        reduced = collected("reduce_scatter", before.reduces, before.panel)
        computed = sum(_multiply_s(plan, local) for _ in this_round.computes)
        beside = gathered[0] + reduced[0]
        total += computed + beside - local.overlap * min(computed, beside) + gathered[1] + reduced[1]
    return total + sum(collected("reduce_scatter", rounds[-1].reduces, rounds[-1].panel))


def _multiply_s(plan: ProductPlan, local: LocalProducts) -> float:
    """Seconds of one product of the largest panel."""
    lengths: dict[Dim, int] = {dim: plan.largest(dim) for dim in ("m", "k", "n")}
    lengths[plan.over] = -(-lengths[plan.over] // plan.panels)
    return local.multiply_s(lengths["m"], lengths["k"], lengths["n"], plan.grid.num_ranks)


def _collective_s(
    plan: ProductPlan, operation: str, operand: Operand, panel: int, network: Network, item_bytes: int
) -> tuple[float, bool]:
    """Seconds of a collective of the largest block or panel, and whether products hide it."""
    axis = AXIS[operand]
    group = Group(plan.sharing(operand), plan.grid.stride(axis))
    lengths: Mapping[Dim, int] = {dim: plan.largest(dim) for dim in DIMS[operand]}
    words = 1
    for dim, length in lengths.items():
        words *= -(-length // plan.panels) if panel >= 0 and dim == plan.over else length
    algorithm = plan.algorithm(operand)
    return algorithm_s(network, operation, algorithm, words * item_bytes, group), hides(network, group, algorithm)


def algorithm_s(network: Network, operation: str, algorithm: str, num_bytes: int, group: Group) -> float:
    """Seconds of an all-gather or a reduce-scatter with one algorithm, measured if possible, else modelled."""
    assert operation in ("all_gather", "reduce_scatter")
    measured = network.measured_s(operation, algorithm, num_bytes, group)
    if measured is not None:
        return measured
    return network.collective_s(operation, num_bytes, group, algorithm)  # type: ignore[arg-type]


def hides(network: Network, group: Group, algorithm: str) -> bool:
    """Whether products hide the collectives of a group. They hide algorithms with one round, whose messages are all
    sent at the start. They hide nothing between CPU ranks of one box."""
    if algorithm != "star":
        return False
    cluster = network.cluster
    return cluster.device.kind != "cpu" or (group.size - 1) * group.stride >= cluster.box_size
