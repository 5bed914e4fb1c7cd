"""The memory of a rank at the moments of highest memory: the sum of all tensors that live at that moment."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.ir.graph import Graph
from meshwright.ir.placement import Placements
from meshwright.planner.buckets import part_bytes
from meshwright.planner.intra_op.prices import Prices
from meshwright.planner.intra_op.problem import Costs

MOST_MOMENTS = 6


class _Life(NamedTuple):
    first: int
    last: int


class Moments:
    """The moments at which memory is limited, as positions in the order of operators.

    They are the end of forward and the positions where the sum of all live tensors, before any split, is largest. A
    tensor lives from the operator that makes it to the last operator that reads it or a view of it. If the step has one
    micro-batch and one stage, gradients live to the end of the step. Otherwise gradients are accumulated, and
    ``parameter`` counts their memory.

    A rank has one of ``stages`` equal stages. ``alive`` is the number of micro-batches whose activations are in memory
    at once.
    """

    def __init__(self, graph: Graph, prices: Prices, limit_bytes: float, stages: int = 1) -> None:
        self.graph, self.prices = graph, prices
        self.whole = prices.microbatches == 1 and stages == 1
        self.alive = min(stages, prices.microbatches) if not self.whole else 1
        order = sorted(graph.operators, key=lambda operator: not operator.prologue)
        place = {operator.name: index for index, operator in enumerate(order)}
        made_at = {name: place[operator.name] for operator in order for name in operator.outputs}
        self._reads: dict[str, _Life] = {}
        last: dict[str, int] = {}
        for operator in order:
            for name in operator.inputs:
                at, storage = place[operator.name], graph.tensors[name].storage
                self._reads[name] = _Life(min(at, self._reads.get(name, _Life(at, at)).first), at)
                last[storage] = max(at, last.get(storage, -1))
        for entry in graph.gradients:
            if entry.gradient is not None and self.whole:
                last[graph.tensors[entry.gradient].storage] = len(order)
        self._lives = {
            name: _Life(at, max(at, last.get(name, at))) for name, at in made_at.items()
            if graph.tensors[name].storage == name
        }  # fmt: skip
        self.positions = self._chosen([operator.backward for operator in order])
        given = sum(graph.tensors[name].num_bytes for name in (*graph.inputs, *graph.buffers))
        self.limits = np.full(len(self.positions), limit_bytes * stages - given)

    def _chosen(self, backward: Sequence[bool]) -> list[int]:
        changes = np.zeros(len(backward) + 2)
        for name, life in self._lives.items():
            changes[life.first] += self.graph.tensors[name].num_bytes
            changes[life.last + 1] -= self.graph.tensors[name].num_bytes
        live = changes.cumsum()[: len(backward)]
        turn = next((index for index, is_backward in enumerate(backward) if is_backward), len(backward) - 1)
        padded = np.concatenate([[-1.0], live, [-1.0]])
        peaks = np.flatnonzero((padded[1:-1] > padded[:-2]) & (padded[1:-1] > padded[2:])).tolist()
        largest = sorted(peaks, key=lambda index: -live[index])[: MOST_MOMENTS - 1]
        return sorted({turn, *largest})

    def owned(self, names: Iterable[str]) -> Costs:
        """For each moment, the number of tensors in ``names`` that live and own their memory. Views own no memory."""
        return self._count(self._lives[name] for name in names if name in self._lives)

    def read(self, names: Iterable[str]) -> Costs:
        """For each moment, the number of tensors in ``names`` that are between their first and their last reader."""
        return self._count(self._reads[name] for name in names if name in self._reads)

    def size(self, name: str, placements: Placements) -> float:
        """The bytes of a rank's part of a tensor, for all micro-batches that are in memory at once."""
        tensor = self.graph.tensors[name]
        batch = any(self.graph.factor_classes[factor].role == "batch" for dim in tensor.dims for factor in dim)
        parts = self.prices.microbatches if batch else 1
        return self.alive * part_bytes(tensor, placements, self.prices.sizes) / parts

    def parameter(self, name: str, placements: Placements, states: int, trained: bool) -> Costs:
        """The bytes of a parameter, its optimizer state and, if gradients are accumulated, its gradient, at each
        moment."""
        size = part_bytes(self.graph.tensors[name], placements, self.prices.sizes)
        numbers = 1 + (states + (0 if self.whole else 1) if trained else 0)
        return np.full(len(self.positions), float(size * numbers))

    def _count(self, lives: Iterable[_Life]) -> Costs:
        positions, total = np.array(self.positions), np.zeros(len(self.positions))
        for life in lives:
            total += (life.first <= positions) & (positions <= life.last)
        return total


def copies(have: Placements, want: Placements) -> bool:
    """Whether bringing a tensor from ``have`` to ``want`` makes a copy. Cutting a part out of a tensor only makes a
    view."""
    return any(want.get(axis) != placement for axis, placement in have.items())
