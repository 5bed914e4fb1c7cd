"""Checkpoints of a trainer: saved at one moment or not at all, checked before they are loaded, under any layout.

Tensors (parameters, buffers, and optimizer state of a parameter's shape) go through torch.distributed.checkpoint as
chunks of whole tensors, by name (``runtime/shards.py``). What is small and the same on every rank (step, seed,
hyperparameters, positions) is in ``trainer.pt``, as plain data. ``runtime/manifest.py`` says how it lies on the disk.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import torch
from torch.optim import Optimizer

from meshwright import __version__
from meshwright.comm.groups import from_every_rank, from_rank_0
from meshwright.errors import CheckpointError, DiskError
from meshwright.ir import files
from meshwright.ir.amendment import Amendment, base_of
from meshwright.runtime import manifest, optimizer_state, saving, shards
from meshwright.runtime.agree import check_same, everywhere, same_path, share_of, told
from meshwright.runtime.manifest import DamagedCheckpointError, Manifest, SavedTensor
from meshwright.runtime.saving import TRAINER, Save
from meshwright.runtime.shards import Part, Share, part_of

if TYPE_CHECKING:
    from meshwright.runtime.resumable import Resumable

log = logging.getLogger("meshwright")

T = TypeVar("T")
Path_ = str | os.PathLike[str]
OTHER_BYTES = 16 * 2**10
"""About what a checkpoint takes on the disk besides tensors and state."""


class Stateful(Protocol):
    """Anything with a state of plain data: a loader, a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state back."""


Extra = Mapping[str, Stateful]


def save(
    trainer: Resumable,
    optimizer: Optimizer | None,
    path: Path_,
    loader: Stateful | None,
    extra: Extra | None,
    *,
    blocking: bool,
    keep: int = 0,
) -> None:
    """Write a checkpoint; what was at ``path`` stays until the new one is whole. Every rank must call it.

    Without ``blocking`` what is saved is copied, and written beside the steps that follow. ``keep`` is ``save_in``'s.

    Raises:
        CheckpointError: on every rank; what was at ``path`` has not changed. Without ``blocking`` this may be of the
            save before; what the disk refuses is then not raised but told in a warning, and by ``Saver.wait``.
    """
    error = trainer.saver.wait()
    path, where = same_path(path)
    if error is not None and not isinstance(error, DiskError):
        raise error
    parts, state = everywhere(where, lambda: _state_of(trainer, optimizer, loader, extra or {}))
    check_same(where, "the loader's position", repr(state["loader"]))
    if "pp" in trainer.groups and state["optimizer"] is not None:
        state["optimizer"] = optimizer_state.joined(from_every_rank(state["optimizer"]))
    packed, mine = _packed(state), Share(parts)
    num_bytes = mine.num_bytes + len(packed) + OTHER_BYTES
    try:
        data = from_rank_0(lambda: told(where, lambda: manifest.begin(path, num_bytes)))
    except DiskError as error:
        if blocking:
            raise
        trainer.saver.fail(error)
        if trainer.rank == 0:
            saving.warn(error)
        return
    made = Manifest(
        step=trainer.step_number,
        model=trainer.graph.model,
        fingerprint=trainer.graph.fingerprint,
        optimizer=type(optimizer).__name__ if optimizer is not None else None,
        torch=str(torch.__version__),
        meshwright=__version__,
        data=data,
        files={},
        tensors=_tensors_of(trainer),
        plan=json.loads(files.encode_json(trainer.plan)),
    )
    trainer.saver.start(
        Save(
            path=path,
            manifest=made,
            share=mine,
            state=packed,
            num_bytes=num_bytes,
            keep=keep,
            rank=trainer.rank,
            num_ranks=trainer.plan.mesh.world_size,
            board=trainer.saver.board(),
        ),
        blocking=blocking,
    )


def load(
    trainer: Resumable, optimizer: Optimizer | None, path: Path_, loader: Stateful | None, extra: Extra | None
) -> None:
    """Continue where a checkpoint was saved, whatever its layout was. Every rank must call it.

    Raises:
        DamagedCheckpointError: the checkpoint is not whole; nothing has changed.
        CheckpointError: it is missing, newer or of another model or optimizer (nothing has changed), or its tensors
            could not be read after all.
        DataError: the loader's data are others (nothing has changed).
    """
    trainer.saver.wait()  # its failure has been told, and what is loaded is another checkpoint
    path, where = same_path(path)
    extra = extra or {}
    found = from_rank_0(lambda: told(where, lambda: _examine(trainer, path)))
    directory = path / found.data
    mine = {name: found.files[name] for name in share_of([*found.files])}
    everywhere(where, lambda: manifest.verify(directory, mine))
    state = from_rank_0(lambda: told(where, lambda: _read_trainer(directory)))
    everywhere(where, lambda: _check_state(where, trainer, optimizer, state, loader, extra))
    if loader is not None:
        everywhere(where, lambda: loader.load_state_dict(state["loader"]))
    parts = _model_parts(trainer)
    if optimizer is None:
        shards.read(directory, parts)
    else:
        states, more = optimizer_state.make_room(trainer.parameters, optimizer, state["optimizer"])
        shards.read(directory, parts | more)
        optimizer_state.take(trainer.parameters, optimizer, state["optimizer"], states)
    trainer.losses.forget()
    trainer.step_number, trainer.seed, trainer.metrics = state["step"], state["seed"], {}
    _take_amendments(trainer, found, where)
    if trainer.loss_scale is not None:
        trainer.loss_scale.load_state_dict(state.get("loss_scale"))
    everywhere(where, lambda: _give_back(extra, state["extra"]))
    if trainer.rank == 0:
        log.info("step %d is loaded from %s", trainer.step_number, where)
        if optimizer is not None and loader is None and state["loader"] is not None:
            log.warning("%s holds a position in the data that was not asked for (loader=)", where)


def save_in(
    trainer: Resumable,
    optimizer: Optimizer | None,
    directory: Path_,
    keep: int,
    loader: Stateful | None,
    extra: Extra | None,
    *,
    blocking: bool,
) -> Path:
    """``save`` as ``directory/step-00000120``; when it is whole, remove all but the ``keep`` latest.

    Raises:
        CheckpointError: on every rank; nothing is removed then.
    """
    if keep < 1:
        raise CheckpointError(f"keep is {keep}", where=f"{directory}", remedy="keep at least 1 checkpoint")
    path = Path(directory) / manifest.step_name(trainer.step_number)
    save(trainer, optimizer, path, loader, extra, blocking=blocking, keep=keep)
    return path


def load_latest(
    trainer: Resumable, optimizer: Optimizer | None, directory: Path_, loader: Stateful | None, extra: Extra | None
) -> Path | None:
    """``load`` the latest checkpoint of ``save_in`` that is whole; None where none was ever written to its end.

    Raises:
        CheckpointError: none is whole, or the latest whole one does not fit (see ``load``).
    """
    directory, where = same_path(directory)
    damaged = []
    names, written = from_rank_0(lambda: told(where, lambda: _steps_in(directory)))
    for name in names:
        try:
            load(trainer, optimizer, directory / name, loader, extra)
        except DamagedCheckpointError as error:
            damaged.append(error)
            if trainer.rank == 0:
                log.warning("%s: %s; the one before it is tried", error.where, error.problem)
        else:
            return directory / name
    if written:  # others were never finished: the run was stopped in its first save
        problems = "".join(f"\n  {error.where}: {error.problem}" for error in damaged)
        raise CheckpointError(
            f"none of its {len(damaged)} checkpoints is whole:{problems}",
            where=where,
            remedy="restore one from a copy, or start without",
        )
    return None


def _steps_in(directory: Path) -> tuple[list[str], bool]:
    """The names of checkpoints, the latest first, and whether one of them was ever written to its end."""
    names = manifest.steps_in(directory)
    return names, any((directory / name / manifest.MANIFEST).exists() for name in names)


# --- what is saved ---------------------------------------------------------------------------------------------------


def _state_of(
    trainer: Resumable, optimizer: Optimizer | None, loader: Stateful | None, extra: Extra
) -> tuple[dict[str, Part], dict[str, Any]]:
    """This rank's tensors by their names in the checkpoint, and the rest."""
    for name, parameter in trainer.parameters.trainable.items():
        if not torch.isfinite(parameter.detach()).all():
            raise CheckpointError(
                "it holds NaN or infinite values, and is not saved",
                where=f"parameter {name}",
                remedy="load the last checkpoint, and lower the learning rate or clip gradients (max_grad_norm)",
            )
    parts, kept = _model_parts(trainer), None
    if optimizer is not None:
        kept, more = optimizer_state.extract(trainer.parameters, optimizer)
        parts.update(more)
    state = {
        "step": trainer.step_number,
        "seed": trainer.seed,
        "optimizer": _plain("the optimizer", kept),
        "loader": _plain("the loader", loader.state_dict()) if loader is not None else None,
        "loss_scale": trainer.loss_scale.state_dict() if trainer.loss_scale is not None else None,
        "extra": {name: _plain(f"extra {name!r}", one.state_dict()) for name, one in extra.items()},
    }
    return parts, state


