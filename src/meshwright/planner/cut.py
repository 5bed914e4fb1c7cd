"""Choose where to cut a graph into stages of similar work. Good cuts are where few bytes are live, preferably between
blocks.

The live bytes of a cut are the bytes of the tensors that are made before the cut and read after it.
"""

import itertools
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.layout import Layout
from meshwright.ir.stages import cut, forward_operators
from meshwright.planner.intra_op.decisions import block_of

FLOPS_PER_S, BYTES_PER_S, SENT_BYTES_PER_S = 1e11, 2e10, 2e9
"""Rates that are assumed without a cluster: the FLOP/s and memory bytes per second of one CPU core, and the bytes per
second of the link between two cores."""
INSIDE_A_BLOCK = 1.05
"""Factor on the time of a stage that ends inside a repeated block. A cut inside a block is therefore chosen only if the
time of its stage is better by this factor."""


class CutPoint(NamedTuple):
    """A possible cut, before forward operator number ``position``. ``sent_s`` is the seconds to send the live tensors
    forward and their gradients back. ``between_blocks``: whether the cut is between two blocks."""

    position: int
    sent_s: float
    between_blocks: bool


def choose_cut(graph: Graph, num_stages: int, cluster: Cluster | None) -> tuple[str, ...]:
    """Choose the cut whose slowest stage is fastest, by dynamic programming.

    Return the names of the first operators of all stages except the first stage. A stage's time is its forward and
    backward compute, plus the transfers over its borders in both directions.

    Raises:
        LayoutError: the model has fewer than ``num_stages - 1`` possible cuts.
    """
    if num_stages == 1:
        return ()
    forward = forward_operators(graph)
    before = [0.0, *itertools.accumulate(operator_times(graph, forward, cluster))]
    points = cut_points(graph, forward, cluster)
    if len(points) < num_stages - 1:
        raise LayoutError(
            f"{num_stages} stages are asked for, but the model can be cut at {len(points)} "
            f"{'place' if len(points) == 1 else 'places'} only",
            where="layout: pp",
            remedy=f"use pp x chunks of at most {len(points) + 1}",
        )
    # best[k]: for each point, the time of the slowest of the k stages before it, and the previous point
    best: list[dict[int, tuple[float, int]]] = [{-1: (0.0, -1)}]
    for _ in range(num_stages - 1):
        reached: dict[int, tuple[float, int]] = {}
        for number, point in enumerate(points):
            penalty = 1.0 if point.between_blocks else INSIDE_A_BLOCK
            for previous, (slowest, _) in best[-1].items():
                if previous >= number:
                    continue
                start = points[previous].position if previous >= 0 else 0
                received = points[previous].sent_s if previous >= 0 else 0.0
                cost = (before[point.position] - before[start] + received + point.sent_s) * penalty
                entry = max(slowest, cost)
                if number not in reached or entry < reached[number][0]:
                    reached[number] = (entry, previous)
        best.append(reached)
    total = before[-1]
    last = min(
        best[-1],
        key=lambda number: max(best[-1][number][0], total - before[points[number].position] + points[number].sent_s),
    )
    chosen = []
    for level in reversed(best[1:]):
        chosen.append(forward[points[last].position].name)
        last = level[last][1]
    return tuple(reversed(chosen))


def follow_cut(graph: Graph, firsts: tuple[str, ...]) -> tuple[str, ...]:
    """Find the same cut in another capture of the model, such as an evaluation, where some operators may be missing.

    ``firsts`` are the first operators of all stages except the first stage. If the capture lacks such an operator, its
    stage begins at the first operator of the same module.

    Raises:
        LayoutError: the capture does not use the module of a stage's first operator.
    """
    forward = forward_operators(graph)
    names = {op.name for op in forward}
    result = []
    for first in firsts:
        module = first.partition(":")[0]
        start = first if first in names else next((op.name for op in forward if op.module == module), None)
        if start is None:
            raise LayoutError(
                f"this batch does not use module {module!r}, where a stage begins",
                where="batch",
                remedy="choose another cut (stages[].first in the plan), or batches that use all modules",
            )
        result.append(start)
    return tuple(result)


def operator_times(graph: Graph, forward: Sequence[Operator], cluster: Cluster | None) -> list[float]:
    """Seconds of each forward operator plus its backward operators. An operator takes the larger of its compute time
    and its memory time."""
    peak, bandwidth = FLOPS_PER_S, BYTES_PER_S
    if cluster is not None:
        peak = max(cluster.device.peak_flops_per_s.values())
        bandwidth = cluster.device.memory_bandwidth_bytes_per_s
    place = {operator.name: index for index, operator in enumerate(forward)}
    by_sequence = {operator.sequence: place[operator.name] for operator in reversed(forward) if operator.sequence >= 0}
    times = [0.0] * len(forward)
    for operator in graph.operators:
        index = place.get(operator.name, by_sequence.get(operator.sequence))
        if index is not None and not operator.prologue:
            times[index] += max(operator.flops / peak, operator.bytes / bandwidth)
    return times


