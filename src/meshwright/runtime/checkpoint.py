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
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright import __version__
from meshwright.comm.groups import from_every_rank, from_rank_0
from meshwright.errors import CheckpointError, MeshwrightError
from meshwright.ir import files
from meshwright.runtime import manifest, shards
from meshwright.runtime.manifest import DamagedCheckpointError, Manifest, SavedTensor
from meshwright.runtime.shards import Part, chunks_of

if TYPE_CHECKING:
    from meshwright.runtime.trainer import Trainer

log = logging.getLogger("meshwright")

T = TypeVar("T")
Path_ = str | os.PathLike[str]
TRAINER = "trainer.pt"
HOW_IT_COMPUTES = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that belong to a run and its device, not to what it has learnt."""


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
        shards.write(directory, parts)
        names = from_rank_0(lambda: _told(where, lambda: _write_trainer(directory, state)))
        mine = _everywhere(where, lambda: manifest.written(directory, _share(names)))
        saved = {name: file for some in from_every_rank(mine) for name, file in some.items()}
        made = Manifest(
            step=trainer.step_number,
            model=trainer.graph.model,
            fingerprint=trainer.graph.fingerprint,
            optimizer=type(optimizer).__name__ if optimizer is not None else None,
            torch=torch.__version__,
            meshwright=__version__,
            data=data,
            files={name: saved[name] for name in names},
            tensors=_tensors_of(trainer),
            plan=json.loads(files.encode_json(trainer.plan)),
        )
        from_rank_0(lambda: _told(where, lambda: manifest.commit(path, made)))
    except BaseException:
        if trainer.rank == 0:
            manifest.abandon(path, data)
        raise
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
    states = _empty_states(trainer, optimizer, state["optimizer"]) if optimizer is not None else {}
    for name, values in states.items():
        for key in state["optimizer"]["states"][name]["tensors"]:
            parts[f"optimizer.{key}.{name}"] = _part(trainer, name, values[key])
    shards.read(directory, parts)
    if optimizer is not None:
        optimizer.state.clear()
        optimizer.state.update({trainer.parameters.trainable[name]: values for name, values in states.items()})
        for group, saved in zip(optimizer.param_groups, state["optimizer"]["groups"], strict=True):
            _set_options(group, saved["options"])
    trainer.step_number, trainer.seed, trainer.metrics = state["step"], state["seed"], {}
    for name, one in extra.items():
        _everywhere(f"{where}: extra {name!r}", lambda one=one, name=name: one.load_state_dict(state["extra"][name]))  # type: ignore[misc]
    if optimizer is not None and loader is None and state["loader"] is not None:
        log.warning("%s holds a position in the data that was not asked for (loader=)", where)
    log.info("step %d is loaded from %s", trainer.step_number, where)


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
    parts = _model_parts(trainer)
    state = {
        "step": trainer.step_number,
        "seed": trainer.seed,
        "optimizer": _optimizer_state(trainer, optimizer, parts) if optimizer is not None else None,
        "loader": _plain("the loader", loader.state_dict()) if loader is not None else None,
        "extra": {name: _plain(f"extra {name!r}", one.state_dict()) for name, one in extra.items()},
    }
    return parts, state


def _part(trainer: Trainer, name: str, value: Tensor) -> Part:
    """A tensor that is split as the parameter of that name."""
    shape = trainer.parameters.global_shape(name)
    return Part(value, shape, chunks_of(shape, trainer.parameters.placements(name), trainer.groups))


def _model_parts(trainer: Trainer) -> dict[str, Part]:
    """Parameters and the buffers that the model's own state dict has."""
    persistent = trainer.parameters.model.state_dict().keys()
    names = [*trainer.parameters, *(name for name in trainer.parameters.named_buffers if name in persistent)]
    return {f"model.{name}": _part(trainer, name, trainer.parameters[name]) for name in names}


def _tensors_of(trainer: Trainer) -> dict[str, SavedTensor]:
    return {
        name.removeprefix("model."): SavedTensor(shape=part.shape, dtype=str(part.value.dtype).removeprefix("torch."))
        for name, part in _model_parts(trainer).items()
    }


def _optimizer_state(trainer: Trainer, optimizer: Optimizer, parts: dict[str, Part]) -> dict[str, Any]:
    """Options by group, state by parameter name; tensors that are split as their parameter go to ``parts``."""
    states = {}
    for name, parameter in _named(trainer, optimizer).items():
        tensors: dict[str, torch.dtype] = {}
        values: dict[str, Any] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                tensors[key] = value.dtype
                parts[f"optimizer.{key}.{name}"] = _part(trainer, name, value)
            elif isinstance(value, Tensor) and value.numel() > 1 and trainer.parameters.is_sharded(name):
                raise CheckpointError(
                    f"its state {key!r} has shape {list(value.shape)}, the part of the parameter {list(parameter.shape)}",
                    where=f"optimizer {type(optimizer).__name__}, parameter {name}",
                    remedy="use an optimizer whose state has the parameter's shape, or a layout that does not split it",
                )
            else:
                values[key] = _plain(f"optimizer state {key!r} of {name}", value)
        if tensors or values:
            states[name] = {"tensors": tensors, "values": values}
    groups = []
    for group, names in zip(optimizer.param_groups, _groups(trainer, optimizer), strict=True):
        left_out = ("params", "param_names", *HOW_IT_COMPUTES)
        options = {key: value for key, value in group.items() if key not in left_out}
        groups.append({"parameters": names, "options": _plain("the optimizer's options", options)})
    return {"name": type(optimizer).__name__, "groups": groups, "states": states}


