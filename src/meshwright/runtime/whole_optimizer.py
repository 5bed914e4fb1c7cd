"""An optimizer's state as ``state_dict`` of torch.optim has it: whole tensors, for the plain optimizer of the model.
Programs that know no plan save it, and load it."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from meshwright.comm.groups import broadcast_tensors, from_every_rank, from_rank_0
from meshwright.errors import CheckpointError
from meshwright.lower.reshard import local_part
from meshwright.runtime import optimizer_state
from meshwright.runtime.optimizer_state import HOW_IT_COMPUTES, kind_of
from meshwright.runtime.state import LocalParameters

_REMEDY = "give the state_dict() of the same optimizer, over the same parameters in the same groups"


def full_optimizer_state(parameters: LocalParameters, optimizer: Optimizer, *, all_ranks: bool) -> dict[str, Any]:
    """Return the state with whole tensors on the CPU. Parameters are numbered group by group, in the order of the
    groups; in a pipeline, in the order of the model. Ranks other than rank 0 get an empty dict, unless ``all_ranks``.
    Tensors are gathered one after the other. Every rank must call it."""
    kept = _of_all_stages(parameters, optimizer)
    gathers_here = all_ranks or not dist.is_initialized() or dist.get_rank() == 0
    states: dict[int, dict[str, Any]] = {}
    names = [name for group in kept["groups"] for name in group["parameters"]]
    for number, name in enumerate(names):
        if name not in kept["states"]:
            continue
        state, own = deepcopy(kept["states"][name]["values"]), parameters.own.get(name)
        for key, dtype in kept["states"][name]["tensors"].items():
            part = optimizer.state[own][key].detach() if own is not None else None
            whole = parameters.whole(name, part, dtype)
            if gathers_here:
                state[key] = whole.cpu()
            del whole
        states[number] = state
    if not gathers_here:
        return {}
    groups, first = [], 0
    for saved, group in zip(kept["groups"], optimizer.param_groups, strict=True):
        count = len(saved["parameters"])
        how = {key: optimizer.defaults.get(key) for key in HOW_IT_COMPUTES if key in group}
        names_kept = {"param_names": saved["parameters"]} if "param_names" in group else {}
        groups.append({**saved["options"], **how, **names_kept, "params": list(range(first, first + count))})
        first += count
    return {"state": states, "param_groups": groups}


def load_optimizer_state(parameters: LocalParameters, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the whole tensors of a plain optimizer's ``state_dict()``: the inverse of ``full_optimizer_state``. Only
    rank 0's state is used. Every rank must call it.

    Raises:
        CheckpointError: it is the state of other parameters or groups. All ranks raise it, and nothing has changed.
    """
    kept = _of_all_stages(parameters, optimizer)
    groups = [group["parameters"] for group in kept["groups"]]
    saved = from_rank_0(lambda: _by_name(parameters, optimizer, groups, state))
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    states, _ = optimizer_state.make_room(parameters, optimizer, saved)
    first = not dist.is_initialized() or dist.get_rank() == 0
    for name, each in saved["states"].items():
        for key, dtype in each["tensors"].items():
            whole = parameters.empty(name).to(dtype)
            if first:
                whole.copy_(state["state"][numbers[name]][key].detach())
            if parameters.groups:
                broadcast_tensors([whole], parameters.device)
            if name in states:
                part = local_part(whole, parameters.placements(name), parameters.groups)
                states[name][key].copy_(part)
    optimizer_state.take(parameters, optimizer, saved, states)


def _of_all_stages(parameters: LocalParameters, optimizer: Optimizer) -> dict[str, Any]:
    """Return groups, names and small values as ``optimizer_state`` describes them, of the parameters of all stages."""
    kept, _ = optimizer_state.extract(parameters, optimizer)
    if "pp" not in parameters.groups:
        return kept
    joined = optimizer_state.joined(from_every_rank(kept))
    order = {name: place for place, name in enumerate(parameters.graph.parameters)}
    for group in joined["groups"]:
        group["parameters"].sort(key=order.__getitem__)
    return joined


def _by_name(
    parameters: LocalParameters, optimizer: Optimizer, groups: list[list[str]], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a ``state_dict`` in the form of ``optimizer_state``, without the tensors of parameters."""
    where = "state dict of the optimizer"
    saved_groups = state.get("param_groups")
    if saved_groups is None or "state" not in state:
        raise CheckpointError("it has no 'state' and 'param_groups'", where=where, remedy=_REMEDY)
    sizes, own_sizes = [len(group["params"]) for group in saved_groups], [len(group) for group in groups]
    if sizes != own_sizes:
        raise CheckpointError(
            f"its groups have {sizes} parameters, this trainer's optimizer has groups of {own_sizes}",
            where=where,
            remedy=_REMEDY,
        )
    states: dict[str, Any] = {}
    names = [name for group in groups for name in group]
    for number, name in enumerate(names):
        shape = parameters.global_shape(name)
        tensors: dict[str, torch.dtype] = {}
        values: dict[str, Any] = {}
        for key, value in state["state"].get(number, {}).items():
            if not isinstance(value, Tensor) or (value.numel() == 1 and tuple(value.shape) != shape):
                values[key] = deepcopy(value)
            elif tuple(value.shape) == shape:
                tensors[key] = value.dtype
            else:
                raise CheckpointError(
                    f"its state {key!r} of {name} has shape {list(value.shape)}, the parameter {list(shape)}",
                    where=where,
                    remedy=_REMEDY,
                )
        if tensors or values:
            states[name] = {"tensors": tensors, "values": values}
    kinds = ("params", "param_names", *HOW_IT_COMPUTES)
    options = [{key: value for key, value in group.items() if key not in kinds} for group in saved_groups]
    return {
        "name": kind_of(optimizer),
        "groups": [{"parameters": own, "options": each} for own, each in zip(groups, options, strict=True)],
        "states": states,
    }
