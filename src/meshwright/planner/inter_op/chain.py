"""The layers of a model, as a chain. Stages are made from layers. Equal layers are priced only once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.stages import forward_operators
from meshwright.planner.cut import cut_points, live_bytes, operator_times
from meshwright.planner.inter_op.layers import group_layers
from meshwright.planner.inter_op.shorten import shorten

FEWEST_LAYERS = 10
"""A model with fewer blocks than this is cut inside its blocks too."""
PRICED, MOST_PRICED = 12, 24
"""The smallest and the largest number of layers that are priced, if the model can be cut into that many. Between these
limits, there are three layers per rank, so that stages can be cut evenly."""


@dataclass(frozen=True)
class Layer:
    """A layer of a model. ``first`` is its first forward operator in the graph of the model (empty: the layer is the
    first). ``priced`` is the index of the equal layer in the shortened graph."""

    first: str
    priced: int


@dataclass(frozen=True)
class Chain:
    """The ``layers`` of a model. ``graph`` is the shortened graph (``shorten``). ``firsts`` are the first operators of
    its layers, except the first layer."""

    graph: Graph
    firsts: tuple[str, ...]
    layers: tuple[Layer, ...]

    @cached_property
    def numbers(self) -> list[int]:
        """For each layer, the index of the equal layer that is priced."""
        return [layer.priced for layer in self.layers]

    def firsts_of(self, stages: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """The first operators of ``stages``, except the first stage. A stage is given by the indices of its layers."""
        return tuple(self.layers[stage[0]].first for stage in stages[1:])

    def stages_of(self, firsts: Sequence[str]) -> list[range]:
        """The layers of each stage, from the first operators of all stages except the first stage."""
        names = [layer.first for layer in self.layers]
        borders = [0, *map(names.index, firsts), len(names)]
        return [range(first, end) for first, end in pairwise(borders)]

    def priced(self, stages: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """For each stage, the indices of the priced layers that are equal to its layers."""
        return tuple(tuple(self.layers[layer].priced for layer in stage) for stage in stages)


def chain_of(graph: Graph, cluster: Cluster | None, num_ranks: int = 1, fewest: int = 0) -> Chain:
    """Cut a model into layers at borders that few bytes cross: between blocks, and also inside blocks if there are few
    blocks.

    Between ``PRICED`` and ``MOST_PRICED`` layers are priced, depending on ``num_ranks``. If the model has more, layers
    are grouped. A model with fewer than ``fewest`` blocks is cut inside its blocks.
    """
    short = shorten(graph)
    forward = forward_operators(short.graph)
    place = {operator.name: index for index, operator in enumerate(forward)}
    spans = [(min(place[name] for name in run[0]), max(place[name] for name in run[0]) + 1) for run in short.copies]
    points = cut_points(short.graph, forward, cluster)
    between = {point.position for point in points if point.between_blocks}
    forced = {end for span in spans for end in span if 0 < end < len(forward)}
    more = sum(len(run) for run in short.copies)
    if len(between | forced) + 1 + more < max(FEWEST_LAYERS, fewest):
        between = {point.position for point in points}
    borders = sorted(between | forced)
    most = min(MOST_PRICED, max(PRICED, 3 * num_ranks))
    if len(borders) >= most:
        borders = _fewer(short.graph, forward, cluster, borders, sorted(forced), most)
    return Chain(
        short.graph, tuple(forward[border].name for border in borders), _layers(forward, borders, spans, short.copies)
    )


def _fewer(
    graph: Graph,
    forward: Sequence[Operator],
    cluster: Cluster | None,
    borders: Sequence[int],
    forced: Sequence[int],
    most: int,
) -> list[int]:
    """Group the layers between neighbouring borders in ``forced``, so that about ``most`` layers remain in total."""
    times, live = operator_times(graph, forward, cluster), live_bytes(graph, forward)
    ends = [0, *forced, len(forward)]
    total, kept = sum(times), set(forced)
    for start, end in pairwise(ends):
        allowed = set(borders)
        crossing = [live[index] if index in allowed else inf for index in range(start, end)]
        share = sum(times[start:end]) / total if total else 1 / len(ends)
        count = max(1, round(share * most))
        kept.update(start + first for first in group_layers(times[start:end], crossing, count))
    return sorted(kept)


def _layers(
    forward: Sequence[Operator], borders: Sequence[int], spans: Sequence[tuple[int, int]],
    copies: Sequence[tuple[dict[str, str], ...]],
) -> tuple[Layer, ...]:  # fmt: skip
    starts = [0, *borders]
    layers: list[Layer] = []
    for number, start in enumerate(starts):
        layers.append(Layer(forward[start].name if number else "", number))
        end = starts[number + 1] if number + 1 < len(starts) else len(forward)
        for span, run in zip(spans, copies, strict=True):
            if end == span[1]:
                block = [index for index, other in enumerate(starts) if span[0] <= other < span[1]]
                layers += [Layer(copy[forward[starts[index]].name], index) for copy in run for index in block]
    return tuple(layers)
