"""The checkpoints of a trainer: saved as a whole or not at all, checked before a load, and loaded under any layout."""

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from meshwright import __version__
from meshwright.comm.groups import amend, from_every_rank, from_rank_0
from meshwright.consistency.packing import from_bytes, to_bytes
from meshwright.errors import CheckpointError, DiskError
from meshwright.ir import files
from meshwright.ir.amendment import Amendment, amended, base_of
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.plan import Plan
from meshwright.runtime import checkpoint, codec_memory, manifest, optimizer_state, shards
from meshwright.runtime.agree import check_same, everywhere, same_path, told
from meshwright.runtime.checkpoint import Extra, Stateful, plain
from meshwright.runtime.codec_memory import CodecMemory
from meshwright.runtime.guards import CallersTensors
from meshwright.runtime.loss_check import LossCheck
from meshwright.runtime.manifest import DamagedCheckpointError, Manifest
from meshwright.runtime.offload import Offloader
from meshwright.runtime.precision import LossScale
from meshwright.runtime.replica import Replica
from meshwright.runtime.saving import TRAINER, Save, Saver
from meshwright.runtime.shards import Share, StoredPart
from meshwright.runtime.state import LocalParameters, full_state_dict, load_state_dict

log = logging.getLogger("meshwright")

OTHER_BYTES = 16 * 2**10
"""Approximate bytes on the disk that a checkpoint takes in addition to its tensors and ``trainer.pt``."""

Path_ = str | os.PathLike[str]


