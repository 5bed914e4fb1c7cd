"""The contents of a checkpoint, and checks whether a trainer can load it.

Tensors (parameters, buffers, and optimizer state of a parameter's shape) are stored by name, as chunks of whole tensors
(``runtime/chunk_files.py``). ``trainer.pt`` holds, as plain data, small values that are the same
on every rank (step, seed, hyperparameters, positions). ``runtime/manifest.py`` describes the files on the disk.
``runtime/resumable.py`` decides in which order they are written and read.
"""

import copy
import logging
import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from torch.optim import Optimizer

from meshwright.consistency.packing import from_bytes, to_bytes
from meshwright.errors import CheckpointError
from meshwright.runtime import manifest, optimizer_state
from meshwright.runtime.agree import convert_errors
from meshwright.runtime.manifest import Manifest, SavedTensor
from meshwright.runtime.object_path import AnyPath
from meshwright.runtime.shards import StoredPart, part_of
from meshwright.runtime.state import LocalParameters

log = logging.getLogger("meshwright")

T = TypeVar("T")


class Stateful(Protocol):
    """An object whose state is plain data, such as a loader or a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore a state that ``state_dict`` returned."""


Extra = Mapping[str, Stateful]


def model_parts(parameters: LocalParameters) -> dict[str, StoredPart]:
    """This rank's parts of the model's tensors, by their names in a checkpoint."""
    names = filter(parameters.holds, _tensor_names(parameters))
    return {f"model.{name}": part_of(parameters, name, parameters[name]) for name in names}


def saved_tensors(parameters: LocalParameters) -> dict[str, SavedTensor]:
    """Shape and dtype of every model tensor in a checkpoint, also of tensors that only other ranks hold."""
    tensors = parameters.graph.tensors
    names = _tensor_names(parameters)
    return {name: SavedTensor(shape=tensors[name].shape, dtype=tensors[name].dtype) for name in names}


def _tensor_names(parameters: LocalParameters) -> list[str]:
    """Names of the parameters, and of the buffers that are in the model's own state dict."""
    if not parameters.graph.buffers:
        return [*parameters.graph.parameters]
    persistent = parameters.model.state_dict().keys()
    return [*parameters.graph.parameters, *(name for name in parameters.graph.buffers if name in persistent)]


def plain(what: str, value: T) -> T:
    """Return the value. Raise a CheckpointError that names ``what`` if loading the value would run code."""
    try:
        from_bytes(to_bytes(value))
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"its state is not plain data ({str(error).splitlines()[0]})",
            where=what,
            remedy="let state_dict() return numbers, strings, tensors, lists and dicts",
        ) from error
    return value


def copied(value: T) -> T:
    """A copy of a state that its owner may change. What cannot be copied is returned: it is not plain data, and is
    refused when it is written."""
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - whatever it holds, its writing tells what is wrong
        return value


def examined(parameters: LocalParameters, path: AnyPath) -> Manifest:
    """Read a checkpoint's manifest, and check that it fits this model. Raise a CheckpointError if the checkpoint is of
    another model or in another precision. Also raise the errors of ``manifest.read``."""
    written, graph = manifest.read(path), parameters.graph
    here = saved_tensors(parameters)
    for name in here | written.tensors:
        tensor, saved = here.get(name), written.tensors.get(name)
        if tensor is not None and saved is not None and tensor.shape == saved.shape and tensor.dtype != saved.dtype:
            raise CheckpointError(
                f"the checkpoint is in another precision: {name} is {saved.dtype}, in this model {tensor.dtype}",
                where=f"{path}",
                remedy=f"build the model in {saved.dtype} (model.to(torch.{saved.dtype})) and load it there; its "
                "full_state_dict() then loads into a model of any dtype",
            )
        if tensor != saved:
            raise CheckpointError(
                f"the checkpoint is of another model: {name} is {saved or 'not there'}, in this model "
                f"{tensor or 'not there'}",
                where=f"{path}",
                remedy=f"build the model that was saved ({written.model}, step {written.step}), or load another "
                "checkpoint",
            )
    before, now = written.plan.get("precision"), graph.precision
    if before != now:
        log.info("%s was trained in %s, and goes on in %s: parameters and optimizer state are the same", path,
                 *(precision or "the model's own dtypes" for precision in (before, now)))  # fmt: skip
    elif written.fingerprint != graph.fingerprint:
        log.info("%s was saved by another training step with the same parameters", path)
    return written


def check_state(
    where: str,
    parameters: LocalParameters,
    optimizer: Optimizer | None,
    state: dict[str, Any],
    loader: Stateful | None,
    extra: Extra,
) -> None:
    """Raise a CheckpointError if ``state`` lacks the optimizer's state, the loader's position, or the state of an
    object in ``extra``, or if the optimizer's state does not fit."""
    if optimizer is not None:
        optimizer_state.check(parameters, optimizer, state["optimizer"], where)
    if loader is not None and state["loader"] is None:
        remedy = "load without loader=: it then starts where it stands"
        raise CheckpointError("there is no position in the data", where=where, remedy=remedy)
    for name in extra:
        if name not in state["extra"]:
            known = ", ".join(state["extra"]) or "nothing"
            raise CheckpointError(f"there is no extra {name!r}", where=where, remedy=f"it has: {known}")


def give_back(extra: Extra, states: dict[str, Any]) -> None:
    """Restore the state of every object in ``extra``."""
    for name, stateful in extra.items():
        convert_errors(f"extra {name!r}", partial(stateful.load_state_dict, states[name]))
