"""Lowers a single operator under a strategy to its program on one rank, and counts the operator's kernels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from meshwright.capture.calls import read, target_of
from meshwright.capture.fx_graph import FxGraph
from meshwright.errors import PlanError, RuleError
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.mesh import AxisGroup, sizes_of
from meshwright.ir.opaque import TARGETS
from meshwright.ir.operator_algorithm import FLOAT8, pieces_of
from meshwright.ir.placement import input_placements, is_linear, local_shape
from meshwright.ir.plan import Strategy
from meshwright.ir.program import Fetch, OperatorProgram
from meshwright.lower.counts import Counter
from meshwright.lower.describe import nodes_of
from meshwright.lower.local import Emitter, LocalCall
from meshwright.lower.propagate import propagate
from meshwright.ops import collectives
from meshwright.ops.base import OperatorRule, Target, emit_unchanged
from meshwright.ops.float8 import product_in_float8
from meshwright.ops.table import operator_rule

CPU = torch.device("cpu")
PRODUCT = "aten.mm."
"""The beginning of the name of matrix products. They run in pieces (``lower/pieces.py``), or in float8
(``ops/float8.py``)."""
WITH_ALGORITHMS = (
    "aten.convolution", "meshwright.attention.", "meshwright.attention_backward.", "meshwright.experts", PRODUCT,
)  # fmt: skip
"""The beginnings of the names of operators that have several algorithms."""


def emit_operator(
    emitter: Emitter, operator: Operator, strategy: Strategy, tensors: list[fx.Node], interior_first: bool,
    rules: Mapping[Target, OperatorRule] | None, device: torch.device = CPU, algorithm: str = "",
) -> Any:  # fmt: skip
    """Emit the calls that compute an operator on this rank's parts of its inputs; return their result. ``algorithm``
    is the text of the operator's algorithm (``ir/operator_algorithm.py``; empty: PyTorch's own).

    Raises:
        PlanError: the operator has no algorithms, or this algorithm does not support it.
        RuleError: the operator was captured with a rule that is not in ``rules``.
    """
    args, kwargs = read(operator.arguments, tensors)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": device}
    target = target_of(operator.target)
    if algorithm and not operator.target.startswith(WITH_ALGORITHMS):
        raise PlanError(
            f"{operator.target} has no algorithms", where=f"operator_algorithms: {operator.name}",
            remedy="name matrix products, convolutions, attention, mixtures of experts and their gradients only",
        )  # fmt: skip
    if algorithm.startswith(FLOAT8) and any(map(is_linear, strategy.values())):
        raise PlanError(
            "an operand is a sum whose terms lie on several ranks, and terms cannot be rounded alone",
            where=f"operator_algorithms: {operator.name}", remedy="leave the operator out",
        )  # fmt: skip
    local = LocalCall(emitter, operator, strategy, (target, args, kwargs), interior_first, algorithm)
    if operator.rule is None and operator.target not in TARGETS:
        return emit_unchanged(local)
    rule = operator_rule(target, rules)
    if rule is None:
        raise RuleError(
            f"{operator.target} was captured with a rule that is not given here", where=operator.name,
            remedy="give the rules= that capture was given",
        )  # fmt: skip
    if operator.target.startswith(PRODUCT) and algorithm.startswith(FLOAT8):
        return product_in_float8(local)
    result = rule.local(local)
    if algorithm and operator.target.startswith(PRODUCT):
        result.meta["pieces"] = pieces_of(algorithm)
    return result


def lower_operator(
    graph: Graph,
    operator: Operator,
    strategy: Strategy,
    sizes: Mapping[str, int],
    counter: Counter,
    rules: Mapping[Target, OperatorRule] | None = None,
    interior_first: bool = False,
) -> OperatorProgram:
    """The program of one operator on the first rank of a mesh. ``sizes`` maps a mesh axis to its size. The operator's
    inputs already have the placements that it needs."""
    groups = {axis: AxisGroup(axis, size, 0) for axis, size in sizes.items()}
    at = sizes_of(groups)[1]
    calls, tensors = FxGraph(), []
    for position, name in enumerate(operator.inputs):
        tensor = graph.tensors[name]
        wanted = input_placements(operator.rule, strategy, position, sizes) if operator.rule else {}
        node = calls.placeholder(f"input_{position}")
        node.meta.update(
            local_shape=local_shape(tensor.shape, wanted, dict(sizes), at), dtype=getattr(torch, tensor.dtype)
        )
        tensors.append(node)

    def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if target in collectives.STARTS:
            kwargs.setdefault("label", operator.name)
        node = calls.call_function(target, args, kwargs)
        node.meta["operator"] = operator.name
        return node

    emitter = Emitter(graph, groups, emit, calls.placeholder("random_key"))
    emit_operator(emitter, operator, strategy, tensors, interior_first, rules)
    propagate(calls)
    nodes = nodes_of(calls, counter, sizes)
    positions = {node: position for position, node in enumerate(tensors)}
    started = {waited: _read(key, positions) for key, waited in emitter.exchanged.strips.items()}
    fetches = {waited.all_input_nodes[0].name: Fetch(*fetch) for waited, fetch in started.items() if fetch is not None}
    return OperatorProgram(nodes, fetches)


def _read(key: tuple[object, ...], positions: Mapping[fx.Node, int]) -> tuple[int, tuple[object, ...]] | None:
    """The position of the input whose rows an exchange with this key fetches, and a description of the rows. None if
    the operator itself computes the exchanged value."""
    value, *rest = key
    if isinstance(value, tuple):
        inner = _read(value, positions)
        return (inner[0], (*inner[1], *rest)) if inner is not None else None
    return (positions[value], tuple(rest)) if value in positions else None  # type: ignore[index]
