"""The trainer: it runs a plan's training steps on this rank, and updates parameters with the user's optimizer."""

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.capture.batch import Leaves, take_apart
from meshwright.capture.builder import Capture
from meshwright.capture.opaque_capture import capture
from meshwright.capture.precision import LOW
from meshwright.capture.tracer import LossFunction
from meshwright.comm.clock import on_rank_0
from meshwright.comm.groups import amend, told_of
from meshwright.comm.record import COMPUTE, SpanRecorder, recording
from meshwright.errors import OptimizerError
from meshwright.ir.graph import Graph
from meshwright.ir.layout import DATA_AXES
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.plan import Plan
from meshwright.ir.trace import Trace
from meshwright.lower.regions import Compiler
from meshwright.lower.reshard import local_part
from meshwright.ops.base import OperatorRule, Target
from meshwright.ops.philox import key_of
from meshwright.runtime.clip import clip
from meshwright.runtime.codec_memory import CodecMemory, check_momentum
from meshwright.runtime.device import DeviceKind, InputCopies, device_kind
from meshwright.runtime.device_errors import explained
from meshwright.runtime.executor import Executor
from meshwright.runtime.guards import CallersTensors, Guard, check_same_change
from meshwright.runtime.inputs import BatchSplit, check_alike, compare_over_ranks, kind_of
from meshwright.runtime.interchange import Path_
from meshwright.runtime.loss_check import UNCHANGED, LossCheck, refuse_unless_finite
from meshwright.runtime.offload import Offloader
from meshwright.runtime.optimizer import OptimizerFactory, make_optimizer
from meshwright.runtime.precision import LossScale
from meshwright.runtime.replica import Replica
from meshwright.runtime.saving import Saver
from meshwright.runtime.shared_parameters import SharedParameters
from meshwright.runtime.state import LocalParameters
from meshwright.runtime.steps import Step, StepResult, groups_of
from meshwright.runtime.stepwise import Stepwise

log = logging.getLogger("meshwright")

Replan = Callable[[Plan, Graph], Plan]
SHAPES_KEPT = 8
"""Most captured steps that are kept. Changes of the model that cause so many captures again cause a warning."""