def _groups(trainer: Trainer, optimizer: Optimizer) -> list[list[str]]:
    """The names of each group's parameters."""
    names = {id(parameter): name for name, parameter in trainer.parameters.trainable.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"it holds a parameter of shape {list(parameter.shape)} that is not the model's",
                    where=f"optimizer {type(optimizer).__name__}",
                    remedy="give it only the parameters that parallelize hands out",
                )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _named(trainer: Trainer, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    return {name: trainer.parameters.trainable[name] for names in _groups(trainer, optimizer) for name in names}


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


def _write_trainer(directory: Path, state: dict[str, Any]) -> list[str]:
    """Write what is not in tensors' files, and return the names of all files."""
    files.write_atomically(directory / TRAINER, _packed(state))
    return sorted(one.name for one in directory.iterdir())


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
        saved, name = state["optimizer"], type(optimizer).__name__
        remedy = "load(..., optimizer=False) leaves the optimizer as it is"
        if saved is None:
            raise CheckpointError("there is no optimizer state", where=where, remedy=remedy)
        if saved["name"] != name:
            problem = f"the optimizer state is of {saved['name']}, this trainer has {name}"
            raise CheckpointError(problem, where=where, remedy=f"train on with {saved['name']}; {remedy}")
        groups = _groups(trainer, optimizer)
        theirs = [group["parameters"] for group in saved["groups"]]
        if [set(names) for names in groups] != [set(names) for names in theirs]:
            here, there = sum(groups, []), sum(theirs, [])
            missing = [one for one in here if one not in there] or [one for one in there if one not in here]
            problem = f"the optimizer has {len(groups)} groups of parameters, {len(theirs)} were saved"
            if missing:
                problem = f"there is no optimizer state of {missing[0]}"
                if missing[0] in there:
                    problem = f"there is optimizer state of {missing[0]}, which this optimizer does not train"
            elif len(groups) == len(theirs):
                problem = "the optimizer's groups hold other parameters than the saved ones"
            raise CheckpointError(problem, where=where, remedy=remedy)
    if loader is not None and state["loader"] is None:
        remedy = "load without loader=: it then starts where it stands"
        raise CheckpointError("there is no position in the data", where=where, remedy=remedy)
    for name in extra:
        if name not in state["extra"]:
            known = ", ".join(state["extra"]) or "nothing"
            raise CheckpointError(f"there is no extra {name!r}", where=where, remedy=f"it has: {known}")


def _empty_states(trainer: Trainer, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name: values as saved, room for the tensors.

    Dtypes stay as saved, and as in ``Optimizer.load_state_dict`` all but the step is on the parameter's device.
    """
    result: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            name = next(one for one, value in trainer.parameters.trainable.items() if value is parameter)
            if name not in saved["states"]:
                continue
            state = saved["states"][name]
            devices = {
                key: parameter.device if key != "step" or on_device else torch.device("cpu")
                for key in (*state["tensors"], *state["values"])
            }
            result[name] = {
                key: torch.empty_like(parameter.detach(), dtype=dtype, device=devices[key])
                for key, dtype in state["tensors"].items()
            }
            for key, value in state["values"].items():
                result[name][key] = value.to(devices[key]) if isinstance(value, Tensor) else value
    return result


def _set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        mine = group.get(key)
        if isinstance(mine, Tensor) and isinstance(value, Tensor):
            mine.copy_(value)  # others may hold it
        else:
            group[key] = value


# --- together --------------------------------------------------------------------------------------------------------


def _share(names: list[str]) -> list[str]:
    """This rank's share of the files."""
    return names[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else names


def _same_path(path: Path_) -> tuple[Path, str]:
    where = os.fspath(path)
    _check_same(where, "the path", where)
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
    for error in from_every_rank(mine):
        if error is not None:
            raise error
    return result  # type: ignore[return-value]


def _told(where: str, action: Callable[[], T]) -> T:
    """Do it, and raise every error as one that can be sent to other ranks."""
    try:
        return action()
    except MeshwrightError:
        raise
    except OSError as error:
        remedy = "check the disk's space and permissions"
        raise CheckpointError(error.strerror or f"{error}", where=str(error.filename or where), remedy=remedy) from error
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}", where=where) from error