def _model_parts(trainer: Resumable) -> dict[str, Part]:
    """Parameters and the buffers that the model's own state dict has."""
    persistent = trainer.parameters.model.state_dict().keys()
    names = [*trainer.parameters, *(name for name in trainer.parameters.named_buffers if name in persistent)]
    return {f"model.{name}": part_of(trainer.parameters, name, trainer.parameters[name]) for name in names}


def _tensors_of(trainer: Resumable) -> dict[str, SavedTensor]:
    """All that a checkpoint of this model holds, on whatever rank it is."""
    graph, persistent = trainer.graph, trainer.parameters.model.state_dict().keys()
    names = [*graph.parameters, *(name for name in graph.buffers if name in persistent)]
    return {name: SavedTensor(shape=graph.tensors[name].shape, dtype=graph.tensors[name].dtype) for name in names}


def _plain(what: str, value: T) -> T:
    """The value, if it can be read back without running code that a file holds."""
    try:
        _unpacked(_packed(value))
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"its state is not plain data ({str(error).splitlines()[0]})",
            where=what,
            remedy="let state_dict() return numbers, strings, tensors, lists and dicts",
        ) from error
    return value


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


# --- what is loaded --------------------------------------------------------------------------------------------------


def _read_trainer(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = _unpacked((directory / TRAINER).read_bytes())
    return state


def _examine(trainer: Resumable, path: Path) -> Manifest:
    """The manifest of a checkpoint of this trainer's model."""
    found = manifest.read(path)
    here = _tensors_of(trainer)
    for name in [*here, *(name for name in found.tensors if name not in here)]:
        mine, saved = here.get(name), found.tensors.get(name)
        if mine is not None and saved is not None and mine.shape == saved.shape and mine.dtype != saved.dtype:
            raise CheckpointError(
                f"the checkpoint is in another precision: {name} is {saved.dtype}, in this model {mine.dtype}",
                where=f"{path}",
                remedy=f"build the model in {saved.dtype} (model.to(torch.{saved.dtype})) and load it there; its "
                "full_state_dict() then loads into a model of any dtype",
            )
        if mine != saved:
            raise CheckpointError(
                f"the checkpoint is of another model: {name} is {saved or 'not there'}, in this model "
                f"{mine or 'not there'}",
                where=f"{path}",
                remedy=f"build the model that was saved ({found.model}, step {found.step}), or load another checkpoint",
            )
    before, now = found.plan.get("precision"), trainer.graph.precision
    if before != now:
        log.info("%s was trained in %s, and goes on in %s: parameters and optimizer state are the same", path,
                 *(one or "the model's own dtypes" for one in (before, now)))  # fmt: skip
    elif found.fingerprint != trainer.graph.fingerprint:
        log.info("%s was saved by another training step with the same parameters", path)
    return found


def _take_amendments(trainer: Resumable, found: Manifest, where: str) -> None:
    """Those of the saved plan, where it is this one: they are of its ranks and its algorithms."""
    saved = msgspec.convert(found.plan.get("amendments", []), tuple[Amendment, ...])
    if base_of(found.plan) == base_of(json.loads(files.encode_json(trainer.plan))):
        trainer._amend(saved)
    elif saved and trainer.rank == 0:
        log.info("%s: its plan is another, whose amendments do not hold here: %s", where, "; ".join(map(str, saved)))


def _check_state(
    where: str,
    trainer: Resumable,
    optimizer: Optimizer | None,
    state: dict[str, Any],
    loader: Stateful | None,
    extra: Extra,
) -> None:
    """That the checkpoint has what is asked for."""
    if optimizer is not None:
        optimizer_state.check(trainer.parameters, optimizer, state["optimizer"], where)
    if loader is not None and state["loader"] is None:
        remedy = "load without loader=: it then starts where it stands"
        raise CheckpointError("there is no position in the data", where=where, remedy=remedy)
    for name in extra:
        if name not in state["extra"]:
            known = ", ".join(state["extra"]) or "nothing"
            raise CheckpointError(f"there is no extra {name!r}", where=where, remedy=f"it has: {known}")


def _give_back(extra: Extra, states: dict[str, Any]) -> None:
    for name, one in extra.items():
        told(f"extra {name!r}", lambda one=one, state=states[name]: one.load_state_dict(state))  # type: ignore[misc]
