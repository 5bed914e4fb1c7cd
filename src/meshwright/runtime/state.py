"""This rank's parameters and buffers: cut from the caller's module, and gathered whole for a state dict."""

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.comm.groups import broadcast_along, broadcast_tensors, from_rank_0, gather_whole
from meshwright.errors import ChangedModelError, CheckpointError
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import AxisGroup, sizes_of
from meshwright.ir.placement import Placements, is_split, local_shape
from meshwright.ir.plan import Plan
from meshwright.ir.stages import cut
from meshwright.lower.reshard import local_part
from meshwright.runtime.initialize import SplitParameter, materialize

log = logging.getLogger("meshwright")


class LocalParameters:
    """Parameters and buffers of one rank, by the model's own names, in the graph's order.

    If a parameter is whole on this rank, it *is* the caller's parameter. If it is not, a meta tensor replaces it in the
    caller's module, so that nobody can train a stale copy.

    Attributes:
        own: maps names to this rank's parameters, or to its parts of parameters.
        given: maps names of parameters that are not whole on this rank to the meta tensors in the caller's module.
        named_buffers: maps names to the buffers that this rank holds.
        parts: maps names to the places of this rank's parts, as far as ``runtime/shards.py`` has computed them.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        plan: Plan,
        groups: dict[str, AxisGroup],
        device: torch.device,
        seed: int,
        loaded: Collection[str] = (),
    ) -> None:
        self.graph, self.groups, self.model, self.device = graph, groups, model, device
        self._placements: dict[str, Placements] = {
            name: {axis: placement for axis, placement in plan.storage(name).items() if axis in groups}
            for name in graph.parameters
        }
        self._owners = cut(graph, plan.firsts).pipeline_owners(plan.pipeline)
        self.own: dict[str, nn.Parameter] = {}
        self.given: dict[str, nn.Parameter] = {}
        self.named_buffers: dict[str, Tensor] = {}
        self.parts: dict[str, tuple[Any, ...]] = {}
        parts: dict[str, nn.Parameter] = {}
        unset = self._make_room(loaded, parts)
        materialize(model, device, seed, lambda name, value: self._take(name, value, parts), unset)
        callers = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        if groups:
            with torch.no_grad():
                given = {name: value for name, value in (callers | buffers).items() if name not in unset}
                values_here = [value for value in given.values() if not value.is_meta]
                broadcast_tensors(values_here, device)
        for name in graph.parameters:
            parameter = callers[name]
            if parameter.is_meta or self._take(name, parameter, parts):
                meta = torch.empty_like(parameter, device="meta")
                self.given[name] = SplitParameter(meta, requires_grad=parameter.requires_grad)
                if name in parts:
                    self.own[name] = parts[name]
            else:
                self.own[name] = parameter
        self.named_buffers.update((name, buffers[name]) for name in filter(self.holds, graph.buffers))
        for value in (*self.own.values(), *self.named_buffers.values()):
            if value.device != device:
                value.data = value.data.to(device)

    def _make_room(self, loaded: Collection[str], parts: dict[str, nn.Parameter]) -> set[str]:
        """Allocate this rank's parts of the meta parameters ``loaded``, whose values are read later. Return all names
        of these parameters in the model."""
        axis_sizes, at = sizes_of(self.groups)
        named: dict[int, list[tuple[nn.Module, str]]] = {}
        names: dict[int, list[str]] = {}
        for path, module in self.model.named_modules():
            for key, value in module._parameters.items():
                if value is not None and value.is_meta:
                    named.setdefault(id(value), []).append((module, key))
                    names.setdefault(id(value), []).append(f"{path}.{key}" if path else key)
        unset: set[str] = set()
        for name, parameter in self.model.named_parameters():
            if name not in loaded or not parameter.is_meta:
                continue
            unset.update(names[id(parameter)])
            if not self.holds(name):
                continue
            shape = local_shape(tuple(parameter.shape), self._placements[name], axis_sizes, at)
            room = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=self.device), parameter.requires_grad)
            if self.is_sharded(name):
                parts[name] = room
            else:
                for module, key in named[id(parameter)]:
                    module._parameters[key] = room
        return unset

    def _take(self, name: str, parameter: nn.Parameter, parts: dict[str, nn.Parameter]) -> bool:
        """Put this rank's part of a parameter into ``parts`` (nothing if only stages of other ranks use the parameter).
        If the parameter is whole on this rank, only return False."""
        if self.holds(name) and not self.is_sharded(name):
            return False
        if self.holds(name):
            part = local_part(parameter.detach(), self._placements[name], self.groups)
            parts[name] = nn.Parameter(part.clone().contiguous().to(self.device), parameter.requires_grad)
        return True

    def take_over(self) -> None:
        """Put the meta tensors of ``given`` into the caller's module. It is called last, when nothing can fail any
        more."""
        callers = dict(self.model.named_parameters())
        replaced = {id(callers[name]): given for name, given in self.given.items()}
        for module in self.model.modules():
            for name, value in module._parameters.items():
                module._parameters[name] = replaced.get(id(value), value)
        if any(map(self.is_sharded, self.graph.parameters)):
            self.model.register_load_state_dict_pre_hook(_refuse_loading)
        if self.given:
            log.info(
                "%d of %d parameters are not whole on this rank; in the given module they are now meta tensors",
                len(self.given),
                len(callers),
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __getitem__(self, name: str) -> Tensor:
        return self.own[name] if name in self.own else self.named_buffers[name]

    def follow(self) -> tuple[str, ...]:
        """Freeze or unfreeze this rank's parts of parameters like the meta tensors in the caller's module; whole
        parameters are the caller's own. Return the names of the parameters that are trained now, on any rank."""
        for name, given in self.given.items():
            if name in self.own and self.own[name].requires_grad != given.requires_grad:
                self.own[name].requires_grad_(given.requires_grad)
        callers = {**self.own, **self.given}
        return tuple(name for name in self.graph.parameters if callers[name].requires_grad)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """This rank's parameters that need gradients, by name."""
        return {name: value for name, value in self.own.items() if value.requires_grad}

    def values(self) -> dict[str, Tensor]:
        """This rank's parameters, detached, by name in the graph's order."""
        return {name: value.detach() for name, value in self.own.items()}

    def placements(self, name: str) -> Placements:
        """The placement of a parameter over each axis; empty if the parameter is whole on every rank."""
        return self._placements.get(name, {})

    def holds(self, name: str) -> bool:
        """Whether a stage of this rank uses the parameter or buffer."""
        return "pp" not in self.groups or self.groups["pp"].index in self._owners[name]

    def owners(self, name: str) -> tuple[int, ...]:
        """The ``pp`` ranks that hold the parameter or buffer, in rising order."""
        return tuple(self._owners[name])

    def is_elsewhere(self, name: str) -> bool:
        """Whether the model has this parameter or buffer, but only stages of other ranks use it."""
        return name in self._owners and not self.holds(name)

    def counts(self, name: str) -> bool:
        """Whether this rank counts the parameter in sums over stages: only the first ``pp`` rank that holds it does."""
        return "pp" not in self.groups or self.groups["pp"].index == self._owners[name][0]

    def is_sharded(self, name: str) -> bool:
        """Whether this rank holds only a part of the parameter."""
        return bool(self.split_axes(name))

    def split_axes(self, name: str) -> tuple[str, ...]:
        """The axes over which ranks hold different parts of the parameter."""
        return tuple(axis for axis, placement in self.placements(name).items() if is_split(placement))

    def whole(self, name: str, value: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Gather a whole tensor from ``value``, which is split like the parameter or buffer ``name``. Every rank must
        call this method. Ranks that do not hold the parameter pass None, and the dtype if it is not the parameter's."""
        if value is None:
            result = self.empty(name) if dtype is None else self.empty(name).to(dtype)
        else:
            result = gather_whole(value, self.global_shape(name), self.placements(name), self.groups)
            result = result.clone() if result.data_ptr() == value.data_ptr() else result
        if "pp" in self.groups:
            broadcast_along(result, self.groups["pp"], self._owners[name][0])
        return result

    def empty(self, name: str) -> Tensor:
        """Return an uninitialized tensor for a whole parameter or buffer, on this rank's device."""
        dtype = getattr(torch, self.graph.tensors[name].dtype)
        return torch.empty(self.global_shape(name), dtype=dtype, device=self.device)

    def global_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole parameter or buffer."""
        return self.graph.tensors[name].shape


def full_state_dict(parameters: LocalParameters, *, all_ranks: bool) -> dict[str, Tensor]:
    """Return whole tensors on the CPU by the model's own names; tied tensors are under each of their names. Ranks other
    than rank 0 get an empty dict, unless ``all_ranks``. Tensors are gathered one after the other, so that the device
    holds at most one whole tensor."""
    keep = all_ranks or not dist.is_initialized() or dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    for name in (*parameters.graph.parameters, *parameters.graph.buffers):
        whole = parameters.whole(name, parameters[name].detach() if parameters.holds(name) else None)
        if keep:
            tensors[name] = whole.cpu()
        del whole
    tied = parameters.graph.tied
    names = {name: tied.get(name, name) for name in parameters.model.state_dict()}
    return {name: tensors[first] for name, first in names.items() if first in tensors}


def load_state_dict(parameters: LocalParameters, state: Mapping[str, Any], *, strict: bool) -> None:
    """Copy rank 0's whole tensors into the parameters and buffers of every rank: the inverse of ``full_state_dict``.
    Raise a CheckpointError on every rank if the tensors do not fit the model; nothing has changed then."""
    given: dict[str, Tensor] = {}  # filled only on rank 0

    def names_given() -> list[str]:
        given.update(_checked(parameters, state, strict))
        return list(given)

    for name in from_rank_0(names_given):
        whole = parameters.empty(name)
        if name in given:
            whole.copy_(given[name].detach())
        if parameters.groups:
            broadcast_tensors([whole], parameters.device)
        if parameters.holds(name):
            part = local_part(whole, parameters.placements(name), parameters.groups)
            parameters[name].detach().copy_(part)


def _checked(parameters: LocalParameters, state: Mapping[str, Any], strict: bool) -> dict[str, Tensor]:
    """Return a state dict's tensors by their names in the graph. Raise a CheckpointError if they do not fit the
    model."""

    def refused(key: str, problem: str, remedy: str) -> CheckpointError:
        return CheckpointError(problem, where=f"state dict, {key}", remedy=remedy)

    graph = parameters.graph
    wanted = {name: name for name in (*graph.parameters, *graph.buffers)} | graph.tied
    for key in parameters.model.state_dict() if strict else ():
        if key in wanted and key not in state:
            remedy = "give all that full_state_dict() has, or strict=False to leave the rest as it is"
            raise refused(key, "it is missing", remedy)
    known: dict[str, Tensor] = {}
    for key, value in state.items():
        if key not in wanted:
            if strict:
                remedy = "give the state dict of this model, or strict=False to leave such tensors out"
                raise refused(key, "the model has no such tensor", remedy)
            continue
        shape = parameters.global_shape(wanted[key])
        if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.is_meta:
            kind = f"a {type(value).__name__}"
            if isinstance(value, Tensor):
                kind = f"{'a meta tensor ' if value.is_meta else ''}of shape {list(value.shape)}"
            remedy = "give whole tensors: a plain model's state_dict(), or trainer.full_state_dict()"
            raise refused(key, f"it is {kind}, in the model it is of shape {list(shape)}", remedy)
        other = known.setdefault(wanted[key], value)
        if other is not value and not torch.equal(other, value):
            problem = f"it is not equal to {wanted[key]}, with which the model shares it"
            raise refused(key, problem, "give shared tensors the same values")
    return known


def _refuse_loading(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    """A hook of the caller's module that refuses ``load_state_dict``, because it would write to meta tensors."""
    split = any(isinstance(value, SplitParameter) for value in module.parameters())
    if split and not metadata.get("assign_to_params_buffers"):
        raise ChangedModelError(
            "its parameters are split over ranks, and in their place it holds meta tensors: nothing would be loaded",
            where=f"{type(module).__name__}.load_state_dict",
            remedy="load into the trainer: trainer.load_state_dict(...) takes the same whole tensors; or load before "
            "parallelize",
        )
