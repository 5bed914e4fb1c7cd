"""Emits the reduction of a stage's gradients, and their accumulation over micro-batches.

one micro-batch    a bucket is reduced when its last gradient is computed; the end of the step waits for it
several            gradients accumulate, each in separate memory or in its bucket's, and are reduced once a step;
                   or buckets are reduce-scattered in every micro-batch, and the parts accumulate
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from meshwright.ir.layout import TIME
from meshwright.ir.placement import Partial, Placements
from meshwright.ir.plan import Bucket
from meshwright.ir.program import Accumulator, Value
from meshwright.ir.stages import BACKWARD, FINISH, REDUCE, STEP, Cut
from meshwright.lower import buckets
from meshwright.lower.emission import Emission

aten = torch.ops.aten


@dataclass(frozen=True)
class _Total:
    """The memory in which a parameter's gradient accumulates."""

    parameter: str
    node: fx.Node
    shape: tuple[int, ...]


def label_of(parameter: str) -> str:
    """The label of the reduction of a parameter's gradient alone."""
    return f"gradient of {parameter}"


class Gradients:
    """Emits the accumulation and reduction of gradients. After :meth:`finish`, ``results`` maps a parameter to the node
    of its gradient. ``accumulators`` and ``buckets`` are the memory in which gradients accumulate. ``apart`` names the
    parameters whose gradients share their memory with no other tensor."""

    def __init__(self, emission: Emission, divided: Cut, stage: int, device: torch.device):
        self._to, self._device = emission, device
        self.accumulators: list[Accumulator] = []
        self.buckets: list[Value] = []
        self._terms = {name: terms[stage] for name, terms in divided.terms.items() if terms.get(stage)}
        self._in_parts = emission.plan.stages[stage].gradients
        self._buckets = [
            (bucket, names) for bucket in emission.plan.buckets
            if bucket.axis in emission.groups and (names := [name for name in bucket.parameters if name in self._terms])
        ]  # fmt: skip
        bucketed = {name for _, names in self._buckets for name in names}
        self._rest = [name for name in self._terms if name not in bucketed]
        self._waiting: dict[str, list[int]] = defaultdict(list)
        for index, (_, names) in enumerate(self._buckets):
            for name in () if emission.microbatched else names:
                self._waiting[self._terms[name][0]].append(index)
        self._left = [{self._terms[name][0] for name in names} for _, names in self._buckets]
        self._started: dict[int, fx.Node] = {}
        self.results: dict[str, fx.Node] = {}
        self.apart: set[str] = set()

    def wants(self) -> list[tuple[str, Placements]]:
        """The gradients that :meth:`finish` reads, each with the placements in which it is read."""
        if self._to.microbatched:
            return [(name, {}) for terms in self._terms.values() for name in terms]
        return [(name, self._stored(parameter)) for parameter in self._rest for name in self._terms[parameter]]

    def reads(self, name: str) -> bool:
        """Whether a tensor is a gradient that enters a bucket as soon as it is computed."""
        return name in self._waiting

    def note_computed(self, name: str) -> None:
        """Record that a tensor was computed, and start the reduction of each bucket that is now complete."""
        for index in self._waiting.get(name, ()):
            self._left[index].discard(name)
            if not self._left[index]:
                self._start(index)

    def finish(self) -> None:
        """Emit the accumulations and reductions that :meth:`made` did not start, and wait for all reductions."""
        self._to.meta = {"operator": "gradients", "backward": True}
        if self._to.microbatched:
            self._accumulate()
            return
        for index, left in enumerate(self._left):
            if left:
                with self._to.during(BACKWARD):
                    self._start(index)
        with self._to.during(FINISH):
            self._finish_started()
            for parameter in self._rest:
                first, *others = (self._to.want(name, self._stored(parameter)) for name in self._terms[parameter])
                for other in others:
                    first = self._to.emit(aten.add.Tensor, first, other)
                self.results[parameter] = first

    def _stored(self, parameter: str) -> Placements:
        return self._to.known(self._to.plan.storage(parameter))

    def _shape(self, parameter: str, placements: Placements) -> tuple[int, ...]:
        return self._to.local_shape(self._to.ir.tensors[parameter].shape, placements)

    # --- one micro-batch ---------------------------------------------------------------------------------------------

    def _start(self, index: int) -> None:
        bucket, names = self._buckets[index]
        nodes = [self._to.values[self._terms[name][0]].node for name in names]
        if buckets.is_cut(self._to.plan, bucket):
            self._finish_started()  # one at a time, so that gradients are freed after their reduction
            self._started[index] = self._start_cut(bucket, names, nodes)
            return
        flat = self._to.emit(aten.cat.default, [self._to.emit(aten.reshape.default, node, [-1]) for node in nodes])
        flat.meta["device"] = self._device
        self._started[index] = self._all_reduce(flat, bucket, names, [self._shape_of(name) for name in names])

    def _shape_of(self, parameter: str) -> tuple[int, ...]:
        """The shape of a gradient on this rank, before it is reduced."""
        value = self._to.values[self._terms[parameter][0]]
        return self._shape(parameter, self._to.known(value.placements))

    def _start_cut(
        self, bucket: Bucket, names: Sequence[str], nodes: Sequence[fx.Node], *, again: bool = False
    ) -> fx.Node:
        """Start the reduce-scatter of a bucket's whole gradients."""
        group, shapes = self._to.groups[bucket.axis], [self._shape_of(name) for name in names]
        coded = self._to.codecs.of_gradients(bucket, bucket.axis, names, shapes, self._dtype(names), group.size)
        return buckets.start_cut(self._to.emit, nodes, bucket, self._to.groups, coded, again=again)

    def _dtype(self, names: Sequence[str]) -> torch.dtype:
        """The dtype of the gradients of a bucket."""
        return self._to.dtype(self._terms[names[0]][0])

    def _finish_started(self) -> None:
        for index, started in self._started.items():
            bucket, names = self._buckets[index]
            self._finish_bucket(started, bucket, names, [self._shape(name, self._stored(name)) for name in names])
        self._started.clear()

    # --- several -----------------------------------------------------------------------------------------------------

    def _accumulate(self) -> None:
        totals = {}
        for parameter, terms in self._terms.items():
            in_parts = parameter in self._in_parts
            placements = self._to.known(self._in_parts[parameter]) if in_parts else self._summed(parameter, terms)
            shape = self._shape(parameter, placements)
            node = self._to.given("gradient", STEP, shape, self._to.dtype(terms[0]))
            totals[parameter] = total = _Total(parameter, node, shape)
            if not in_parts or parameter in self._rest:
                with self._to.during(BACKWARD):
                    for name in terms:
                        self._add(total, self._to.want(name, {**placements, TIME: Partial("sum")}))
            if parameter in self._rest:
                self._keep(total)
                self._reduce(total, placements)
        for bucket, names in self._buckets:
            members = [totals[name] for name in names]
            if names[0] in self._in_parts:
                self._reduce_each(bucket, members)
            elif buckets.is_cut(self._to.plan, bucket):
                self._reduce_to_parts(bucket, members)
            else:
                self._reduce_bucket(bucket, members)

    def _summed(self, parameter: str, terms: Sequence[str]) -> Placements:
        """The placements in which a gradient accumulates. A single term keeps its own placements; several terms are
        summed in the placements of the stored parameter."""
        if len(terms) > 1:
            return self._stored(parameter)
        placements = self._to.values[terms[0]].placements
        return {axis: placement for axis, placement in self._to.known(placements).items() if axis != TIME}

    def _add(self, total: _Total, term: fx.Node) -> None:
        self._to.returned(self._to.emit(aten.add_.Tensor, total.node, term))

    def _keep(self, total: _Total, bucket: str = "", offset: int = 0) -> None:
        """Let the executor provide the memory of a total: separate memory, or the memory of ``bucket`` from element
        ``offset`` on."""
        self.accumulators.append(Accumulator(total.parameter, self._to.memory(total.node, bucket), offset))

    def _reduce(self, total: _Total, placements: Placements) -> None:
        node, want = total.node, self._stored(total.parameter)
        if placements != want:
            with self._to.during(REDUCE):
                shape = self._to.ir.tensors[total.parameter].shape
                node = self._to.reshard(node, shape, placements, want, label_of(total.parameter))
        self.results[total.parameter] = node
        self.apart.add(total.parameter)

    def _reduce_each(self, bucket: Bucket, totals: Sequence[_Total]) -> None:
        """Reduce-scatter a bucket in every micro-batch, and accumulate the parts."""
        with self._to.during(BACKWARD):
            nodes = [self._term(self._terms[total.parameter][0]) for total in totals]
            names, shapes = [total.parameter for total in totals], [total.shape for total in totals]
            started = self._start_cut(bucket, names, nodes, again=True)
            parts = self._finished(started, bucket, names, shapes)
            for total, part in zip(totals, parts, strict=True):
                self._add(total, part)
                self._keep(total)
                self.results[total.parameter] = total.node
                self.apart.add(total.parameter)

    def _term(self, name: str) -> fx.Node:
        """A micro-batch's term of a gradient. A gradient that is equal in all micro-batches is divided by their
        number."""
        return self._to.want(name, {**self._to.known(self._to.values[name].placements), TIME: Partial("sum")})

    def _reduce_to_parts(self, bucket: Bucket, totals: Sequence[_Total]) -> None:
        """Accumulate whole gradients, and reduce-scatter them once a step."""
        names = [total.parameter for total in totals]
        for total in totals:
            self._keep(total)
        with self._to.during(REDUCE):
            nodes = [total.node for total in totals]
            started = self._start_cut(bucket, names, nodes)
        with self._to.during(FINISH):
            self._finish_bucket(started, bucket, names, [self._shape(name, self._stored(name)) for name in names])

    def _reduce_bucket(self, bucket: Bucket, totals: Sequence[_Total]) -> None:
        """Accumulate a bucket's gradients in one piece of memory, and all-reduce it once a step."""
        names, shapes = [total.parameter for total in totals], [total.shape for total in totals]
        count, dtype, offset = sum(map(prod, shapes)), totals[0].node.meta["dtype"], 0
        flat = self._to.given("bucket", STEP, (count,), dtype)
        self.buckets.append(self._to.memory(flat))
        for total in totals:
            self._keep(total, flat.name, offset)
            offset += prod(total.shape)
        with self._to.during(REDUCE):
            started = self._all_reduce(flat, bucket, names, shapes)
        with self._to.during(FINISH):
            self._finish_bucket(started, bucket, names, shapes)

    # --- both --------------------------------------------------------------------------------------------------------

    def _all_reduce(
        self, flat: fx.Node, bucket: Bucket, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> fx.Node:
        coded = self._to.codecs.of_gradients(bucket, bucket.axis, names, shapes, self._dtype(names))
        return buckets.start_sum(self._to.emit, flat, bucket, bucket.axis, self._to.groups, coded, shapes)

    def _finished(
        self, started: fx.Node, bucket: Bucket, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> list[fx.Node]:
        dtype = self._dtype(names)
        return buckets.finish(
            self._to.emit, started, bucket, self._to.groups, names, shapes, self._to.codecs, dtype
        )  # fmt: skip

    def _finish_bucket(
        self, started: fx.Node, bucket: Bucket, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self.results |= zip(names, self._finished(started, bucket, names, shapes), strict=True)
        self.apart.update(names)
