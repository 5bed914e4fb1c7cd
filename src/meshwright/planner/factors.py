"""Find the factors that an operator can still split, given the strategies chosen so far."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.errors import LayoutError
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.placement import misfit
from meshwright.ir.plan import Strategy


@dataclass
class FactorChoices:
    """A graph, the sizes of the mesh axes, and the strategies chosen so far; the planner adds further strategies.

    A factor class contains the factors of several operators that stand for the same size, such as the batch.
    """

    graph: Graph
    sizes: dict[str, int]
    strategies: dict[str, Strategy]

    def is_batch(self, name: str) -> bool:
        """Whether the factor class ``name`` is the batch."""
        return self.graph.factor_classes[name].role == "batch"

    def sequences(self) -> set[str]:
        """The factor classes of sequences: dim 1 of integer inputs with two dims (tokens and labels), and the positions
        of queries and keys in attention."""
        graph = self.graph
        given = [graph.tensors[name] for name in graph.inputs]
        dims = [tensor.dims[1] for tensor in given if len(tensor.shape) == 2 and tensor.dtype.startswith("int")]
        for operator in graph.operators:
            if operator.target.startswith("meshwright.attention."):
                dims += [graph.tensors[name].dims[2] for name in operator.inputs[:2]]
        return {name for dim in dims for name in dim if not self.is_batch(name)}

    def letter_of(self, operator: Operator, names: set[str], axis: str) -> str | None:
        """The first letter of the operator that belongs to a factor class in ``names`` and can be split over ``axis``;
        None if there is none."""
        letters = (letter for letter, name in operator.classes.items() if name in names)
        return next((letter for letter in letters if self.fits(operator, letter, axis)), None)

    def touches_batch(self, operator: Operator) -> bool:
        """Whether an input of the operator has a batch dim."""
        return any(
            self.is_batch(name) for tensor in operator.inputs for dim in self.graph.tensors[tensor].dims for name in dim
        )

    def fits(self, operator: Operator, letter: str, axis: str) -> bool:
        """Whether the operator can split its factor ``letter`` over ``axis``, in addition to its other splits."""
        rule, strategy = operator.rule, self.strategies[operator.name]
        if rule is None or not rule.splittable(letter):
            return False
        return misfit(rule, {**strategy, axis: letter}, self.sizes) is None


_VIEWS = ("aten.view.", "aten._unsafe_view.", "aten.reshape.", "aten.expand.", "aten.clone.", "aten.unsqueeze.")


def repeated_heads(graph: Graph) -> set[str]:
    """The names of operators that repeat keys and values for the query heads that share them, and of operators that add
    up the gradients of the copies.

    If these operators stay whole, keys and values are gathered before the repetition, and their gradients are scattered
    after the addition. This moves fewer bytes.
    """
    producers, consumers = graph.producers(), graph.consumers()

    def before(name: str) -> tuple[Operator, str] | None:
        maker = producers.get(name)
        return (maker, maker.inputs[0]) if maker is not None and maker.target.startswith(_VIEWS) else None

    def after(name: str) -> tuple[Operator, str] | None:
        readers = [reader for reader, _ in consumers.get(name, ())]
        alone = len(readers) == 1 and readers[0].target.startswith((*_VIEWS, "aten.sum."))
        return (readers[0], readers[0].outputs[0]) if alone else None

    names: set[str] = set()
    for operator in graph.operators:
        ends: list[tuple[str, Callable[[str], tuple[Operator, str] | None]]] = []
        if operator.target.startswith("meshwright.attention."):
            ends = [(name, before) for name in operator.inputs[1:3]]
        elif operator.target.startswith("meshwright.attention_backward."):
            ends = [(name, after) for name in operator.outputs[1:3]]
        for name, step in ends:
            chain, met = [], step(name)
            while met is not None:
                neighbour, here = met
                chain.append(neighbour.name)
                if graph.tensors[here].num_elements < graph.tensors[name].num_elements:
                    names.update(chain)
                    break
                met = step(here)
    return names


def dividing_heads(sizes: list[int], axis: str, parts: int, module: str) -> int:
    """The index in ``sizes`` of the head factor that an axis with ``parts`` ranks splits.

    If query heads share keys and values, ``sizes`` has the number of key and value heads, then the number of query
    heads for each of them. The result is the first factor that ``parts`` divides; if there is none, the first factor
    with at least one head per rank.

    Raises:
        LayoutError: every factor has fewer heads than the axis has ranks.
    """
    dividing = [index for index, size in enumerate(sizes) if size % parts == 0]
    enough = [index for index, size in enumerate(sizes) if size >= parts]
    if dividing or enough:
        return (dividing or enough)[0]
    shared = f" ({sizes[0]} key and value heads, each of {math.prod(sizes[1:])})" if len(sizes) > 1 else ""
    raise LayoutError(
        f"{math.prod(sizes)} attention heads{shared} are too few for {axis}={parts}",
        where=f"module {module or '(model)'}",
        remedy=f"use {axis} of at most {max(sizes)}",
    )


def require_heads(graph: Graph, pins: Mapping[str, Strategy], axis: str, size: int) -> None:
    """Raise a LayoutError if ``axis`` cannot split the heads of an attention operator that is not pinned on it."""
    for operator in graph.operators:
        rule, attends = operator.rule, operator.target.startswith("meshwright.attention.")
        if rule is not None and attends and axis not in pins.get(operator.name, {}):
            sizes = [rule.sizes[factor.name] for factor in rule.parsed.outputs[0].dims[1] if factor.name]
            dividing_heads(sizes, axis, size, operator.module)
