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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from meshwright import __version__
from meshwright.comm.groups import from_every_rank, from_rank_0
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.ir import files
from meshwright.runtime import manifest, optimizer_state, shards
from meshwright.runtime.manifest import DamagedCheckpointError, Manifest, SavedTensor
from meshwright.runtime.shards import Part, part_of

if TYPE_CHECKING:
    from meshwright.runtime.trainer import Trainer

log = logging.getLogger("meshwright")

T = TypeVar("T")
Path_ = str | os.PathLike[str]
TRAINER = "trainer.pt"


class Stateful(Protocol):
    """Anything with a state of plain data: a loader, a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state back."""


Extra = Mapping[str, Stateful]


def save(
    trainer: Trainer, optimizer: Optimizer | None, path: Path_, loader: Stateful | None, extra: Extra | None
) -> None:
    """Write a checkpoint; what was at ``path`` stays until the new one is whole. Every rank must call it.

    Raises:
        CheckpointError: on every rank; what was at ``path`` has not changed.
    """
    path, where = _same_path(path)
    parts, state = _everywhere(where, lambda: _state_of(trainer, optimizer, loader, extra or {}))
    _check_same(where, "the loader's position", repr(state["loader"]))
    data = from_rank_0(lambda: _told(where, lambda: manifest.begin(path)))
    directory = path / data
    try:
        tensors = shards.write(directory, parts)
        names = from_rank_0(lambda: _told(where, lambda: _write_trainer(directory, state, tensors)))
        mine = _everywhere(where, lambda: manifest.written(directory, _share(names)))
        saved = {name: file for some in from_every_rank(mine) for name, file in some.items()}
        made = Manifest(
            step=trainer.step_number,
            model=trainer.graph.model,
            fingerprint=trainer.graph.fingerprint,
            optimizer=type(optimizer).__name__ if optimizer is not None else None,
            torch=str(torch.__version__),
            meshwright=__version__,
            data=data,
            files={name: saved[name] for name in names},
            tensors=_tensors_of(trainer),
            plan=json.loads(files.encode_json(trainer.plan)),
        )
        from_rank_0(lambda: _told(where, lambda: manifest.commit(path, made)))
    except MeshwrightError:  # every rank is here, and none leaves before the remains are gone
        from_rank_0(lambda: manifest.abandon(path, data))
        raise
    except BaseException:  # this rank alone
        if trainer.rank == 0:
            manifest.abandon(path, data)
        raise
    if trainer.rank == 0:
        log.info("step %d is saved in %s", trainer.step_number, where)


def load(
    trainer: Trainer, optimizer: Optimizer | None, path: Path_, loader: Stateful | None, extra: Extra | None
) -> None:
    """Continue where a checkpoint was saved, whatever its layout was. Every rank must call it.

    Raises:
        DamagedCheckpointError: the checkpoint is not whole; nothing has changed.
        CheckpointError: it is missing, newer or of another model or optimizer (nothing has changed), or its tensors
            could not be read after all.
        DataError: the loader's data are others (nothing has changed).
    """
    path, where = _same_path(path)
    extra = extra or {}
    found = from_rank_0(lambda: _told(where, lambda: _examine(trainer, path)))
    directory = path / found.data
    _everywhere(where, lambda: manifest.verify(directory, {name: found.files[name] for name in _share([*found.files])}))
    state = from_rank_0(lambda: _told(where, lambda: _read_trainer(directory)))
    _everywhere(where, lambda: _check_state(where, trainer, optimizer, state, loader, extra))
    if loader is not None:
        _everywhere(where, lambda: loader.load_state_dict(state["loader"]))
    parts = _model_parts(trainer)
    if optimizer is None:
        shards.read(directory, parts)
    else:
        states, more = optimizer_state.make_room(trainer.parameters, optimizer, state["optimizer"])
        shards.read(directory, parts | more)
        optimizer_state.take(trainer.parameters, optimizer, state["optimizer"], states)
    trainer.step_number, trainer.seed, trainer.metrics = state["step"], state["seed"], {}
    _everywhere(where, lambda: _give_back(extra, state["extra"]))
    if trainer.rank == 0:
        log.info("step %d is loaded from %s", trainer.step_number, where)
        if optimizer is not None and loader is None and state["loader"] is not None:
            log.warning("%s holds a position in the data that was not asked for (loader=)", where)


def save_in(
    trainer: Trainer,
    optimizer: Optimizer | None,
    directory: Path_,
    keep: int,
    loader: Stateful | None,
    extra: Extra | None,
) -> Path:
    """``save`` as ``directory/step-00000120``, then remove all but the ``keep`` latest.

    Raises:
        CheckpointError: on every rank; nothing is removed then.
    """
    if keep < 1:
        raise CheckpointError(f"keep is {keep}", where=f"{directory}", remedy="keep at least 1 checkpoint")
    name = manifest.step_name(trainer.step_number)
    path = Path(directory) / name
    save(trainer, optimizer, path, loader, extra)
    where = str(directory)
    later = from_rank_0(lambda: _told(where, lambda: manifest.prune(Path(directory), name, keep)))
    if later and trainer.rank == 0:
        log.warning("%s holds later steps than the one just saved; load_latest takes %s", where, later[0])
    return path


