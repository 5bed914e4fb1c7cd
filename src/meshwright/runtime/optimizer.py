"""Makes the user's optimizer over this rank's parameters, and checks whether it gives the same updates as on a single
rank."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.comm.groups import sum_over
from meshwright.errors import OptimizerError
from meshwright.optim.masters import MasterWeights
from meshwright.optim.whole import NeedsShardSums, ShardSum
from meshwright.runtime.state import LocalParameters

log = logging.getLogger("meshwright")

OptimizerFactory = Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
ELEMENT_WISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
"""Optimizers of torch.optim that update each element independently, so that splitting a tensor changes no update."""
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Optimizers for which PyTorch has a fused kernel on the CPU; on CUDA Adagrad has none. This kernel reads and writes a
tensor only once."""
NEEDS_WHOLE_TENSORS = ("Adafactor", "Muon", "LBFGS", "SparseAdam", "Shampoo", "SOAP")
_REMEDY = "pass a function such as lambda p: torch.optim.AdamW(p, lr=3e-4), of all the parameters that it is given"


def check_factory(factory: Any, max_grad_norm: Any) -> None:
    """Raise an OptimizerError unless ``factory`` is a function or None (it may not be an optimizer that is already
    made), and ``max_grad_norm`` is a positive number or None."""
    if isinstance(factory, Optimizer):
        raise _refused(f"it is a {type(factory).__name__} that is already made, over the whole model's parameters")
    if factory is not None and not callable(factory):
        raise _refused(f"it is a {type(factory).__name__}")
    number = isinstance(max_grad_norm, int | float) and not isinstance(max_grad_norm, bool) and max_grad_norm > 0
    if max_grad_norm is not None and not number:
        raise OptimizerError(
            f"{max_grad_norm!r} is not a norm", where="max_grad_norm", remedy="give a positive number, or None"
        )


def takes_fused(optimizer: Optimizer, *, on_device: bool = True) -> bool:
    """Whether an optimizer runs PyTorch's fused kernel for all parameters if a trainer may choose: there is one, and no
    group of parameters has chosen another implementation."""
    return _has_fused(optimizer, on_device=on_device) and all(map(_may_fuse, optimizer.param_groups))


def _has_fused(optimizer: Optimizer, *, on_device: bool) -> bool:
    return type(optimizer) in FUSED and not (on_device and isinstance(optimizer, torch.optim.Adagrad))


def _may_fuse(group: Mapping[str, Any]) -> bool:
    return bool(group["fused"] or (group["fused"] is None and not group["foreach"] and not group["differentiable"]))


def make_optimizer(factory: OptimizerFactory, parameters: LocalParameters, *, fused: bool = False) -> Optimizer:
    """Make the optimizer over this rank's parts of parameters. If only stages of other ranks are trained, it is empty.

    With ``fused``, use PyTorch's fused kernel if there is one and the factory has not chosen an implementation. Raise
    an OptimizerError if the factory fails or returns no optimizer. Also raise it if the optimizer holds other tensors,
    or needs whole tensors while some parameters are split.
    """
    given = parameters.trainable
    idle = not given and bool(parameters.follow())
    if idle:  # torch.optim refuses an empty list
        given = {"nothing": nn.Parameter(torch.empty(0))}
    try:
        optimizer: Any = factory(list(given.items()))
    except (TypeError, ValueError) as error:
        raise _refused(f"it could not be made: {type(error).__name__}: {error}") from error
    if not isinstance(optimizer, Optimizer):
        raise _refused(f"the function returned a {type(optimizer).__name__}")
    known = {id(value) for value in given.values()}
    held = [value for group in optimizer.param_groups for value in group["params"]]
    if not held:
        raise _refused("it holds no parameter")
    if num_foreign := sum(id(value) not in known for value in held):
        raise _refused(
            f"{num_foreign} of its {len(held)} tensors are not of those that the function was given, and would not be "
            "trained"
        )
    on_device = parameters.device.type != "cpu"
    if fused and _has_fused(optimizer, on_device=on_device):
        for group in optimizer.param_groups:
            if group["fused"] is None and _may_fuse(group):
                group["fused"] = all(value.is_floating_point() for value in group["params"])
    inner = optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer
    if isinstance(inner, NeedsShardSums):
        if any(map(parameters.is_sharded, parameters)):
            assert isinstance(optimizer, NeedsShardSums)
            optimizer.sum_shards_with(shard_sum(parameters))
    else:
        _check_whole(inner, parameters)
    for group in optimizer.param_groups if idle else ():
        group.update({key: [] for key in ("params", "param_names") if key in group})
    return optimizer


def _refused(problem: str) -> OptimizerError:
    return OptimizerError(problem, where="optimizer", remedy=_REMEDY)


def shard_sum(parameters: LocalParameters) -> ShardSum:
    """Return a function that sums values over the ranks that hold the parts of parameters. It makes one all-reduce per
    axis for all parameters that are split alike. Ranks that share split parameters hold them in the same order."""
    axes_of = {id(parameters[name]): parameters.split_axes(name) for name in parameters}

    def summed(of: Sequence[Tensor], values: Tensor) -> Tensor:
        alike: dict[tuple[str, ...], list[int]] = {}
        for column, parameter in enumerate(of):
            alike.setdefault(axes_of[id(parameter)], []).append(column)
        result = values.clone()
        for axes, columns in alike.items():
            part = values[:, columns]
            for axis in axes:
                part = sum_over(part, parameters.groups[axis])
            result[:, columns] = part
        return result

    return summed


def _check_whole(optimizer: Optimizer, parameters: LocalParameters) -> None:
    name = type(optimizer).__name__
    sharded = [parameter for parameter in parameters.trainable if parameters.is_sharded(parameter)]
    problem = f"{name} needs whole tensors"
    remedy = "use an element-wise optimizer (SGD, AdamW, ...), or a layout that does not split parameters"
    if name == "LBFGS":
        problem = "LBFGS needs to evaluate the step several times"
        remedy = "use an optimizer that evaluates it once: SGD, AdamW, LAMB, ..."
    if name in NEEDS_WHOLE_TENSORS and (sharded or name == "LBFGS"):
        where = f"optimizer; {sharded[0]} is split" if sharded else "optimizer"
        raise OptimizerError(problem, where=where, remedy=remedy)
    if sharded and not (name in ELEMENT_WISE and type(optimizer).__module__.startswith(torch.optim.__name__)):
        log.warning(
            "%s may not update every element independently; if it needs whole tensors, it trains the %d split "
            "parameters (%s, ...) differently from one rank", name, len(sharded), sharded[0],
        )  # fmt: skip
