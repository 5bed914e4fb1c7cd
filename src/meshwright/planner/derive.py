"""What follows from the strategies of a plan: Partials passed on, storage of parameters, gradient buckets."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod

from meshwright.ir.graph import ITEM_BYTES, Graph, Operator
from meshwright.ir.layout import TIME
from meshwright.ir.placement import (
    REPLICATE,
    Partial,
    Placement,
    Placements,
    Shard,
    flat_axis,
    input_placements,
    is_linear,
    local_shape,
    output_placements,
    unflattened,
)
from meshwright.ir.plan import Bucket, Strategy, starred
from meshwright.ir.resharding import Mover
from meshwright.ir.stages import Cut

BUCKET_BYTES = 8 * 2**20
_ATTENTION = "meshwright.attention."
Consumers = dict[str, list[tuple[Operator, int]]]


def pass_partials(
    graph: Graph,
    divided: Cut,
    strategies: dict[str, Strategy],
    axes: Mapping[str, int],
    settled: Iterable[str] = (),
    otherwise: Mapping[str, Strategy] | None = None,
) -> dict[str, Placements]:
    """Let Partials through operators that are linear in them, where that is not dearer than reducing first. What comes
    from another stage is a Partial over time only. On the axes ``settled`` it was decided which ones pass; those that
    come from another stage do not after all. Where no Partial passes, an operator splits what ``otherwise`` has for it
    (by its name, axis -> factor)."""
    settled, consumers, producers = list(settled), graph.consumers(), graph.producers()
    placements: dict[str, Placements] = {}
    for operator in graph.operators:
        strategy = strategies[operator.name]
        for axis in [axis for axis, choice in strategy.items() if not choice]:
            del strategy[axis]
        if operator.rule is None:
            continue
        for axis in settled:
            group = len(strategy[axis]) if is_linear(strategy.get(axis, "")) else 0
            crossing = divided.reduced_inputs(operator, producers) if group else set()
            for operand, name in zip(operator.rule.parsed.inputs, operator.inputs, strict=True):
                passes = placements.get(name, {}).get(axis) == Partial("sum") and name not in crossing
                if group and operand.linear == group and not passes:
                    strategy.pop(axis, None)
        for axis in (one for one in axes if one not in settled):
            if axis not in strategy and not (axis == TIME and operator.prologue):
                reduced = divided.reduced_inputs(operator, producers) if axis != TIME else set()
                here = {name: placements.get(name, {}) for name in operator.inputs if name not in reduced}
                group = _linear_group(graph, consumers, operator, axis, here)
                if group:
                    strategy[axis] = "^" * group
                elif choice := (otherwise or {}).get(operator.name, {}).get(axis):
                    strategy[axis] = choice
        for index, output in enumerate(operator.outputs):
            placements[output] = output_placements(operator.rule, strategy, index, axes)
    return placements


def _linear_group(
    graph: Graph, consumers: Consumers, operator: Operator, axis: str, placements: dict[str, Placements]
) -> int:
    rule = operator.rule
    assert rule is not None
    partial = [
        placements.get(tensor, {}).get(axis) == Partial("sum") and (axis == TIME or len(consumers.get(tensor, ())) == 1)
        for tensor in operator.inputs
    ]
    if not any(partial):
        return 0
    groups = {operand.linear for operand, one in zip(rule.parsed.inputs, partial, strict=True) if one}
    if len(groups) != 1 or 0 in groups:
        return 0
    group = groups.pop()
    if axis == TIME:  # nothing can be reduced there; what is whole becomes a term by dividing it
        return group
    if any(operand.linear == group and not one for operand, one in zip(rule.parsed.inputs, partial, strict=True)):
        return 0
    into = sum(graph.tensors[name].num_elements for name, one in zip(operator.inputs, partial, strict=True) if one)
    out = sum(graph.tensors[name].num_elements for name in operator.outputs)
    return group if out <= into else 0


def parameter_storage(
    graph: Graph, strategies: dict[str, Strategy], sizes: Mapping[str, int]
) -> dict[str, dict[str, Placement]]:
    """Parameters lie as their operators want them; where these differ, split rather than whole."""
    consumers = graph.consumers()
    storage: dict[str, dict[str, Placement]] = {}
    for name in graph.parameters:
        found: dict[str, Placement] = {}
        for operator, position in consumers.get(name, ()):
            if operator.rule is None or operator.backward:
                continue
            wanted = input_placements(operator.rule, strategies[operator.name], position, sizes)
            for axis, placement in wanted.items():
                if isinstance(placement, Shard):
                    found.setdefault(axis, placement)
        storage[name] = found
    return storage


def parameter_gathers(
    graph: Graph,
    divided: Cut,
    storage: dict[str, dict[str, Placement]],
    axis_sizes: dict[str, int],
    algorithms: dict[str, str],
) -> tuple[Bucket, ...]:
    """Parameters that are stored Flat, by stage, in the order of their first use; one that several modules use is with
    those that the same modules use, for what is gathered together lives as long as the last of it."""
    consumers = graph.consumers()
    order = {operator.name: index for index, operator in enumerate(graph.operators)}
    first = {
        name: min((order[operator.name] for operator, _ in consumers.get(name, ())), default=len(order))
        for name in graph.parameters
    }
    collect = _Buckets(algorithms)
    for name in sorted(graph.parameters, key=first.__getitem__):
        axis = flat_axis({one: placement for one, placement in storage[name].items() if one in axis_sizes})
        if axis:
            tensor = graph.tensors[name]
            num_bytes = _local_bytes(graph, name, unflattened(storage[name]), axis_sizes)
            modules = sorted({operator.module for operator, _ in consumers.get(name, ()) if not operator.backward})
            shared = " ".join(modules) if len(modules) > 1 else ""
            collect.add((divided.owners[name], axis, (), True, tensor.dtype + shared), name, num_bytes)
    return collect.closed()


def _local_bytes(graph: Graph, name: str, placements: Placements, axis_sizes: Mapping[str, int]) -> int:
    tensor = graph.tensors[name]
    here = {axis: one for axis, one in placements.items() if axis in axis_sizes}
    return prod(local_shape(tensor.shape, here, axis_sizes)) * ITEM_BYTES[tensor.dtype]


class _Buckets:
    """Puts what goes together in buckets of at most ``BUCKET_BYTES`` (or one tensor)."""

    def __init__(self, algorithms: dict[str, str]) -> None:
        self._algorithms = algorithms
        self._pending: dict[_Together, tuple[list[str], int]] = {}
        self._closed: list[Bucket] = []

    def add(self, key: "_Together", name: str, num_bytes: int) -> None:
        """The next parameter; its bucket's axis, and those across, are in the key."""
        names, total = self._pending.get(key, ([], 0))
        if names and total + num_bytes > BUCKET_BYTES:
            self._close(key, names, total)
            names, total = [], 0
        self._pending[key] = ([*names, name], total + num_bytes)

    def closed(self) -> tuple[Bucket, ...]:
        """All buckets, in the order in which they are full."""
        for key, (names, total) in self._pending.items():
            self._close(key, names, total)
        return tuple(self._closed)

    def _close(self, key: "_Together", names: list[str], num_bytes: int) -> None:
        _, axis, across, _, _ = key
        self._closed.append(
            Bucket(
                axis=axis, parameters=tuple(names), num_bytes=num_bytes,
                algorithm=self._algorithms.get(axis, "native"), across=across,
            )
        )  # fmt: skip