def load_latest(
    trainer: Trainer, optimizer: Optimizer | None, directory: Path_, loader: Stateful | None, extra: Extra | None
) -> Path | None:
    """``load`` the latest checkpoint of ``save_in`` that is whole; None where there is none at all.

    Raises:
        CheckpointError: none is whole, or the latest whole one does not fit (see ``load``).
    """
    directory, where = _same_path(directory)
    damaged = []
    for name in from_rank_0(lambda: _told(where, lambda: manifest.steps_in(directory))):
        try:
            load(trainer, optimizer, directory / name, loader, extra)
        except DamagedCheckpointError as error:
            damaged.append(error)
            if trainer.rank == 0:
                log.warning("%s: %s; the one before it is tried", error.where, error.problem)
        else:
            return directory / name
    if damaged:
        problems = "".join(f"\n  {error.where}: {error.problem}" for error in damaged)
        raise CheckpointError(
            f"none of its {len(damaged)} checkpoints is whole:{problems}",
            where=where,
            remedy="restore one from a copy, or start without",
        )
    return None


# --- what is saved ---------------------------------------------------------------------------------------------------


def _state_of(
    trainer: Trainer, optimizer: Optimizer | None, loader: Stateful | None, extra: Extra
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
        "extra": {name: _plain(f"extra {name!r}", one.state_dict()) for name, one in extra.items()},
    }
    return parts, state


def _model_parts(trainer: Trainer) -> dict[str, Part]:
    """Parameters and the buffers that the model's own state dict has."""
    persistent = trainer.parameters.model.state_dict().keys()
    names = [*trainer.parameters, *(name for name in trainer.parameters.named_buffers if name in persistent)]
    return {f"model.{name}": part_of(trainer.parameters, name, trainer.parameters[name]) for name in names}


def _tensors_of(trainer: Trainer) -> dict[str, SavedTensor]:
    return {
        name.removeprefix("model."): SavedTensor(shape=part.shape, dtype=str(part.value.dtype).removeprefix("torch."))
        for name, part in _model_parts(trainer).items()
    }


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


def _write_trainer(directory: Path, state: dict[str, Any], tensors: set[str]) -> list[str]:
    """Write what is not in the tensors' files, and return the names of all files."""
    files.write_atomically(directory / TRAINER, _packed(state))
    names = sorted(one.name for one in directory.iterdir())
    if missing := sorted(tensors.difference(names)):
        raise CheckpointError(
            f"rank 0 does not see what another rank wrote ({missing[0]})",
            where=f"{directory}",
            remedy="save to a directory that all ranks share",
        )
    return names


# --- what is loaded --------------------------------------------------------------------------------------------------


def _read_trainer(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = _unpacked((directory / TRAINER).read_bytes())
    return state


def _examine(trainer: Trainer, path: Path) -> Manifest:
    """The manifest of a checkpoint of this trainer's model."""
    found = manifest.read(path)
    here = _tensors_of(trainer)
    for name in [*here, *(name for name in found.tensors if name not in here)]:
        mine, saved = here.get(name), found.tensors.get(name)
        if mine != saved:
            raise CheckpointError(
                f"the checkpoint is of another model: {name} is {saved or 'not there'}, in this model "
                f"{mine or 'not there'}",
                where=f"{path}",
                remedy=f"build the model that was saved ({found.model}, step {found.step}), or load another checkpoint",
            )
    if found.fingerprint != trainer.graph.fingerprint:
        log.info("%s was saved by another training step with the same parameters", path)
    return found


def _check_state(
    where: str,
    trainer: Trainer,
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
        _told(f"extra {name!r}", lambda one=one, state=states[name]: one.load_state_dict(state))  # type: ignore[misc]


# --- together --------------------------------------------------------------------------------------------------------


def _share(names: list[str]) -> list[str]:
    """This rank's share of the files."""
    return names[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else names


def _same_path(path: Path_) -> tuple[Path, str]:
    where = os.fspath(path)
    _check_same("checkpoint", "the path", where)
    return Path(path), where


def _check_same(where: str, what: str, mine: str) -> None:
    every = from_every_rank(mine)
    for rank, other in enumerate(every):
        if other != every[0]:
            raise CheckpointError(
                f"{what} is {other} on rank {rank}, {every[0]} on rank 0",
                where=where,
                remedy="call save and load with the same on every rank",
            )


def _everywhere(where: str, action: Callable[[], T]) -> T:
    """Do it on every rank; if it fails on one, every rank raises the first one's error."""
    result, mine = None, None
    try:
        result = _told(where, action)
    except MeshwrightError as error:
        mine = error
    for first in from_every_rank(mine):
        if first is not None:
            raise first
    return result  # type: ignore[return-value]


def _told(where: str, action: Callable[[], T]) -> T:
    """Do it, and raise every error as one that can be sent to other ranks."""
    try:
        return action()
    except MeshwrightError:
        raise
    except OSError as error:
        problem, place = error.strerror or f"{error}", str(error.filename or where)
        raise CheckpointError(problem, where=place, remedy="check the disk's space and permissions") from error
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}", where=where) from error
