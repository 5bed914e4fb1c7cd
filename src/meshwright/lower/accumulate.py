"""The gradients of a stage: summed up over micro-batches, and reduced once a step, or in every micro-batch to parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from meshwright.capture.builder import Capture
from meshwright.ir.layout import TIME
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Partial, Placements
from meshwright.ir.plan import Bucket, Plan
from meshwright.ir.stages import BACKWARD, FINISH, REDUCE, STEP, Cut
from meshwright.lower import buckets
from meshwright.lower.buckets import Value
from meshwright.lower.program import Accumulator, StageProgram
from meshwright.lower.regions import Compiler
from meshwright.lower.spmd import Lowering
from meshwright.lower.stage import DISPATCHED, Kernels
from meshwright.ops import collectives

aten = torch.ops.aten


@dataclass(frozen=True)
class _Total:
    """What a parameter's gradient is summed up in."""

    parameter: str
    node: fx.Node
    shape: tuple[int, ...]


class GradientLowering(Lowering):
    """Emits into phases of a stage, and knows how its gradients become those of the step. ``lower/pipeline.py`` does
    the rest."""

    def __init__(
        self,
        capture: Capture,
        plan: Plan,
        divided: Cut,
        stage: int,
        groups: dict[str, AxisGroup],
        device: torch.device,
        compiler: Compiler | None = None,
        kernels: Kernels = DISPATCHED,
    ) -> None:
        super().__init__(capture, plan, groups, device, compiler, kernels)
        self.divided, self.stage = divided, stage
        self.last = stage == divided.num_stages - 1
        self.program = StageProgram(stage)
        self.produced = {output: one for one in self.ir.operators for output in one.outputs}
        self.sliced: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.scaled: dict[str, Value] = {}
        self.roots: list[fx.Node] = []

    # --- emission ------------------------------------------------------------------------------------------------

    @contextmanager
    def _in(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def _given(self, name: str, phase: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        """A value that the executor provides."""
        node = self.graph.placeholder(name)
        node.meta.update(local_shape=shape, dtype=dtype, phase=phase)
        return node

    def _returned(self, node: fx.Node) -> fx.Node:
        node.meta["returned"] = True
        self.roots.append(node)
        return node

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.ir.tensors[name].dtype)
        return dtype

    # --- gradients -----------------------------------------------------------------------------------------------

    def _accumulate_gradients(self) -> None:
        self.meta = {"operator": "gradients"}
        used = [one for one in self.plan.buckets if one.axis in self.groups]
        bucket_of = {parameter: index for index, one in enumerate(used) for parameter in one.parameters}
        waiting: dict[int, list[_Total]] = {}
        in_parts = self.plan.stages[self.stage].gradients
        for parameter, by_stage in self.divided.terms.items():
            terms = by_stage.get(self.stage)
            if not terms:
                continue
            placements = self._known(in_parts[parameter]) if parameter in in_parts else self._summed(parameter, terms)
            shape = self.local_shape(self.ir.tensors[parameter].shape, placements)
            total = _Total(parameter, self._given("gradient", STEP, shape, self._dtype(terms[0])), shape)
            divided: Placements = {TIME: Partial("sum")} if TIME in self.groups else {}
            if parameter not in in_parts or parameter not in bucket_of:
                with self._in(BACKWARD):
                    for name in terms:
                        self._add(total, self._want(name, {**placements, **divided}))
            if parameter in bucket_of:
                waiting.setdefault(bucket_of[parameter], []).append(total)
            else:
                self._keep(total)
                self._reduce(parameter, total.node, placements)
        for index, totals in waiting.items():
            if totals[0].parameter in in_parts:
                self._reduce_each(used[index], totals)
            elif buckets.is_cut(self.plan, used[index]):
                self._reduce_to_parts(used[index], totals)
            else:
                self._reduce_bucket(used[index], totals)

    def _add(self, total: _Total, term: fx.Node) -> None:
        self._returned(self.emit(aten.add_.Tensor, total.node, term))

    def _keep(self, total: _Total, bucket: str = "", offset: int = 0) -> None:
        """Let the executor give it memory."""
        made = Accumulator(total.parameter, total.node.name, total.shape, total.node.meta["dtype"], bucket, offset)
        self.program.accumulators.append(made)

    def _summed(self, parameter: str, terms: tuple[str, ...]) -> Placements:
        """As what a gradient is summed up: as its only term is made; several are first reduced."""
        want = self._known(self.plan.storage(parameter))
        if len(terms) > 1:
            return want
        placements = self.values[terms[0]].placements
        return {axis: one for axis, one in placements.items() if axis in self.groups and axis != TIME}

    def _reduce(self, parameter: str, total: fx.Node, placements: Placements) -> None:
        want = self._known(self.plan.storage(parameter))
        node = total
        if placements != want:
            with self._in(REDUCE):
                shape = self.ir.tensors[parameter].shape
                node = self._reshard(total, shape, placements, want, f"gradient of {parameter}")
            self._returned(node)
        self.program.gradients[parameter] = node.name

    def _reshard(
        self, node: fx.Node, shape: tuple[int, ...], have: Placements, want: Placements, label: str
    ) -> fx.Node:
        """Start now, and finish in ``finish``."""
        item_bytes = node.meta["dtype"].itemsize
        steps = self.resharder.steps(node, shape, have, want, item_bytes=item_bytes, owned=True, label=label)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                result: fx.Node = stop.value
                return result
            self.phase = FINISH

    def _reduce_each(self, bucket: Bucket, totals: list[_Total]) -> None:
        """Reduce a bucket in every micro-batch, and sum up the parts."""
        with self._in(BACKWARD):
            nodes = [self._term(self.divided.terms[one.parameter][self.stage][0]) for one in totals]
            started = buckets.start_cut(self.emit, nodes, bucket, self.groups, again=True)
            parts = buckets.finish(self.emit, started, bucket, self.groups, [one.shape for one in totals])
            for total, part in zip(totals, parts, strict=True):
                self._add(total, part)
                self._keep(total)
                self.program.gradients[total.parameter] = total.node.name

    def _term(self, name: str) -> fx.Node:
        """A gradient as it is made, of a micro-batch: what is the same in all of them is a term of a sum."""
        made = {axis: one for axis, one in self.values[name].placements.items() if axis in self.groups}
        return self._want(name, made | ({TIME: Partial("sum")} if TIME in self.groups else {}))

    def _reduce_to_parts(self, bucket: Bucket, totals: list[_Total]) -> None:
        """Reduce once a step what was summed up whole, each to its part."""
        shapes = []
        for one in totals:
            want = self._known(self.plan.storage(one.parameter))
            shapes.append(self.local_shape(self.ir.tensors[one.parameter].shape, want))
            self._keep(one)
        with self._in(REDUCE):
            started = buckets.start_cut(self.emit, [one.node for one in totals], bucket, self.groups)
        self._finish_bucket(started, bucket, totals, shapes)

    def _reduce_bucket(self, bucket: Bucket, totals: list[_Total]) -> None:
        """Sum up a bucket in one piece of memory, which is reduced once a step."""
        shapes = [one.shape for one in totals]
        count, dtype, offset = sum(map(prod, shapes)), totals[0].node.meta["dtype"], 0
        flat = self._given("bucket", STEP, (count,), dtype)
        self.program.buckets[flat.name] = (count, dtype)
        for one in totals:
            self._keep(one, flat.name, offset)
            offset += prod(one.shape)
        with self._in(REDUCE):
            group = self.groups[bucket.axis]
            started = self.emit(
                collectives.ALL_REDUCE, flat, "sum", group.name, bucket.algorithm, label=buckets.label_of(bucket)
            )
        self._finish_bucket(started, bucket, totals, shapes)

    def _finish_bucket(
        self, started: fx.Node, bucket: Bucket, totals: list[_Total], shapes: list[tuple[int, ...]]
    ) -> None:
        with self._in(FINISH):
            parts = buckets.finish(self.emit, started, bucket, self.groups, shapes)
            for one, part in zip(totals, parts, strict=True):
                self.program.gradients[one.parameter] = self._returned(part).name