class Resumable:
    """The part of a trainer that saves and loads checkpoints. All ranks must call each method, with a shared
    directory."""

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
    smaller: Callable[[int], str] | None = None  # names the smallest change that needs so many bytes less
    _optimizer: torch.optim.Optimizer | None
    _offloader: Offloader | None
    replica: Replica | None
    _codecs: CodecMemory
    _callers: CallersTensors

    def save(
        self, path: Path_, *, loader: Stateful | None = None, extra: Extra | None = None, blocking: bool = True
    ) -> None:
        """Write a checkpoint: model, optimizer, step, seed, the loader's position, and ``extra`` (such as
        ``{"scheduler": scheduler}``). An older checkpoint at ``path`` stays until the new one is complete.

        With ``blocking=False`` the data are copied, and then written while training continues. The next save, a load
        and ``wait_for_save`` first wait until the data are written. If such a save fails, a warning is logged at once,
        and ``wait_for_save`` raises the error.

        Raises:
            CheckpointError: this save has failed, or an earlier save with ``blocking=False``. All ranks raise it. The
                checkpoint at ``path`` has not changed.
            NonFiniteLossError: the loss of the last step, which is checked late on a CUDA device, is not finite.
        """
        self._save(path, loader, extra or {}, blocking=blocking, keep=0)

    def save_in(
        self,
        directory: Path_,
        *,
        keep: int = 2,
        loader: Stateful | None = None,
        extra: Extra | None = None,
        blocking: bool = True,
    ) -> Path:
        """Save a checkpoint as ``directory/step-00000120`` (for step 120), and return this path. When it is complete,
        all earlier checkpoints but the latest ``keep`` - 1 are removed. Raise a CheckpointError if ``keep`` is below
        1."""
        if keep < 1:
            raise CheckpointError(f"keep is {keep}", where=f"{directory}", remedy="keep at least 1 checkpoint")
        path = Path(directory) / manifest.step_name(self.step_number)
        self._save(path, loader, extra or {}, blocking=blocking, keep=keep)
        return path

    def _save(self, path: Path_, loader: Stateful | None, extra: Extra, *, blocking: bool, keep: int) -> None:
        self._settle()
        error = self.saver.wait()
        path, where = same_path(path)
        if error is not None and not isinstance(error, DiskError):
            raise error
        parts, state = everywhere(where, lambda: self._contents(loader, extra))
        check_same(where, "the loader's position", repr(state["loader"]))
        if "pp" in self.groups and state["optimizer"] is not None:
            state["optimizer"] = optimizer_state.joined(from_every_rank(state["optimizer"]))
        if "pp" in self.groups:
            state["codecs"] = codec_memory.joined(from_every_rank(state["codecs"]))
        if self.replica is not None:
            state["replica"] = from_every_rank(self.replica.state())
        packed, share = to_bytes(state), Share(parts)
        num_bytes = share.num_bytes + len(packed) + OTHER_BYTES
        try:
            data = from_rank_0(lambda: told(where, lambda: manifest.begin(path, num_bytes)))
        except DiskError as error:
            if blocking:
                raise
            self.saver.fail(error, self.rank)
            return
        new_manifest = Manifest(
            step=self.step_number,
            model=self.graph.model,
            fingerprint=self.graph.fingerprint,
            optimizer=type(self._optimizer).__name__ if self._optimizer is not None else None,
            torch=str(torch.__version__),
            meshwright=__version__,
            data=data,
            files={},
            tensors=checkpoint.saved_tensors(self.parameters),
            plan=self._plan_as_data(),
        )
        self.saver.start(
            Save(path, new_manifest, share, packed, num_bytes, keep=keep, board=self.saver.board), blocking=blocking
        )

    def _contents(self, loader: Stateful | None, extra: Extra) -> tuple[dict[str, StoredPart], dict[str, Any]]:
        """Return this rank's tensors by their names in the checkpoint, and the contents of ``trainer.pt``."""
        checkpoint.check_finite(self.parameters)
        parts, kept = checkpoint.model_parts(self.parameters), None
        if self._optimizer is not None:
            kept, more = optimizer_state.extract(self.parameters, self._optimizer)
            parts.update(more)
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        self._codecs.rescale(1 / scale)  # the run may continue in another precision, or with another scale
        codecs, more = self._codecs.extract(self.parameters)
        self._codecs.rescale(scale)
        parts.update(more)
        return parts, {
            "codecs": codecs,
            "step": self.step_number,
            "seed": self.seed,
            "optimizer": plain("the optimizer", kept),
            "loader": plain("the loader", loader.state_dict()) if loader is not None else None,
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale is not None else None,
            "extra": {name: plain(f"extra {name!r}", stateful.state_dict()) for name, stateful in extra.items()},
        }

    def wait_for_save(self) -> None:
        """Wait until a save with ``blocking=False`` is done.

        Raises:
            CheckpointError: that save has failed. All ranks raise the error, only once. The earlier checkpoint stays.
        """
        if (error := self.saver.wait()) is not None:
            raise error

    def load(
        self, path: Path_, *, loader: Stateful | None = None, extra: Extra | None = None, optimizer: bool = True
    ) -> None:
        """Load a checkpoint, and continue from its step. It may have been saved under another layout and number of
        ranks. Under the same plan, training continues with bitwise equal results, and the amendments that the plan had
        at the save hold again. ``optimizer=False`` leaves the optimizer as it is.

        Raises:
            CheckpointError: the checkpoint is missing, incomplete, damaged, from a newer version, or of another model
                or optimizer. Then nothing has changed. Or its tensors could not be read after these checks. All ranks
                raise the error.
            DataError: the saved position belongs to other data than the loader has; nothing has changed.
        """
        self._check_may_load()
        self.saver.wait()  # a failure was already logged, and does not concern the checkpoint that is loaded
        taker, extra = self._optimizer if optimizer else None, extra or {}
        path, where = same_path(path)
        saved_manifest = from_rank_0(lambda: told(where, lambda: checkpoint.examined(self.parameters, path)))
        directory = path / saved_manifest.data
        share = dict([*saved_manifest.files.items()][self.rank :: self.plan.mesh.world_size])
        everywhere(where, lambda: manifest.verify(directory, share))
        read = (directory / TRAINER).read_bytes
        state: dict[str, Any] = from_rank_0(lambda: told(where, lambda: from_bytes(read())))
        everywhere(where, lambda: checkpoint.check_state(where, self.parameters, taker, state, loader, extra))
        if loader is not None:
            everywhere(where, lambda: loader.load_state_dict(state["loader"]))
        codecs = state.get("codecs", codec_memory.NOTHING_SAVED)
        room = self._codecs.make_room(self.parameters, codecs)
        parts = checkpoint.model_parts(self.parameters) | room.parts
        if taker is None:
            shards.read(directory, parts)
        else:
            states, more = optimizer_state.make_room(self.parameters, taker, state["optimizer"])
            shards.read(directory, parts | more)
            optimizer_state.take(self.parameters, taker, state["optimizer"], states)
        self._codecs.take(room, codecs)
        self.losses.forget()
        self.step_number, self.seed, self.metrics = state["step"], state["seed"], {}
        self._take_amendments(saved_manifest, where)
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state.get("loss_scale"))
            self._codecs.rescale(self.loss_scale.value)
        self._take_exchanged(state.get("replica"), where)
        everywhere(where, lambda: checkpoint.give_back(extra, state["extra"]))
        self._callers.accept()
        if self.rank == 0:
            log.info("step %d is loaded from %s", self.step_number, where)
            if taker is not None and loader is None and state["loader"] is not None:
                log.warning("%s holds a position in the data that was not asked for (loader=)", where)

    def load_latest(
        self, directory: Path_, *, loader: Stateful | None = None, extra: Extra | None = None
    ) -> Path | None:
        """Load the latest complete checkpoint of ``save_in``. Return its path; None if no save was ever finished.

        If a checkpoint is damaged, a warning names it, and the checkpoint before it is tried.

        Raises:
            CheckpointError: all checkpoints are damaged, or the latest complete checkpoint does not fit (see ``load``).
        """
        directory, where = same_path(directory)
        damaged = []
        names, written = from_rank_0(lambda: told(where, lambda: _steps_in(directory)))
        for name in names:
            try:
                self.load(directory / name, loader=loader, extra=extra)
            except DamagedCheckpointError as error:
                damaged.append(error)
                if self.rank == 0:
                    log.warning("%s: %s; the one before it is tried", error.where, error.problem)
            else:
                return directory / name
        if written:  # otherwise the run was stopped in its first save
            problems = "".join(f"\n  {error.where}: {error.problem}" for error in damaged)
            raise CheckpointError(
                f"none of its {len(damaged)} checkpoints is whole:{problems}",
                where=where,
                remedy="restore one from a copy, or start without",
            )
        return None

    def _take_amendments(self, saved_manifest: Manifest, where: str) -> None:
        """Apply the amendments of the saved plan if it equals this plan: they name ranks and algorithms of their own
        plan."""
        saved = msgspec.convert(saved_manifest.plan.get("amendments", []), tuple[Amendment, ...])
        if base_of(saved_manifest.plan) == base_of(self._plan_as_data()):
            self._amend(saved)
        elif saved and self.rank == 0:
            told_of = "; ".join(map(str, saved))
            log.info("%s: its plan is another, whose amendments do not hold here: %s", where, told_of)

    def _take_exchanged(self, saved: list[dict[str, Tensor]] | None, where: str) -> None:
        """Restore the state that the consistency rule kept on this rank, if the replica has the same number of ranks as
        at the save."""
        if self.replica is None:
            return
        if saved is not None and len(saved) == self.plan.mesh.world_size:
            self.replica.load_state(saved[self.rank])
        elif self.rank == 0:
            log.warning("%s: the state of %s was saved for another layout, or not at all, and starts again",
                        where, self.plan.consistency)  # fmt: skip

    def _plan_as_data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(files.encode_json(self.plan))
        return data

    def _amend(self, amendments: tuple[Amendment, ...]) -> None:
        """Continue under the plan with these amendments and no others. If several name the same collective, the last
        of them holds."""
        self.plan = msgspec.structs.replace(self.plan, amendments=amended((), amendments))
        amend(self.groups, self.plan.amendments)

    def full_state_dict(self, *, all_ranks: bool = False) -> dict[str, Tensor]:
        """Return whole tensors on the CPU by the model's own names, on rank 0. Other ranks get an empty dict, unless
        ``all_ranks``. The ``load_state_dict`` of the plain model takes this dict."""
        if self.replica is not None:
            self.replica.settle()
        return full_state_dict(self.parameters, all_ranks=all_ranks)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Load the whole tensors of a plain model's state dict, under any layout: the inverse of ``full_state_dict``.
        Only rank 0's tensors are used. The optimizer's state does not change.

        ``strict=False`` ignores names that the model does not have, and leaves tensors without a new value unchanged.

        Raises:
            CheckpointError: a tensor is missing, unknown or of another shape. All ranks raise it, and nothing has
                changed.
        """
        self._check_may_load()
        self._settle()
        load_state_dict(self.parameters, state_dict, strict=strict)
        self._callers.accept()

    def _check_may_load(self) -> None:
        if self.replica is not None:
            self.replica.check_may_load()

    def _settle(self) -> None:
        self.losses.settle()
        if self.loss_scale is not None:
            self.loss_scale.settle()
        if self.replica is not None:
            self.replica.settle()
        if self._offloader is not None:
            self._offloader.settle()


def _steps_in(directory: Path) -> tuple[list[str], bool]:
    """Return the names of a directory's checkpoints, the latest first, and whether any of them was ever finished."""
    names = manifest.steps_in(directory)
    return names, any((directory / name / manifest.MANIFEST).exists() for name in names)
