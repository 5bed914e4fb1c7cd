"""Initializes models on the meta device, module by module. Every rank draws the same values."""

import zlib
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from meshwright.errors import CaptureError, LayoutError
from meshwright.ops.library import mix
from meshwright.torch_private import TorchDispatchMode

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
Keep = Callable[[str, nn.Parameter], bool]
"""A function that takes the name of a parameter and the parameter with its values, and keeps this rank's part. It
returns False if the parameter is to stay whole."""


class SplitParameter(nn.Parameter):
    """A meta tensor in the caller's module, in place of a parameter that is split over ranks.

    A write to it, or to its ``data``, would be lost. Both writes change ``_version``, so that they can be detected.
    """

    data = property(lambda self: self.detach(), lambda self, value: increment_version(self))


def materialize(
    model: nn.Module, device: torch.device, seed: int, keep: Keep | None = None, loaded: Container[str] = ()
) -> None:
    """Give initial values to tensors on the meta device. Each module's ``reset_parameters`` is called first, then the
    ``_init_weights`` of the model that contains the module (as in Hugging Face). Children come before their parents.
    The random seed of a module depends on its path. Tensors that already have values keep them.

    With ``keep`` the whole model need not fit in memory. A block is an item of a list of modules, or a module without
    children. As soon as a block has its values, ``keep`` takes this rank's part of its parameters, and the parameters
    in the model return to the meta device. Parameters that already had values, or that several modules share, stay
    whole. If a module changes parameters of the blocks inside it, all parameters stay whole.

    Tensors whose names are in ``loaded`` stay as they are: their values come from elsewhere.

    Raises:
        CaptureError: nothing initializes a module's tensors.
        LayoutError: a parameter is split over the ranks of another trainer.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, SplitParameter):
            raise LayoutError(
                "it is split over the ranks of another trainer, and has no values here",
                where=f"parameter {name}",
                remedy="train them with both losses: parallelize(..., beside=trainer); or take them from there: "
                "trainer.full_state_dict(all_ranks=True), loaded into a new model",
            )
    ties = _ties(model)
    kept = [value for value in (*model.parameters(), *model.buffers()) if not value.is_meta]
    missing = {
        path: [name for name in _missing(module) if (f"{path}.{name}" if path else name) not in loaded]
        for path, module in model.named_modules()
    }
    if not any(missing.values()):
        return
    before = [value.clone() for value in kept]
    shared = {(id(module), name) for tie in ties for module, name in tie}
    try:
        _fill(model, device, seed, missing, shared, keep)
    except _LaterChange:
        _fill(model, device, seed, missing, shared, None)
    with torch.no_grad():
        for value, source in zip(kept, before, strict=True):
            value.copy_(source)
    _tie(ties)


def _fill(
    model: nn.Module,
    device: torch.device,
    seed: int,
    missing: dict[str, list[str]],
    shared: set[tuple[int, str]],
    keep: Keep | None,
) -> None:
    touched = {above for path, names in missing.items() if names for above in _with_parents(path)}
    blocks = _blocks(model) if keep is not None else set()
    gone: list[tuple[nn.Module, str]] = []
    with torch.no_grad(), _NoChangeOnMeta():
        for path, module in reversed(list(model.named_modules())):
            if path not in touched:
                continue
            _allocate(module, missing[path], device)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(mix(seed, zlib.crc32(path.encode())))
                _initialize(model, path, module, missing[path])
            if keep is None or path not in blocks:
                continue
            for inner, part in module.named_modules(prefix=path):
                _check_set(inner, part, missing.get(inner, []))
                for name in missing.get(inner, []):
                    value = getattr(part, name)
                    whole = not isinstance(value, nn.Parameter) or (id(part), name) in shared
                    if not whole and keep(f"{inner}.{name}" if inner else name, value):
                        part._parameters[name] = nn.Parameter(value.to("meta"), value.requires_grad)
                        gone.append((part, name))
    if any(not getattr(module, name).is_meta for module, name in gone):
        raise _LaterChange
    taken = {(id(module), name) for module, name in gone}
    for path, module in model.named_modules():
        _check_set(path, module, [name for name in missing[path] if (id(module), name) not in taken])


class _LaterChange(Exception):  # noqa: N818 - a signal between two functions, no error
    """A module changes parameters of an inner block whose values were already freed: they are on the meta device
    again."""


class _NoChangeOnMeta(TorchDispatchMode):
    """Raises ``_LaterChange`` if an initialization writes to a meta tensor, because the write would be lost."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.is_mutable and isinstance(args[0], Tensor) and args[0].is_meta:
            raise _LaterChange
        return function(*args, **(kwargs or {}))