def cut_points(graph: Graph, forward: Sequence[Operator], cluster: Cluster | None) -> list[CutPoint]:
    """The possible cuts: positions with a matrix product on both sides, where neither neighbouring position has fewer
    live bytes."""
    rate = SENT_BYTES_PER_S
    if cluster is not None and cluster.levels:
        rate = 1 / cluster.levels[0].beta_s_per_byte
    live = live_bytes(graph, forward)
    points: list[CutPoint] = []
    index = 1
    while index < len(forward):
        end = index
        while end + 1 < len(forward) and live[end + 1] == live[index]:
            end += 1
        lower_before = index > 1 and live[index - 1] < live[index]
        lower_after = end + 1 < len(forward) and live[end + 1] < live[index]
        if not lower_before and not lower_after and live[index] < inf:
            flat = range(index, end + 1)
            where = next(
                (position for position in flat if _block(forward[position]) != _block(forward[position - 1])), None
            )
            # The live tensors cross once in forward, their gradients once in backward.
            points.append(CutPoint(flat[0] if where is None else where, 2 * live[index] / rate, where is not None))
        index = end + 1
    products = [index for index, operator in enumerate(forward) if operator.flops > 0]
    return [point for point in points if products and products[0] < point.position <= products[-1]]


def live_bytes(graph: Graph, forward: Sequence[Operator]) -> list[float]:
    """For each position, the bytes of tensors that are made before it and read at or after it. The bytes are infinite
    where no cut is possible."""
    place = {operator.name: index for index, operator in enumerate(forward)}
    made_at = {output: index for index, operator in enumerate(forward) for output in operator.outputs}
    last: dict[str, int] = {}
    for operator in forward:
        for name in operator.inputs:
            if name in made_at:
                last[name] = place[operator.name]
    for name in (graph.loss, *graph.metrics.values()):
        if name in made_at:
            last[name] = len(forward) - 1
    changes = [0.0] * (len(forward) + 2)
    for name, end in last.items():
        changes[made_at[name] + 1] += graph.tensors[name].num_bytes
        changes[end + 1] -= graph.tensors[name].num_bytes
    live = list(itertools.accumulate(changes[: len(forward)]))
    for first, end in (*_buffer_spans(graph, place), *_call_spans(forward)):  # a stage holds the whole span
        live[first + 1 : end + 1] = [inf] * (end - first)
    return live


def _call_spans(forward: Sequence[Operator]) -> list[tuple[int, int]]:
    """The positions of the first product and of the last operator of each call of the model that begins with a product,
    such as the product and the addition of a dense layer. They have one backward: between them, the gradient of the
    weight would cross."""
    spans: dict[int, tuple[int, int]] = {}
    for index, operator in enumerate(forward):
        if operator.sequence in spans:
            spans[operator.sequence] = spans[operator.sequence][0], index
        elif operator.sequence >= 0 and operator.flops:
            spans[operator.sequence] = index, index
    return list(spans.values())


def _buffer_spans(graph: Graph, place: dict[str, int]) -> list[tuple[int, int]]:
    """For every buffer that a step updates, the positions of the first and the last forward operator that read the
    buffer or compute its new value."""
    consumers, producers = graph.consumers(), graph.producers()
    spans = []
    for buffer, update in graph.buffer_updates.items():
        users = [consumer.name for consumer, _ in consumers.get(buffer, ())]
        users += [producers[update].name] if update in producers else []
        positions = [place[name] for name in users if name in place]
        if positions:
            spans.append((min(positions), max(positions)))
    return spans


def _block(operator: Operator) -> str:
    """The repeated block that contains an operator, or else its outermost module. If blocks contain blocks, as in the
    groups of a ResNet, it is the inner block."""
    return block_of(operator, 2) or block_of(operator) or operator.module.partition(".")[0]


def between_sizes(graph: Graph, layout: Layout, firsts: tuple[str, ...]) -> frozenset[str]:
    """Parameters that are shared by stages with different sizes of dp or tp. No split fits all these stages, so the
    parameters are stored whole. ``firsts`` are the first operators of all stages except the first stage."""
    divided = cut(graph, firsts)
    sizes = [(stage.dp, stage.feature_ranks) for stage in map(layout.of_stage, range(layout.pp))]
    shared = {
        name
        for name, held in divided.owners.items()
        if len({sizes[layout.pipeline.rank_of(owner)] for owner in held}) > 1
    }
    return frozenset(shared.intersection(graph.parameters))
