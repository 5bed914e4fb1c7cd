"""Batch norm with statistics of each rank's own samples: its strategy splits the factor ``own`` (``ir/rule.py``)."""

from collections.abc import Iterator, Mapping
from math import prod

from meshwright.errors import Problem
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.layout import TIME
from meshwright.ir.placement import parts_of
from meshwright.ir.rule import OWN

Chosen = Mapping[str, str]
"""A strategy: maps an axis to the factor that is split over it."""


def owned(operator: Operator, strategy: Chosen) -> dict[str, str]:
    """The strategy with the factor ``own`` in place of the operator's sample factor, on all axes except ``time``."""
    joint = operator.rule.joint if operator.rule is not None else {}
    own = joint.get(OWN, ())
    return {axis: OWN if axis != TIME and choice in own else choice for axis, choice in strategy.items()}


def owned_problems(
    graph: Graph, operator: Operator, strategies: Mapping[str, Chosen], sizes: Mapping[str, int]
) -> Iterator[Problem]:
    """Problems of a batch norm that splits ``own``.

    A rank may have too few values for statistics. Or the backward operator, which reads the statistics of the forward
    operator, splits ``own`` over other axes than the forward operator."""
    if operator.backward or operator.rule is None or OWN not in operator.rule.joint:
        return
    axes = _axes(strategies[operator.name])
    place = f"strategies[{operator.name!r}]"
    for reader in [op.name for op in graph.operators if not {*operator.outputs[1:3]}.isdisjoint(op.inputs)]:
        if _axes(strategies[reader]) != axes:
            problem = f"its own samples are split over {_axes_text(axes)}, those of its gradient over "
            problem += _axes_text(_axes(strategies[reader]))
            yield place, problem, f"split both alike, {operator.name!r} and {reader!r}"
    if axes and (least := _least(graph, operator, strategies[operator.name], sizes)) < 2:
        problem = f"a rank would have {least} value of a channel, and statistics need 2"
        yield place, problem, "use a larger batch, fewer ranks, or batch_statistics='global'"


def _least(graph: Graph, operator: Operator, strategy: Chosen, sizes: Mapping[str, int]) -> int:
    """The least number of values per channel in the statistics of a rank.

    Ranks that split the images of the same samples have common statistics, so their values are counted together."""
    assert operator.rule is not None
    (letter,) = operator.rule.joint[OWN]
    samples = operator.rule.sizes[letter] // parts_of(operator.rule, strategy, letter, sizes)
    return samples * prod(graph.tensors[operator.inputs[0]].shape[2:])


def _axes(strategy: Chosen) -> set[str]:
    return {axis for axis, choice in strategy.items() if choice == OWN}


def _axes_text(axes: set[str]) -> str:
    return ", ".join(sorted(axes)) or "nothing"