_Together = tuple[tuple[int, ...], str, tuple[str, ...], bool, str]
"""What one bucket has in common: stages, axis, the axes across, whether Flat, and dtype (with what else counts)."""


def gradient_buckets(
    graph: Graph,
    divided: Cut,
    placements: dict[str, Placements],
    storage: dict[str, dict[str, Placement]],
    mover: Mover,
    algorithms: dict[str, str],
) -> tuple[Bucket, ...]:
    """Gradients that only lack a sum, by stage, in the order that backward makes them. Over several axes they are
    summed as one, where ``mover`` finds that cheaper, else one after the other: first to parts, where they are stored
    so."""
    consumers = graph.consumers()
    order = {output: index for index, operator in enumerate(graph.operators) for output in operator.outputs}
    collect = _Buckets(algorithms)
    entries = [entry for entry in graph.gradients if entry.gradient is not None]
    counts: dict[str, int] = defaultdict(int)
    for entry in entries:
        counts[entry.gradient or ""] += 1
    for entry in sorted(entries, key=lambda entry: order.get(entry.gradient or "", -1)):
        gradient = entry.gradient or ""
        stages = divided.terms[entry.parameter]
        have, want = dict(placements.get(gradient, {})), storage.get(entry.parameter, {})
        have.pop(TIME, None)
        axes = [axis for axis, placement in have.items() if placement == Partial("sum")]
        rest = {axis: placement for axis, placement in have.items() if axis not in axes and placement != REPLICATE}
        flat = flat_axis(want)
        if not axes or (flat and flat not in axes):
            continue
        axis, *across = [flat, *(one for one in axes if one != flat)] if flat else _summed_over(axes, mover)
        if rest != {a: p for a, p in unflattened(want).items() if a in mover.sizes}:
            continue
        if counts[gradient] > 1 or consumers.get(gradient) or len(stages) > 1:
            continue
        tensor = graph.tensors[gradient]
        num_bytes = _local_bytes(graph, gradient, rest, mover.sizes)
        collect.add((tuple(stages), axis, tuple(across), bool(flat), tensor.dtype), entry.parameter, num_bytes)
    return collect.closed()


def _summed_over(axes: list[str], mover: Mover) -> list[str]:
    """Axes of a bucket's sum: one after the other, or a joined one."""
    have: Placements = dict.fromkeys(axes, Partial("sum"))
    found = mover.moves(have, {}, (BUCKET_BYTES // 4,), 4)
    return [found[0].axis] if len(found) == 1 else [axis for axis in mover.sizes if axis in axes]


def recomputed(operators: Iterable[Operator], divided: Cut, kind: str) -> tuple[str, ...]:
    """What a stage computes again in backward: its attention, or its repeated blocks."""
    forward = [one for one in operators if one.name not in divided.late and not one.prologue]
    if kind == "selective":
        return tuple(dict.fromkeys(starred(one.name) for one in forward if one.target.startswith(_ATTENTION)))
    if kind == "full":
        return tuple(dict.fromkeys(one.repeat.partition("*")[0] + "*" for one in forward if one.repeat))
    return ()


def grouped(strategies: dict[str, Strategy]) -> dict[str, Strategy]:
    """By repeated block where all its members agree, else by name; replicated operators are left out."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in strategies:
        groups[starred(name)].append(name)
    result: dict[str, Strategy] = {}
    for star, members in groups.items():
        agreed = all(strategies[name] == strategies[members[0]] for name in members)
        for name, strategy in (
            [(star, strategies[members[0]])] if agreed else [(name, strategies[name]) for name in members]
        ):
            if strategy or not agreed:
                result[name] = strategy
    return result
