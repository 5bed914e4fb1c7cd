"""The memory of a rank at the moments of highest memory: the sum of all tensors that live at that moment."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.ir.graph import Graph
from meshwright.ir.placement import Placements, unflattened
from meshwright.planner.buckets import part_bytes
from meshwright.planner.intra_op.prices import Prices
from meshwright.planner.intra_op.problem import Costs
from meshwright.planner.intra_op.storage import Storage

MOST_MOMENTS = 6


class _Life(NamedTuple):
    first: int
    last: int


class Moments:
    """The moments at which memory is limited, given as positions in the order of operators.

    They are the end of forward and the positions where the sum of all live tensors, before any split, is largest. A
    tensor lives from the operator that makes it to the last operator that reads it or a view of it. If the step has one
    micro-batch and one stage, gradients live to the end of the step. Otherwise gradients are accumulated, and
    ``parameter`` counts their memory.

    A rank holds one of ``stages`` equal stages. ``alive`` is the number of micro-batches whose activations are in
    memory at once.
    """

    def __init__(self, graph: Graph, prices: Prices, limit_bytes: float, stages: int = 1) -> None:
        self.graph, self.prices = graph, prices
        self.whole = prices.microbatches == 1 and stages == 1
        self.alive = min(stages, prices.microbatches) if not self.whole else 1
        order = sorted(graph.operators, key=lambda operator: not operator.prologue)
        place = {operator.name: index for index, operator in enumerate(order)}
        made_at = {name: place[operator.name] for operator in order for name in operator.outputs}
        self._reads: dict[str, _Life] = {}
        self._uses: dict[tuple[str, bool], _Life] = {}
        last: dict[str, int] = {}
        for operator in order:
            for name in operator.inputs:
                at, storage = place[operator.name], graph.tensors[name].storage
                self._reads[name] = _Life(min(at, self._reads.get(name, _Life(at, at)).first), at)
                use = storage, operator.backward
                self._uses[use] = _Life(min(at, self._uses.get(use, _Life(at, at)).first), at)
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

    def gathered(self, names: Iterable[str], zero: int) -> Costs:
        """For each moment, the number of parameters in ``names`` that a rank holds whole under a ZeRO stage. It holds a
        parameter from the first to the last reader of the parameter or of a view of it. Stage 3 frees it between
        forward and backward."""
        lives = []
        for name in names:
            uses = [self._uses[name, backward] for backward in (False, True) if (name, backward) in self._uses]
            lives += uses if zero == 3 else [_Life(uses[0].first, uses[-1].last)] if uses else []
        return self._count(lives)

    def size(self, name: str, placements: Placements) -> float:
        """The bytes of a rank's part of a tensor, for all micro-batches that are in memory at once."""
        tensor = self.graph.tensors[name]
        batch = any(self.graph.factor_classes[factor].role == "batch" for dim in tensor.dims for factor in dim)
        parts = self.prices.microbatches if batch else 1
        return self.alive * part_bytes(tensor, placements, self.prices.sizes) / parts

    def parameter(self, name: str, storage: Storage, states: int, trained: bool) -> Costs:
        """The bytes of a parameter, its optimizer state and, if gradients are accumulated, its gradient, at each
        moment. Under ZeRO 1, a rank accumulates whole gradients."""
        tensor = self.graph.tensors[name]
        size = part_bytes(tensor, storage.placements, self.prices.sizes)
        held = size * (1 + (states if trained else 0))
        if trained and not self.whole:
            lies = unflattened(storage.placements) if storage.zero == 1 else storage.placements
            held += part_bytes(tensor, lies, self.prices.sizes)
        return np.full(len(self.positions), float(held))

    def _count(self, lives: Iterable[_Life]) -> Costs:
        positions, total = np.array(self.positions), np.zeros(len(self.positions))
        for life in lives:
            total += (life.first <= positions) & (positions <= life.last)
        return total


def copies(have: Placements, want: Placements) -> bool:
    """Whether bringing a tensor from placement ``have`` to placement ``want`` makes a copy. Cutting a part out of a
    tensor only makes a view."""
    return any(want.get(axis) != placement for axis, placement in have.items())