class Trainer(Stepwise):
    """Trains a model as a plan says. Every rank makes its trainer with :func:`meshwright.parallelize`.

    Attributes:
        plan: the plan that runs, with its amendments.
        step_number: number of steps done.
        metrics: maps names to scalar tensors of the last step or evaluation: ``loss``, the loss function's metrics,
            ``grad_norm`` (if clipped), ``skipped`` (0 or 1, in a low precision) and ``loss_scale`` (in float16).
        replica: this replica's part in the exchange with other replicas; None without replicas.
        recorder: records the spans of the last step or evaluation; if it is None, nothing is recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        captured: Capture,
        plan: Plan,
        *,
        optimizer: OptimizerFactory | None,
        max_grad_norm: float | None,
        seed: int,
        device: torch.device,
        replan: Replan,
        rules: Mapping[Target, OperatorRule] | None = None,
        compile: bool = False,
        kind: DeviceKind | None = None,
        weights: Path_ | None = None,
        shared: LocalParameters | None = None,
    ) -> None:
        self.plan = self._ran = plan
        self.step_number = 0
        self.metrics: dict[str, Tensor] = {}
        self.max_grad_norm, self.seed, self.device = max_grad_norm, seed, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._kind = kind = kind or device_kind(device)
        self.saver, self.losses, self._input_copies = Saver(kind), LossCheck(kind), InputCopies(kind)
        self.replica: Replica | None = None
        self._model, self._loss_fn, self._replan, self._rules = model, loss_fn, replan, rules
        self.groups: dict[str, AxisGroup] = groups_of(plan, self.rank, device) if plan.mesh.world_size > 1 else {}
        amend(self.groups, plan.amendments)
        axes = {group.name: told_of(axis, group, plan.mesh.world_size) for axis, group in self.groups.items()}
        self.recorder: SpanRecorder | None = SpanRecorder(axes, kind.memory_now, kind.timeline())
        # lowering may fail, so it precedes all changes of the caller's model
        self._compiler, self._codecs = Compiler(device) if compile else None, CodecMemory(device)
        lowered = Step(captured, plan, self.groups, self.rank, device, self._compiler, self._codecs, kind)
        self.graph = captured.graph
        names = self.names_of_weights(model, weights, strict=True) if weights is not None else {}
        if shared is not None:
            self.parameters: LocalParameters = SharedParameters(shared, model, captured.graph, plan, self.groups)
        else:
            self.parameters = LocalParameters(model, captured.graph, plan, self.groups, device, seed, names)
        fused = compile or kind.is_late  # on accelerators: no temporaries of all parameters, and updates can be skipped
        self._optimizer = make_optimizer(optimizer, self.parameters, fused=fused) if optimizer is not None else None
        self.losses.skip_updates_of(self._optimizer)
        check_momentum(plan, self._optimizer, max_grad_norm)
        self._offloader = Offloader(kind) if plan.offload == "optimizer" else None
        self.parameters.take_over()
        self._names_trained = self.parameters.follow()
        precision = captured.graph.precision
        adapts = self.losses.refused is not None and not self._codecs.has_state
        self.loss_scale = LossScale(precision, device, kind if adapts else None) if precision in LOW else None
        self._callers, self._leaves = CallersTensors(self.parameters), captured.leaves
        self._split = BatchSplit(self._leaves, lowered.input_placements, self.groups)
        key = self._key(self._leaves, local=False, training=True)
        self._lowered: list[tuple[Hashable, Guard, Step]] = [(key, Guard(model, True, captured.reads), lowered)]
        self._compared: set[Hashable] = set()
        self._num_changes, self._last, self._opaque = 0, lowered, captured.opaque
        if weights is not None:
            self.load_weights(weights)
        for place, change in captured.moved.items() if self.rank == 0 else ():
            log.warning("%s: the model changes it itself (%s); training does not run the model's Python code, so it "
                        "keeps its value", place, change)  # fmt: skip

    # --- what a user calls ---------------------------------------------------------------------------------------

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index, count): with ``step(batch, local=True)``, this rank takes part ``index`` of ``count`` parts of the
        global batch (the batch of all replicas). If stages have different submeshes, every rank takes its replica's
        whole batch."""
        index, count = self.own_shard
        number = self.replica.number if self.replica is not None else 0
        return number * count + index, count * (self.plan.layout.replicas if self.replica is not None else 1)

    @property
    def own_shard(self) -> tuple[int, int]:
        """The same for ``evaluate(batch, local=True)``: parts are counted within this replica."""
        index, count = 0, 1
        for group in (self.groups[axis] for axis in DATA_AXES if axis in self.groups and not self.plan.uneven):
            index, count = index * group.size + group.index, count * group.size
        return index, count

    @property
    def input_parts(self) -> dict[str, tuple[slice, ...]]:
        """Maps the name of a tensor in the batch to the slices of the global tensor that this rank needs. If images are
        split over ranks, ``step(batch, local=True)`` also accepts only this rank's rows:
        ``image[trainer.input_parts["image"]]``."""
        return self._split.slices

    @property
    def executor(self) -> Executor:
        """The executor of the last step. Before the first step, the executor of training."""
        return self._last.executor

    @property
    def num_kernels(self) -> int:
        """The number of compiled kernels; 0 without ``compile``."""
        return self._compiler.num_kernels if self._compiler is not None else 0

    def step(self, batch: Any, *, local: bool = False) -> Tensor:
        """Make one training step on the global batch. With ``local``, ``batch`` is only this rank's part of it.

        Returns:
            The loss of the global batch, a scalar tensor. The host does not wait for its value.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite. On a CPU, and in bfloat16, the parameters are as before the
                step. On CUDA, the next step, evaluation or save raises it (``LossCheck``), and says what the parameters
                are. In float16, the step is skipped instead.
            LossScaleError: no loss scale helps (``LossScale.note``). Skipped steps have not changed the parameters.
            DataError, LayoutError: the batch is not like the captured one, or does not divide.
            RankError: two ranks were given batches of different shapes, or of different values for equal parts.
            OptimizerError: the trainer was made without an optimizer.
        """
        optimizer = self.optimizer
        with self._recorded():
            if self.replica is not None:
                batch = batch if local else self.replica.world.part(batch)
                self.replica.begin()
            result = self._run(batch, local, training=True)
            loss = result.scalars["loss"]
            if not (finite := self._is_finite(result)) and self.replica is None:
                self.step_number += 1
                return loss
            if finite:
                self._finish(result)
            parameters = self.parameters.trainable
            for name, parameter in parameters.items():
                parameter.grad = result.gradients.get(name) if finite else None
            del result
            if self.max_grad_norm is not None and finite:
                begun = time.perf_counter()
                self.metrics["grad_norm"] = clip(self.parameters, self.max_grad_norm)
                self._note("clip", begun)
            if self.replica is None:
                self._update(optimizer, parameters)
            else:  # other replicas continue although gradients are not finite here; this replica's gradients count as 0
                for _ in self.replica.updates(finite):
                    self._update(optimizer, parameters)
                self.replica.end()
        self._updated()
        return loss

    def evaluate(self, batch: Any, *, local: bool = False) -> Tensor:
        """Return the loss of a batch in evaluation mode: no gradients, no dropout, unchanged buffers. Each replica
        evaluates the whole batch with its own parameters."""
        self._settle()
        with self._recorded():
            self.metrics = self._run(batch, local, training=False).scalars
        return self.metrics["loss"]

    def trace(self, *, all_ranks: bool = False) -> Trace:
        """Return the spans of this rank's last step or evaluation, with their times (``time.perf_counter``).

        Every span belongs to a stream. The stream ``compute`` holds the preparation of data, the phases or actions of
        the schedule, gradient clipping and the optimizer. The stream ``communication`` holds collectives and sends. The
        stream ``wait`` holds the times during which computing waits for communication, ``data`` the wait for a batch.
        Memory is sampled between spans. On CUDA, times are those of the device's streams, and the stream ``copy`` holds
        copies between host and device, which may begin before the step. ``ir.summary.summarize`` adds them up.
        With ``all_ranks``, every rank must call this method. Rank 0 compares all clocks with its own and returns the
        spans of all ranks on its own clock. Other ranks return their own spans.
        """
        trace = msgspec.structs.replace((self.recorder or SpanRecorder()).trace(self.rank), plan=self._ran.digest)
        return on_rank_0(trace, self.device) if all_ranks else trace

    # --- inside --------------------------------------------------------------------------------------------------

    def _key(self, leaves: Leaves, local: bool, training: bool) -> Hashable:
        """Return the key of a captured step: its trained parameters, and its batch's structure, shapes, dtypes and
        constants. Tensors that are split over the ranks (``local``) count with their global shape."""
        size, parts = leaves.size, self.own_shard[1] if local else 1
        shapes = tuple(
            (self._split.whole_shape(name, value, parts) if local and value.dim() and len(value) == size
             else tuple(value.shape), kind_of(value))
            for name, value in leaves.tensors.items()
        )  # fmt: skip
        others = tuple(repr(leaf) for leaf in leaves.others.values())
        return (self._trained() if training else None, leaves.spec, shapes, others)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        self._ran = self.plan
        if self.recorder is not None:
            self.recorder.clear()
            self.recorder.sample()
        with recording(self.recorder), explained(self):
            yield

    def _note(self, what: str, begun: float) -> None:
        """Record a compute span from ``begun`` until now, and the memory that is held now."""
        if self.recorder is not None:
            self.recorder.span(COMPUTE, what, begun, time.perf_counter())
            self.recorder.sample()

    def _run(self, batch: Any, local: bool, training: bool) -> StepResult:
        begun = time.perf_counter()
        self._callers.check()
        leaves = take_apart(batch)
        key = self._key(leaves, local, training)
        if key not in self._compared and self.groups:
            compare_over_ranks(leaves, self._split.index(leaves, self.own_shard[0]) if local else 0)
        self._compared.add(key)
        step = self._last = self._step_for(key, leaves, training)
        inputs = {}
        for name, value in leaves.tensors.items():
            placements = step.input_placements.get(name, {})
            if local and not self.plan.uneven:
                rest = {axis: placement for axis, placement in placements.items() if axis not in DATA_AXES}
                placements = {} if self._split.is_cut(name, value) else rest
            inputs[name] = self._input_copies(local_part(value.detach(), placements, self.groups))
        if training and self.loss_scale is not None:
            inputs |= self.loss_scale.inputs
        self._note("data", begun)
        # each replica, and each loss of a step, draws different dropout masks
        numbers = (self._num_losses,) if self._num_losses else ()
        own = numbers if self.replica is None else (self.replica.number,)
        return step.run(
            self.parameters.values(), self.parameters.named_buffers, inputs,
            lambda microbatch: key_of(microbatch, self.seed, self.step_number, *own),
        )  # fmt: skip

    def _trained(self) -> tuple[str, ...]:
        """Return the names of the parameters that are not frozen now. Raise an OptimizerError if the optimizer lacks
        one of these parameters because the parameter was frozen when the optimizer was made."""
        names = self.parameters.follow()
        if self._names_trained != names:
            known = {id(value) for group in self.optimizer.param_groups for value in group["params"]}
            for name, value in self.parameters.trainable.items():
                if id(value) not in known:
                    raise OptimizerError(
                        "it needs a gradient now, but was frozen when the optimizer was made",
                        where=f"parameter {name}",
                        remedy="freeze it after parallelize, or add it with trainer.optimizer.add_param_group",
                    )
            self._names_trained = names
        return names

    def _step_for(self, key: Any, leaves: Leaves, training: bool) -> Step:
        """Return the step that was captured for ``key``. If there is none, or values that it captured have changed,
        capture a new step."""
        changed = ""
        for index, (known, guard, step) in enumerate(self._lowered):
            if known == key:
                now = guard.changed(training)
                if not now:
                    self._lowered.insert(0, self._lowered.pop(index))
                    return step
                changed = changed or now
        return self._capture_again(key, leaves, training, changed)

    def _capture_again(self, key: Any, leaves: Leaves, training: bool, changed: str) -> Step:
        """Capture the step for another batch shape, an evaluation or other frozen parameters, or because of a
        change."""
        if training:
            check_alike(leaves, self._leaves)
        self._callers.check_members()
        check_same_change(changed)
        shapes = [shape for shape, _ in key[2]]
        shaped = [
            torch.empty(shape, dtype=value.dtype, device="meta")
            for shape, value in zip(shapes, leaves.tensors.values(), strict=True)
        ]
        if changed:
            log.info("capturing the step again: %s", changed)
            self._num_changes += 1
            if self._num_changes == SHAPES_KEPT and self.rank == 0:
                log.warning("the step was captured %d times, now because of %s; pass numbers that change from step to "
                            "step in the batch", 1 + SHAPES_KEPT, changed)  # fmt: skip
        elif training:
            log.info("capturing the step again for batch shapes %s", shapes)
        captured = capture(
            self._model, self._loss_fn, leaves.with_tensors(shaped), training=training, rules=self._rules,
            precision=self.graph.precision, known=self._opaque,
        )  # fmt: skip
        plan = self._replan(self.plan, captured.graph)
        step = Step(captured, plan, self.groups, self.rank, self.device, self._compiler, self._codecs, self._kind)
        self._lowered.insert(0, (key, Guard(self._model, training, captured.reads), step))
        del self._lowered[SHAPES_KEPT:]
        self._compared &= {key for key, _, _ in self._lowered}
        return step

    def _is_finite(self, result: StepResult) -> bool:
        """In a low precision, unscale gradients. Return False (skip the step) if any rank's gradients or loss are not
        finite."""
        if self.loss_scale is None:
            return True
        begun, loss, step = time.perf_counter(), result.scalars["loss"], self.step_number + 1
        gradients = [value for value in result.gradients.values() if value is not None]
        if self.loss_scale.on_device:  # it skips the update itself
            result.scalars |= self.loss_scale.adapt(gradients, self.groups, loss, step, tells=self.rank == 0)
            return True
        if not self.loss_scale.dynamic:
            refuse_unless_finite(loss, step, UNCHANGED)
        finite, before = self.loss_scale.unscale(gradients, self.groups, loss), self.loss_scale.value
        self.loss_scale.note(finite, step, tells=self.rank == 0)
        if finite:
            self._codecs.accept()
        self._codecs.rescale(self.loss_scale.value / before)
        result.scalars["skipped"] = torch.tensor(0 if finite else 1)
        if self.loss_scale.dynamic:
            result.scalars["loss_scale"] = torch.tensor(self.loss_scale.value)
        self._note("unscale", begun)
        if not finite:
            self.metrics = result.scalars
        return finite

    def _finish(self, result: StepResult) -> None:
        if self.loss_scale is None or not self.loss_scale.dynamic:
            self.losses.check(result.scalars["loss"], self.step_number + 1)
        self.losses.decide(result.scalars.get("skipped"))
        if self.loss_scale is None:
            self._codecs.accept()
        self.metrics = result.scalars
        for name, value in result.buffers.items():
            buffer = self.parameters.named_buffers[name]
            if value is not buffer:
                buffer.copy_(self.losses.kept(buffer, value))
