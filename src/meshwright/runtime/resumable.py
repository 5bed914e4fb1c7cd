"""What a trainer saves and goes on from: checkpoints, alone or a few of the latest in a directory."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from meshwright.comm.groups import amend
from meshwright.ir.amendment import Amendment, amended
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.plan import Plan
from meshwright.runtime import checkpoint
from meshwright.runtime.checkpoint import Stateful
from meshwright.runtime.guards import CallersTensors
from meshwright.runtime.loss_check import LossCheck
from meshwright.runtime.offload import Offloader
from meshwright.runtime.precision import LossScale
from meshwright.runtime.saving import Saver
from meshwright.runtime.state import LocalParameters, full_state_dict, load_state_dict


class Resumable:
    """The checkpoints of a trainer. Every rank must call each of these."""

    plan: Plan
    graph: Graph
    parameters: LocalParameters
    groups: dict[str, AxisGroup]
    loss_scale: LossScale | None
    step_number: int
    seed: int
    rank: int
    metrics: dict[str, Tensor]
    saver: Saver
    losses: LossCheck
    _optimizer: torch.optim.Optimizer | None
    _offloader: Offloader | None
    _callers: CallersTensors

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
            NonFiniteLossError: the loss of the last step, which a CUDA device had not told yet.
        """
        self._settle()
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
        """Continue from a checkpoint, saved under this or any other layout and number of ranks. With the same plan,
        whose amendments of that time hold again, training goes on bit by bit. ``optimizer=False`` leaves the optimizer
        as it is. Every rank must call it.

        Raises:
            CheckpointError: on every rank: missing, half-written, damaged, newer, or of another model or optimizer.
            DataError: the loader's data are not those of the saved position.
        """
        checkpoint.load(self, self._optimizer if optimizer else None, path, loader, extra)
        self._callers.accept()

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
        self._settle()
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
        path = checkpoint.load_latest(self, self._optimizer, directory, loader, extra)
        if path is not None:
            self._callers.accept()
        return path

    def _amend(self, amendments: tuple[Amendment, ...]) -> None:
        """Go on by the plan with these amendments, of which later ones replace earlier ones, and no others."""
        self.plan = msgspec.structs.replace(self.plan, amendments=amended((), amendments))
        amend(self.groups, self.plan.amendments)

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, Tensor]:
        """Whole tensors on the CPU under the model's own names, on rank 0 (empty elsewhere unless ``all_ranks``).

        Every rank must call it; it loads into the plain model with ``load_state_dict``.
        """
        return full_state_dict(self.parameters, all_ranks=all_ranks)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Train on from the whole tensors of a plain model's state dict, under any layout: the inverse of
        ``full_state_dict``. Every rank must call it; rank 0's tensors count. The optimizer's state stays as it is.

        ``strict=False`` leaves out names that the model does not have, and leaves alone what has no value here.

        Raises:
            CheckpointError: on every rank: a tensor is missing, unknown or of another shape; nothing has changed.
        """
        self._settle()
        load_state_dict(self.parameters, state_dict, strict=strict)
        self._callers.accept()

    def _settle(self) -> None:
        self.losses.settle()
        if self._offloader is not None:
            self._offloader.settle()
