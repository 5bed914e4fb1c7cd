"""The rounds of a product on a grid. Ranks run these rounds, and words (elements) and time are computed from them.

Forward over k (C stationary), with 3 panels:       backward (C's gradient stationary):

    round 0   gather A0 B0   C  = A0 B0               round 0   gather dC
    round 1   gather A1 B1   C += A1 B1               round 1   gather A0 B0   dA0 = dC B0', dB0 = A0' dC   reduce both
    round 2   gather A2 B2   C += A2 B2               round 2   gather A1 B1   ...
    round 3                  reduce C                 round 3   gather A2 B2   ...

The gathers of a round overlap with the products of the previous round, and its reductions with the products of the next
round. A collective of a single rank is left out.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from meshwright.schedules.collectives import operations
from meshwright.schedules.collectives.steps import Span, Steps, cut
from meshwright.schedules.products.grid import AXIS, DIMS, Dim, Operand, ProductPlan, block


class Round(msgspec.Struct, frozen=True):
    """One round: the operands that are gathered before it, the operands (or their gradients) that it computes, and
    those that are reduce-scattered after it. ``panel``: the index of the panel; -1 for collectives of the whole
    stationary operand."""

    panel: int
    gathers: tuple[Operand, ...] = ()
    computes: tuple[Operand, ...] = ()
    reduces: tuple[Operand, ...] = ()


def forward(plan: ProductPlan) -> tuple[Round, ...]:
    """The rounds of C = A B."""
    return _rounds(plan, ("a", "b"), ("c",))


def backward(plan: ProductPlan, wanted: Sequence[Operand] = ("a", "b")) -> tuple[Round, ...]:
    """The rounds of the gradients dA = dC B' and dB = A' dC, or of one of the two. In gathers, ``c`` stands for dC. In
    products and reductions, ``a`` and ``b`` stand for dA and dB. Both gradients share the gathered dC."""
    needed = {"a": ("b", "c"), "b": ("a", "c")}
    inputs = tuple(operand for operand in DIMS if any(operand in needed[each] for each in wanted))
    return _rounds(plan, inputs, tuple(wanted))


def _rounds(plan: ProductPlan, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]) -> tuple[Round, ...]:
    whole = plan.stationary
    rounds = [Round(-1, gathers=(whole,))] if whole in inputs else []
    moving_in = tuple(operand for operand in inputs if operand != whole)
    moving_out = tuple(operand for operand in outputs if operand != whole)
    rounds += [Round(panel, moving_in, outputs, moving_out) for panel in range(plan.panels)]
    if whole in outputs:
        rounds.append(Round(-1, reduces=(whole,)))
    return tuple(rounds)


def panel_span(plan: ProductPlan, operand: Operand, panel: int, at: Mapping[Dim, int]) -> Span:
    """The units of a panel within the block of a rank at these coordinates, along the operand's other dim."""
    begin, end = block(plan, plan.other_dim(operand), at[plan.other_dim(operand)])
    return (0, end - begin) if panel < 0 else cut((0, end - begin), plan.panels)[panel]


def shares(plan: ProductPlan, operand: Operand, at: Mapping[Dim, int]) -> tuple[Span, ...]:
    """The parts into which a block of the operand is divided among the ranks that share it, along the cut dim.
    Positions count from the beginning of the block."""
    begin, end = block(plan, plan.cut_dim(operand), at[plan.cut_dim(operand)])
    return cut((0, end - begin), plan.sharing(operand))


def steps_of(plan: ProductPlan, operation: str, operand: Operand, panel: int, at: Mapping[Dim, int]) -> Steps:
    """The steps of one collective in the group of a rank at these coordinates. Ranks are numbered along the axis."""
    begin, end = panel_span(plan, operand, panel, at)
    counts = [(last - first) * (end - begin) for first, last in shares(plan, operand, at)]
    return operations.build(operation, plan.algorithm(operand), len(counts), sum(counts), counts=(counts,))


def collectives_of(plan: ProductPlan, rounds: Sequence[Round]) -> Iterator[tuple[str, Operand, int]]:
    """The collectives of the rounds in the order in which ranks start them: operation, operand, panel."""
    for each in rounds:
        yield from (("all_gather", operand, each.panel) for operand in each.gathers)
        yield from (("reduce_scatter", operand, each.panel) for operand in each.reduces)


def count_words(plan: ProductPlan, rounds: Sequence[Round]) -> list[int]:
    """The words that each rank of the grid receives, counted in the steps of all collectives."""
    received = [0] * plan.grid.num_ranks
    places = [plan.grid.coordinates(rank) for rank in range(plan.grid.num_ranks)]
    for operation, operand, panel in collectives_of(plan, rounds):
        axis = AXIS[operand]
        for rank, at in enumerate(places):
            if at[axis] == 0 and plan.sharing(operand) > 1:
                for moves in steps_of(plan, operation, operand, panel, at).rounds:
                    for move in moves:
                        if move.source != move.target:
                            received[rank + move.target * plan.grid.stride(axis)] += move.length
    return received