def _blocks(model: nn.Module) -> set[str]:
    """Paths of the blocks: the outermost items of lists of modules. Outside of lists, the modules without children."""
    paths: set[str] = set()

    def visit(path: str, module: nn.Module, listed: bool) -> None:
        children = dict(module.named_children())
        if listed or not children:
            paths.add(path)
            return
        for name, child in children.items():
            visit(f"{path}.{name}" if path else name, child, isinstance(module, LISTS))

    visit("", model, False)
    return paths


def _check_set(path: str, module: nn.Module, names: list[str]) -> None:
    for name in names:
        if _is_unset(getattr(module, name)):
            raise CaptureError(
                f"{type(module).__name__} is on the meta device, and its initialisation leaves it without values",
                where=f"tensor {f'{path}.{name}' if path else name}",
                remedy="set it in the module's reset_parameters, or build the model on a real device",
            )


def _initialize(model: nn.Module, path: str, module: nn.Module, own: list[str]) -> None:
    reset = getattr(module, "reset_parameters", None)
    if own and callable(reset):
        reset()
    owners = [model.get_submodule(above) for above in _with_parents(path)]
    of_model: Any = next((init for owner in owners if callable(init := getattr(owner, "_init_weights", None))), None)
    if of_model is not None:
        of_model(module)
    elif own and not callable(reset):
        raise CaptureError(
            f"{type(module).__name__} is on the meta device and has no reset_parameters",
            where=f"module {path or '(model)'}",
            remedy="give it a reset_parameters method, or build the model on a real device",
        )


def _with_parents(path: str) -> list[str]:
    """Return the paths of a module and of all modules that contain it: ``a.b`` gives ``a.b``, ``a`` and ``""``."""
    names = path.split(".") if path else []
    return [".".join(names[:depth]) for depth in range(len(names), -1, -1)]


def _missing(module: nn.Module) -> list[str]:
    """Return the names of the module's own tensors that are on the meta device."""
    own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    return [name for tensors in own for name, value in tensors.items() if value is not None and value.is_meta]


def _allocate(module: nn.Module, names: list[str], device: torch.device) -> None:
    """Allocate these tensors, filled with a value that marks them as not set."""
    places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for tensors in places:
        for name, value in list(tensors.items()):
            if name in names and value.is_meta:
                tensor = torch.full_like(value, _unset(value.dtype), device=device)
                if isinstance(value, nn.Parameter):
                    tensor = nn.Parameter(tensor, requires_grad=value.requires_grad)
                tensors[name] = tensor


def _unset(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(value: Tensor) -> bool:
    if value.dtype in (torch.bool, torch.uint8):  # these dtypes have no value that can mark an element as unset
        return False
    empty = value.isnan() if value.is_floating_point() or value.is_complex() else value == _unset(value.dtype)
    return bool(empty.any())


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and value.is_meta:
                places.setdefault(id(value), []).append((module, name))
    return [tie for tie in places.values() if len(tie) > 1]


def _tie(ties: list[list[tuple[nn.Module, str]]]) -> None:
    for (first, name), *others in ties:
        for module, other in others:
            module._parameters[other] = first._parameters[name]
