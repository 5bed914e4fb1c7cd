"""An optimizer's state by parameter name, so that the optimizer of another layout can load it.

    {"name": "AdamW",
     "groups": [{"parameters": ["wte.weight", ...], "options": {"lr": 3e-4, "betas": (0.9, 0.999), ...}}],
     "states": {"wte.weight": {"tensors": {"exp_avg": torch.float32, ...}, "values": {"step": tensor(120.)}}}}

State tensors that have the shape of their parameter are split like the parameter. ``tensors`` holds only their dtypes;
``runtime/shards.py`` stores the tensors themselves. ``values`` holds all other state, such as ``step``, which is the
same on every rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.errors import CheckpointError
from meshwright.runtime.shards import StoredPart, part_of
from meshwright.runtime.state import LocalParameters

HOW_IT_COMPUTES = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how an optimizer computes, and that depend on the run and its device. They are not saved."""

LEAVE = "load(..., optimizer=False) leaves the optimizer as it is"

States = dict[str, dict[str, Any]]


def extract(parameters: LocalParameters, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, StoredPart]]:
    """Return the optimizer's state, and this rank's parts of its tensors by their names in a checkpoint. Raise a
    CheckpointError if the optimizer holds a parameter that is not the model's, or if a parameter is split and a state
    tensor has another shape."""
    states: States = {}
    parts: dict[str, StoredPart] = {}
    for name, (parameter, _) in _named(parameters, optimizer).items():
        tensors: dict[str, torch.dtype] = {}
        values: dict[str, Any] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                tensors[key] = value.dtype
                parts[_entry(name, key)] = part_of(parameters, name, value)
            elif isinstance(value, Tensor) and value.numel() > 1 and parameters.is_sharded(name):
                raise CheckpointError(
                    f"its state {key!r} of {name} has shape {list(value.shape)}, "
                    f"this rank's part of the parameter {list(parameter.shape)}",
                    where=_where(optimizer),
                    remedy="use an optimizer whose state has the parameter's shape, or a layout that does not split it",
                )
            else:
                values[key] = value
        if tensors or values:
            states[name] = {"tensors": tensors, "values": values}
    names = _name_of(parameters, optimizer)
    groups = [
        {
            "parameters": [names[id(parameter)] for parameter in group["params"]],
            "options": {
                key: value for key, value in group.items() if key not in ("params", "param_names", *HOW_IT_COMPUTES)
            },
        }
        for group in optimizer.param_groups
    ]
    return {"name": kind_of(optimizer), "groups": groups, "states": states}, parts


def kind_of(optimizer: Optimizer) -> str:
    """The name of an optimizer in checkpoints: its class, or what it says of itself if it wraps another."""
    return str(getattr(optimizer, "described_as", type(optimizer).__name__))


def joined(saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the states of all ranks into one state. Ranks of different stages hold different parameters."""
    groups = []
    for same in zip(*(rank_state["groups"] for rank_state in saved), strict=True):
        names = dict.fromkeys(name for group in same for name in group["parameters"])
        groups.append({**same[0], "parameters": list(names)})
    states = {name: state for rank_state in saved for name, state in rank_state["states"].items()}
    return {"name": saved[0]["name"], "groups": groups, "states": states}


def check(parameters: LocalParameters, optimizer: Optimizer, saved: dict[str, Any] | None, where: str) -> None:
    """Raise a CheckpointError if ``optimizer`` cannot load a saved state: because there is none (None), or because the
    state belongs to another optimizer, other parameters or other groups."""
    if saved is None:
        raise CheckpointError("there is no optimizer state", where=where, remedy=LEAVE)
    name = kind_of(optimizer)
    if saved["name"] != name:
        problem = f"the optimizer state is of {saved['name']}, this trainer has {name}"
        raise CheckpointError(problem, where=where, remedy=f"train on with {saved['name']}; {LEAVE}")
    names = _name_of(parameters, optimizer)
    here = [{names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups]
    there = [{name for name in group["parameters"] if not parameters.is_elsewhere(name)} for group in saved["groups"]]
    if here == there:
        return
    own_names, saved_names = set().union(*here), set().union(*there)
    odd = next((name for name in parameters if name in own_names ^ saved_names), None)
    problem = "the optimizer's parameters are in other groups than the saved ones"
    if odd in own_names:
        problem = f"there is no optimizer state of {odd}"
    elif odd is not None:
        problem = f"there is optimizer state of {odd}, which this trainer's optimizer does not hold"
    raise CheckpointError(problem, where=where, remedy=LEAVE)


def make_room(
    parameters: LocalParameters, optimizer: Optimizer, saved: dict[str, Any]
) -> tuple[States, dict[str, StoredPart]]:
    """Return the state by parameter name, and the parts of its tensors by their names in a checkpoint. Tensors of the
    parameter's shape have the saved dtypes, and hold zeros that a load must replace (except for padding). All other
    values are copied from ``saved``.

    As with ``Optimizer.load_state_dict``, tensors are on the parameter's device. ``step`` is on the CPU, unless the
    optimizer is capturable or fused.
    """
    result: States = {}
    parts: dict[str, StoredPart] = {}
    for name, (parameter, group) in _named(parameters, optimizer).items():
        if name not in saved["states"]:
            continue
        state: dict[str, Any] = {}
        for key, dtype in saved["states"][name]["tensors"].items():
            state[key] = torch.zeros_like(parameter.detach(), dtype=dtype, device=_device(key, parameter, group))
            parts[_entry(name, key)] = part_of(parameters, name, state[key])
        for key, value in saved["states"][name]["values"].items():
            state[key] = value.to(_device(key, parameter, group)) if isinstance(value, Tensor) else value
        result[name] = state
    return result, parts


def take(parameters: LocalParameters, optimizer: Optimizer, saved: dict[str, Any], states: States) -> None:
    """Put loaded states and saved options into the optimizer."""
    optimizer.state.clear()
    for name, (parameter, _) in _named(parameters, optimizer).items():
        if name in states:
            optimizer.state[parameter] = states[name]
    for group, other in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in other["options"].items():
            current = group.get(key)
            if isinstance(current, Tensor) and isinstance(value, Tensor):
                current.copy_(value)  # such as a learning rate that other objects hold too
            else:
                group[key] = value


def _entry(name: str, key: str) -> str:
    return f"optimizer.{key}.{name}"


def _where(optimizer: Optimizer) -> str:
    return f"optimizer {kind_of(optimizer)}"


def _device(key: str, parameter: nn.Parameter, group: dict[str, Any]) -> torch.device:
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.device("cpu") if on_host else parameter.device


def _name_of(parameters: LocalParameters, optimizer: Optimizer) -> dict[int, str]:
    """Map the ``id`` of each parameter to its name, because the optimizer itself may not know any names."""
    names = {id(parameter): name for name, parameter in parameters.trainable.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"it holds a parameter of shape {list(parameter.shape)} that is not the model's",
                    where=_where(optimizer),
                    remedy="give it only the parameters that parallelize hands out",
                )
    return names


def _named(parameters: LocalParameters, optimizer: Optimizer) -> dict[str, tuple[nn.Parameter, dict[str, Any]]]:
    """Map the name of each parameter that the optimizer holds to the parameter and its group."""
    names = _name_of(parameters, optimizer)
    return {
        names[id(parameter)]: (parameter, group) for group in optimizer.param_groups for parameter in group["params"]
    }
