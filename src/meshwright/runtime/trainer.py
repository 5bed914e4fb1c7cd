"""The trainer: runs a plan on this rank, step by step, on parameters that the user's optimizer owns."""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import meshwright.comm.backend  # noqa: F401 - gives the collective operators their kernels
from meshwright.capture.builder import Capture, capture
from meshwright.capture.tracer import LossFunction, batch_size_of
from meshwright.comm.groups import axis_groups, sum_over
from meshwright.errors import DataError, NonFiniteLossError, OptimizerError
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.placement import Shard
from meshwright.ir.plan import Plan
from meshwright.lower.reshard import local_part
from meshwright.lower.spmd import Lowered, lower
from meshwright.ops.base import OperatorRule, Target
from meshwright.runtime import checkpoint
from meshwright.runtime.checkpoint import Stateful
from meshwright.runtime.rng import step_key
from meshwright.runtime.saving import Saver
from meshwright.runtime.state import LocalParameters, full_state_dict

log = logging.getLogger("meshwright")

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Replan = Callable[[Plan, Graph], Plan]
SHAPES_KEPT = 8
NEEDS_WHOLE_TENSORS = ("Adafactor", "Muon", "LBFGS", "SparseAdam", "Shampoo", "SOAP")


class Trainer:
    """Trains a model by a plan. Made by :func:`meshwright.parallelize`; every rank makes one.

    Attributes:
        plan: the plan that runs.
        step_number: steps done.
        metrics: ``loss``, ``grad_norm`` (where clipping is on) and the loss function's own, of the last step or
            evaluation, as scalar tensors.
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
    ) -> None:
        self.plan = plan
        self.step_number = 0
        self.metrics: dict[str, Tensor] = {}
        self.max_grad_norm = max_grad_norm
        self.seed = seed
        self.device = device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.saver = Saver()
        self._model, self._loss_fn, self._replan, self._rules = model, loss_fn, replan, rules
        self.groups: dict[str, AxisGroup] = (
            axis_groups(plan.mesh, self.rank, plan.algorithms) if plan.mesh.world_size > 1 else {}
        )
        self.parameters = LocalParameters(model, captured.graph, plan, self.groups, device, seed)
        self._optimizer = self._make_optimizer(optimizer)
        self._names_trained = tuple(self.parameters.trainable)
        self._lowered: OrderedDict[Any, tuple[Lowered, Graph]] = OrderedDict()
        traced, tensors = captured.traced, captured.graph.tensors
        shapes = tuple((tensors[name].shape, tensors[name].dtype) for name in captured.graph.inputs)
        others = tuple(repr(leaf) for leaf in traced.constant_leaves.values())
        self._batch_spec = traced.batch_spec
        first = (tuple(traced.differentiable), traced.batch_spec, shapes, others)
        self._lowered[first] = (lower(captured, plan, self.groups, device), captured.graph)
        self.graph = captured.graph

    # --- what a user calls ---------------------------------------------------------------------------------------

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index, count): which of how many parts of the global batch ``step(batch, local=True)`` takes here."""
        group = self.groups.get("dp")
        return (group.index, group.size) if group is not None else (0, 1)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer over this rank's parameters.

        Raises:
            OptimizerError: the trainer was made without one.
        """
        if self._optimizer is None:
            raise OptimizerError(
                "this trainer has no optimizer",
                where="trainer",
                remedy="pass optimizer= to parallelize, or only evaluate",
            )
        return self._optimizer

    def step(self, batch: Any, *, local: bool = False) -> Tensor:
        """One training step on the global batch (or, ``local``, on this rank's part of it).

        Returns:
            The loss of the global batch, a scalar tensor (not waited for).

        Raises:
            NonFiniteLossError: the loss is NaN or infinite; parameters are left as they were before the step.
            DataError: the batch does not have the structure that was captured, or does not divide over dp.
            OptimizerError: the trainer was made without an optimizer.
        """
        optimizer = self.optimizer
        lowered, values = self._prepare(batch, local, training=True)
        result = lowered.function(values)
        loss = self._finish(lowered, result)
        parameters = self.parameters.trainable
        offset = 1 + len(lowered.metrics)
        gradients = result[offset : offset + len(lowered.differentiable)]
        for name, gradient in zip(lowered.differentiable, gradients, strict=True):
            parameters[name].grad = gradient
        del gradients
        del result
        if self.max_grad_norm is not None:
            self.metrics["grad_norm"] = self._clip(self.max_grad_norm)
        optimizer.step()
        for parameter in parameters.values():
            parameter.grad = None
        self.step_number += 1
        return loss

    def evaluate(self, batch: Any, *, local: bool = False) -> Tensor:
        """The loss of a batch in evaluation mode: no gradients, no dropout, buffers as they are."""
        lowered, values = self._prepare(batch, local, training=False)
        result = lowered.function(values)
        self.metrics = dict(zip(["loss", *lowered.metrics], result, strict=False))
        loss: Tensor = result[0]
        return loss

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, Tensor]:
        """Whole tensors under the model's own names, on rank 0 (empty elsewhere unless ``all_ranks``).

        Every rank must call it; it loads into the plain model with ``load_state_dict``.
        """
        return full_state_dict(self.parameters, all_ranks=all_ranks)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        loader: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        blocking: bool = True,
    ) -> None:
        """Write a checkpoint: model, optimizer, step, seed, the loader's position, and ``extra`` (such as
        ``{"scheduler": scheduler}``). Every rank must call it, with a directory that all share; what was there
        before stays until the new checkpoint is whole.

        ``blocking=False`` copies what is saved and writes it while steps go on; the next save, a load and
        ``wait_for_save`` wait for it. What the disk then refuses is a warning, and raised by ``wait_for_save``.

        Raises:
            CheckpointError: on every rank; what was at ``path`` has not changed.
        """
        checkpoint.save(self, self._optimizer, path, loader, extra, blocking=blocking)

    def wait_for_save(self) -> None:
        """Wait for a save with ``blocking=False``. Every rank must call it.

        Raises:
            CheckpointError: on every rank, if the last such save has failed (once); what was there before stays.
        """
        if (error := self.saver.wait()) is not None:
            raise error

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        loader: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        optimizer: bool = True,
    ) -> None:
        """Continue from a checkpoint, saved under this or any other layout and number of ranks; with the same
        layout training goes on bit by bit. ``optimizer=False`` leaves the optimizer as it is. Every rank must call it.

        Raises:
            CheckpointError: on every rank: missing, half-written, damaged, newer, or of another model or optimizer.
            DataError: the loader's data are not those of the saved position.
        """
        checkpoint.load(self, self._optimizer if optimizer else None, path, loader, extra)

    def save_in(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 2,
        loader: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        blocking: bool = True,
    ) -> Path:
        """``save`` as ``directory/step-00000120``, then remove all but the latest ``keep``; returns the path."""
        return checkpoint.save_in(self, self._optimizer, directory, keep, loader, extra, blocking=blocking)

    def load_latest(
        self,
        directory: str | os.PathLike[str],
        *,
        loader: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> Path | None:
        """``load`` the latest whole checkpoint of ``save_in``, and return its path; None where none was ever finished.

        A damaged one is named in a warning, and the one before it is taken.
        """
        return checkpoint.load_latest(self, self._optimizer, directory, loader, extra)

    # --- inside --------------------------------------------------------------------------------------------------

    def _make_optimizer(self, factory: OptimizerFactory | None) -> torch.optim.Optimizer | None:
        if factory is None:
            return None
        optimizer = factory(list(self.parameters.trainable.items()))
        name = type(optimizer).__name__
        sharded = [one for one in self.parameters.trainable if self.parameters.is_sharded(one)]
        if name in NEEDS_WHOLE_TENSORS and (sharded or name == "LBFGS"):
            raise OptimizerError(
                f"{name} needs whole tensors" if name != "LBFGS" else "LBFGS needs to evaluate the step several times",
                where=f"optimizer; {sharded[0]} is split" if sharded else "optimizer",
                remedy="use an element-wise optimizer (SGD, AdamW, ...), or a layout that does not split parameters",
            )
        return optimizer

    def _whole_shape(self, value: Tensor, batch: Any, local: bool) -> tuple[int, ...]:
        """The global shape of a batch tensor of which this rank may have been given its part only."""
        shape = tuple(value.shape)
        if local and shape and shape[0] == batch_size_of(batch):
            return (shape[0] * self.data_shard[1], *shape[1:])
        return shape

    def _prepare(self, batch: Any, local: bool, training: bool) -> tuple[Lowered, list[Any]]:
        leaves, spec = pytree.tree_flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        shapes = tuple((self._whole_shape(value, batch, local), _dtype(value)) for value in tensors)
        others = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        key = (self._trained() if training else None, spec, shapes, others)
        entry = self._lowered.get(key)
        if entry is None:
            entry = self._capture_again(key, batch, leaves, spec, shapes, training)
        else:
            self._lowered.move_to_end(key)
        lowered = entry[0]
        inputs = []
        for name, value in zip(lowered.inputs, tensors, strict=True):
            placements = {} if local else lowered.input_placements[name]
            inputs.append(local_part(value, placements, self.groups).to(self.device, non_blocking=True))
        random_key = step_key(self.seed, self.step_number)
        return lowered, [*self.parameters.values(), *self.parameters.buffers(), *inputs, random_key]

    def _trained(self) -> tuple[str, ...]:
        """The names of the parameters that are not frozen (any more).

        Raises:
            OptimizerError: one was frozen when the optimizer was made, which therefore does not have it.
        """
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

    def _capture_again(
        self, key: Any, batch: Any, leaves: list[Any], spec: Any, shapes: tuple[Any, ...], training: bool
    ) -> tuple[Lowered, Graph]:
        """The same plan for another batch shape, for evaluation, or with other parameters frozen."""
        if training and spec != self._batch_spec:
            raise DataError(
                f"the batch holds {_described(spec)}, the captured one holds {_described(self._batch_spec)}",
                where="batch", remedy="pass batches of one structure",
            )  # fmt: skip
        iterator = iter(shapes)
        shaped = [
            torch.empty(next(iterator)[0], dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        if training:
            log.info("capturing the step again for batch shapes %s", [tuple(shape) for shape, _ in shapes])
        captured = capture(
            self._model, self._loss_fn, pytree.tree_unflatten(shaped, spec), training=training, rules=self._rules
        )
        plan = self._replan(self.plan, captured.graph)
        entry = (lower(captured, plan, self.groups, self.device), captured.graph)
        self._lowered[key] = entry
        while len(self._lowered) > SHAPES_KEPT:
            self._lowered.pop(next(one for one in self._lowered if one != key))
        return entry

    def _finish(self, lowered: Lowered, result: list[Any]) -> Tensor:
        loss: Tensor = result[0]
        if self.device.type == "cpu" and not torch.isfinite(loss):
            self._refuse(float(loss), self.step_number + 1)
        previous = self.metrics.get("loss")
        if self.device.type != "cpu" and previous is not None and not torch.isfinite(previous):
            self._refuse(float(previous), self.step_number)
        self.metrics = dict(zip(["loss", *lowered.metrics], result, strict=False))
        for buffer, value in zip(self.parameters.buffers(), result[len(result) - len(lowered.buffers) :], strict=True):
            if value is not buffer:
                buffer.copy_(value)
        return loss

    def _refuse(self, value: float, step: int) -> None:
        raise NonFiniteLossError(
            f"the loss became {value} at step {step}",
            where=f"step {step}",
            remedy="lower the learning rate, clip gradients (max_grad_norm), or look at this step's batch; "
            "parameters and checkpoints are as they were before the step",
        )

    def _clip(self, max_norm: float) -> Tensor:
        """Clip by the norm over all ranks: split gradients are summed over the axes that split them."""
        whole: list[Tensor] = []
        split: dict[tuple[str, ...], list[Tensor]] = {}
        for name, parameter in self.parameters.trainable.items():
            if parameter.grad is None:
                continue
            axes = tuple(
                axis for axis, placement in self.parameters.placements(name).items() if isinstance(placement, Shard)
            )
            (split.setdefault(axes, []) if axes else whole).append(parameter.grad)
        total = torch.nn.utils.get_total_norm(whole).square() if whole else torch.zeros((), device=self.device)
        for axes, gradients in split.items():
            squares = torch.nn.utils.get_total_norm(gradients).square()
            for axis in axes:
                squares = sum_over(squares, self.groups[axis])
            total = total + squares
        norm = total.sqrt()
        torch.nn.utils.clip_grads_with_norm_(list(self.parameters.trainable.values()), max_norm, norm)
        return norm


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _described(spec: pytree.TreeSpec) -> str:
    """The paths of a batch's leaves."""
    leaves = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return ", ".join(f"batch{pytree.keystr(path)}" for path, _ in pytree.tree_flatten_with_path(leaves)[0])
