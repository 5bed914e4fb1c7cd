"""Initial values of models on the meta device, module by module: every rank draws the same."""

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import CaptureError, LayoutError
from meshwright.runtime.rng import named_seed


class SplitParameter(nn.Parameter):
    """A meta tensor in the caller's module, in place of a parameter of which every rank has its part."""


def materialize(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give values to what is on the meta device: by each module's ``reset_parameters``, then by the ``_init_weights``
    of the model that it belongs to (Hugging Face's way), children first, each seeded by its path. What has values
    keeps them.

    Raises:
        CaptureError: nothing initialises a module's tensors.
        LayoutError: a parameter is split over the ranks of another trainer.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, SplitParameter):
            raise LayoutError(
                "it is split over the ranks of another trainer, and has no values here",
                where=f"parameter {name}",
                remedy="take them from there: trainer.full_state_dict(all_ranks=True), loaded into a new model",
            )
    ties = _ties(model)
    kept = [value for value in (*model.parameters(), *model.buffers()) if not value.is_meta]
    allocated = {path: _allocate(module, device) for path, module in model.named_modules()}
    touched = {above for path, names in allocated.items() if names for above in _with_parents(path)}
    if not touched:
        return
    before = [value.clone() for value in kept]
    for path, module in reversed(list(model.named_modules())):
        if path in touched:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(named_seed(seed, path))
                _initialize(model, path, module, allocated[path])
    with torch.no_grad():
        for value, given in zip(kept, before, strict=True):
            value.copy_(given)
    for path, names in allocated.items():
        module = model.get_submodule(path)
        for name in names:
            if _is_unset(getattr(module, name)):
                raise CaptureError(
                    f"{type(module).__name__} is on the meta device, and its initialisation leaves it without values",
                    where=f"tensor {f'{path}.{name}' if path else name}",
                    remedy="set it in the module's reset_parameters, or build the model on a real device",
                )
    _tie(ties)


def _initialize(model: nn.Module, path: str, module: nn.Module, own: list[str]) -> None:
    reset = getattr(module, "reset_parameters", None)
    if own and callable(reset):
        reset()
    owners = [model.get_submodule(above) for above in _with_parents(path)]
    of_model: Any = next((found for owner in owners if callable(found := getattr(owner, "_init_weights", None))), None)
    if of_model is not None:
        of_model(module)
    elif own and not callable(reset):
        raise CaptureError(
            f"{type(module).__name__} is on the meta device and has no reset_parameters",
            where=f"module {path or '(model)'}",
            remedy="give it a reset_parameters method, or build the model on a real device",
        )


def _with_parents(path: str) -> list[str]:
    """``a.b`` -> ``a.b``, ``a``, and the model itself."""
    names = path.split(".") if path else []
    return [".".join(names[:depth]) for depth in range(len(names), -1, -1)]


def _allocate(module: nn.Module, device: torch.device) -> list[str]:
    """Memory for the module's own meta tensors, marked as not set; returns their names."""
    found = []
    places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for tensors in places:
        for name, value in list(tensors.items()):
            if value is None or not value.is_meta:
                continue
            made = torch.full_like(value, _unset(value.dtype), device=device)
            if isinstance(value, nn.Parameter):
                made = nn.Parameter(made, requires_grad=value.requires_grad)
            tensors[name] = made
            found.append(name)
    return found


def _unset(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(value: Tensor) -> bool:
    if value.dtype in (torch.bool, torch.uint8):  # every value of theirs may be meant
        return False
    empty = value.isnan() if value.is_floating_point() or value.is_complex() else value == _unset(value.dtype)
    return bool(empty.any())


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and value.is_meta:
                places.setdefault(id(value), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _tie(ties: list[list[tuple[nn.Module, str]]]) -> None:
    for (first, name), *others in ties:
        for module, other in others:
            module._parameters[other] = first._parameters[name]
