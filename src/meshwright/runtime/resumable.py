"""The checkpoints of a trainer: saved as a whole or not at all, checked before a load, and loaded under any layout."""

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from meshwright import __version__
from meshwright.comm.groups import amend, from_rank_0
from meshwright.consistency.packing import from_bytes
from meshwright.errors import CheckpointError, DiskError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.amendment import Amendment, amended, base_of
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.plan import Plan
from meshwright.runtime import checkpoint, chunk_files, codec_memory, manifest, optimizer_state
from meshwright.runtime.agree import convert_errors, everywhere, same_path
from meshwright.runtime.checkpoint import Extra, Stateful
from meshwright.runtime.codec_memory import CodecMemory
from meshwright.runtime.interchange import Interchange, Path_
from meshwright.runtime.manifest import TRAINER, DamagedCheckpointError, Manifest
from meshwright.runtime.object_path import AnyPath, place_of
from meshwright.runtime.saving import Save
from meshwright.runtime.shards import StoredPart
from meshwright.runtime.share import Share
from meshwright.runtime.share_copy import to_host

log = logging.getLogger("meshwright")


class Resumable(Interchange):
    """The part of a trainer that saves and loads checkpoints. All ranks must call each method, with a shared
    directory."""

    plan: Plan
    groups: dict[str, AxisGroup]
    step_number: int
    seed: int
    metrics: dict[str, Tensor]
    smaller: Callable[[int], str] | None = None  # names the smallest change that needs so many bytes less
    _optimizer: torch.optim.Optimizer | None
    _codecs: CodecMemory

    def save(
        self, path: Path_, *, loader: Stateful | None = None, extra: Extra | None = None, blocking: bool = True
    ) -> None:
        """Write a checkpoint: model, optimizer, step, seed, the loader's position, and ``extra`` (such as
        ``{"scheduler": scheduler}``). An older checkpoint at ``path`` stays until the new one is complete.

        ``path`` is a directory, or lies in an object store that fsspec reaches (``"s3://bucket/run"``).

        With ``blocking=False`` the data are copied beside the next step, whose update waits for the copies, and then
        written while training continues. Nothing but steps may change parameters before ``wait_for_save``. The next
        save, a load and ``wait_for_save`` first wait until the data are written. If such a save fails, a warning is
        logged at once, and ``wait_for_save`` raises the error.

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
    ) -> AnyPath:
        """Save a checkpoint as ``directory/step-00000120`` (for step 120), and return this path. When it is complete,
        all earlier checkpoints but the latest ``keep`` - 1 are removed. Raise a CheckpointError if ``keep`` is below
        1."""
        if keep < 1:
            raise CheckpointError(f"keep is {keep}", where=f"{directory}", remedy="keep at least 1 checkpoint")
        path = place_of(directory) / manifest.step_name(self.step_number)
        self._save(path, loader, extra or {}, blocking=blocking, keep=keep)
        return path

    def _save(self, path: Path_, loader: Stateful | None, extra: Extra, *, blocking: bool, keep: int) -> None:
        self._settle()
        error = self.saver.wait()
        if error is not None and not isinstance(error, DiskError):
            raise error
        place, parts, failed = place_of(path), dict[str, StoredPart](), None
        state: dict[str, Any] = {"loader": None, "extra": {}}
        try:
            parts, state = convert_errors(f"{place}", lambda: self.contents(loader, extra))
        except MeshwrightError as problem:
            failed = problem
        codecs = {name for name in parts if name.startswith("codec.")}  # copies already
        buffers = {f"model.{name}" for name in self.parameters.named_buffers}
        share = Share(
            parts,
            finite={f"model.{name}" for name in self.parameters.trainable},
            now=None if self.replica is not None else buffers | codecs,
        )
        state = to_host(state, self.saver.kind, self.saver.copies)
        data, earlier = self.saver.new_data()
        save = Save(
            place, data, partial(self._described, self.step_number), share, lambda: state,
            position=repr(state["loader"]), join=self._joined if {"pp"} & {*self.groups} or self.replica else None,
            keep=keep, board=self.saver.board, earlier=earlier, failed=failed,
            before=self.saver.before,
        )  # fmt: skip
        self.saver.start(save, blocking=blocking)

    def _described(self, step: int) -> Manifest:
        """The manifest of a save at ``step``, without its files."""
        return Manifest(
            step=step,
            model=self.graph.model,
            fingerprint=self.graph.fingerprint,
            optimizer=optimizer_state.kind_of(self._optimizer) if self._optimizer is not None else None,
            torch=str(torch.__version__),
            meshwright=__version__,
            data="",
            files={},
            tensors=checkpoint.saved_tensors(self.parameters),
            plan=self.plan_as_data(),
        )

    def _joined(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Join the states of all ranks. Ranks of a pipeline hold different parameters, and each rank of a replica has
        state of its own."""
        result = dict(states[0])
        if "pp" in self.groups and result["optimizer"] is not None:
            result["optimizer"] = optimizer_state.joined([state["optimizer"] for state in states])
        if "pp" in self.groups:
            result["codecs"] = codec_memory.joined(state["codecs"] for state in states)
        if self.replica is not None:
            result["replica"] = [state["replica"] for state in states]
        return result

    def contents(self, loader: Stateful | None, extra: Extra) -> tuple[dict[str, StoredPart], dict[str, Any]]:
        """Return this rank's tensors by their names in the checkpoint, and the contents of ``trainer.pt``. The next
        update of the parameters changes what belongs to them (tensors, and the optimizer's step counts), and nothing
        else."""
        self._settle()
        parts, kept = checkpoint.model_parts(self.parameters), None
        if self._optimizer is not None:
            kept, more = optimizer_state.extract(self.parameters, self._optimizer)
            parts.update(more)
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        self._codecs.rescale(1 / scale)  # the run may continue in another precision, or with another scale
        codecs, more = self._codecs.extract(self.parameters)
        self._codecs.rescale(scale)
        parts.update(more)
        state = {
            "codecs": codecs,
            "step": self.step_number,
            "seed": self.seed,
            "optimizer": kept,
            "loader": checkpoint.copied(loader.state_dict()) if loader is not None else None,
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale is not None else None,
            "extra": {name: checkpoint.copied(stateful.state_dict()) for name, stateful in extra.items()},
        }
        if self.replica is not None:
            state["replica"] = checkpoint.copied(self.replica.state())
        return parts, state

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
        saved_manifest = from_rank_0(lambda: convert_errors(where, lambda: checkpoint.examined(self.parameters, path)))
        directory = path / saved_manifest.data
        rank, num_ranks = self.rank, self.plan.mesh.world_size
        index = everywhere(where, lambda: chunk_files.verified(directory, saved_manifest, rank, num_ranks))
        read = (directory / TRAINER).read_bytes
        state: dict[str, Any] = from_rank_0(lambda: convert_errors(where, lambda: from_bytes(read())))
        everywhere(where, lambda: checkpoint.check_state(where, self.parameters, taker, state, loader, extra))
        self.restore(
            state, lambda parts: everywhere(where, lambda: chunk_files.read_parts(directory, index, parts)),
            saved_manifest.plan, where=where, loader=loader, extra=extra, optimizer=optimizer,
        )  # fmt: skip
        if self.rank == 0:
            log.info("step %d is loaded from %s", self.step_number, where)
            if taker is not None and loader is None and state["loader"] is not None:
                log.warning("%s holds a position in the data that was not asked for (loader=)", where)

    def restore(
        self,
        state: dict[str, Any],
        read: Callable[[dict[str, StoredPart]], None],
        plan: Mapping[str, Any],
        *,
        where: str,
        loader: Stateful | None,
        extra: Extra,
        optimizer: bool = True,
    ) -> None:
        """Continue from a state that fits: ``state`` is the second result of ``contents``, and ``read`` fills this
        rank's parts of tensors with those that were saved. ``plan`` is the plan of then, and ``where`` names the place
        in errors. Every rank must call it."""
        taker = self._optimizer if optimizer else None
        if loader is not None:
            everywhere(where, lambda: loader.load_state_dict(state["loader"]))
        codecs = state.get("codecs", codec_memory.NOTHING_SAVED)
        room = self._codecs.make_room(self.parameters, codecs)
        parts = checkpoint.model_parts(self.parameters) | room.parts
        if taker is None:
            read(parts)
        else:
            states, more = optimizer_state.make_room(self.parameters, taker, state["optimizer"])
            read(parts | more)
            optimizer_state.take(self.parameters, taker, state["optimizer"], states)
        self._codecs.take(room, codecs)
        self.losses.forget()
        self.step_number, self.seed, self.metrics = state["step"], state["seed"], {}
        self._take_amendments(plan, where)
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state.get("loss_scale"))
            self._codecs.rescale(self.loss_scale.value)
        self._take_exchanged(state.get("replica"), where)
        everywhere(where, lambda: checkpoint.give_back(extra, state["extra"]))
        self._callers.accept()

    def load_latest(
        self, directory: Path_, *, loader: Stateful | None = None, extra: Extra | None = None
    ) -> AnyPath | None:
        """Load the latest complete checkpoint of ``save_in``. Return its path; None if no save was ever finished.

        If a checkpoint is damaged, a warning names it, and the checkpoint before it is tried.

        Raises:
            CheckpointError: all checkpoints are damaged, or the latest complete checkpoint does not fit (see ``load``).
        """
        directory, where = same_path(directory)
        damaged = []
        names, written = from_rank_0(lambda: convert_errors(where, lambda: _steps_in(directory)))
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

    def _take_amendments(self, plan: Mapping[str, Any], where: str) -> None:
        """Apply the amendments of a saved plan if it equals this plan: they name ranks and algorithms of their own
        plan."""
        saved = msgspec.convert(plan.get("amendments", []), tuple[Amendment, ...])
        if base_of(plan) == base_of(self.plan_as_data()):
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

    def plan_as_data(self) -> dict[str, Any]:
        """Return the plan, as in its file."""
        data: dict[str, Any] = json.loads(files.encode_json(self.plan))
        return data

    def _amend(self, amendments: tuple[Amendment, ...]) -> None:
        """Continue under the plan with these amendments and no others. If several name the same collective, the last
        of them holds."""
        self.plan = msgspec.structs.replace(self.plan, amendments=amended((), amendments))
        amend(self.groups, self.plan.amendments)


def _steps_in(directory: AnyPath) -> tuple[list[str], bool]:
    """Return the names of a directory's checkpoints, the latest first, and whether any of them was ever finished."""
    names = manifest.steps_in(directory)
    return names, any((directory / name / manifest.MANIFEST).exists() for name in names)
