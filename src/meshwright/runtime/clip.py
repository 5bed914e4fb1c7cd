"""Clips gradients by their norm over all ranks of a replica."""

from functools import reduce

import torch
from torch import Tensor

from meshwright.comm.groups import sum_over
from meshwright.runtime.state import LocalParameters


def clip(parameters: LocalParameters, max_norm: float) -> Tensor:
    """Clip gradients by their norm over all ranks, and return the norm. The squared norm of split gradients is summed
    over the axes that split them. The squared norms of all stages are summed over ``pp``."""
    graph, groups = parameters.graph, parameters.groups
    whole: list[Tensor] = []
    split: dict[tuple[str, ...], list[Tensor]] = {}
    for name, parameter in parameters.trainable.items():
        if parameter.grad is None or not parameters.counts(name):
            continue
        axes = parameters.split_axes(name)
        (split.setdefault(axes, []) if axes else whole).append(parameter.grad)
    dtypes = (getattr(torch, graph.tensors[name].dtype) for name in graph.parameters)
    dtype = reduce(torch.promote_types, dtypes)  # equal on all stages
    total = torch.zeros((), dtype=dtype, device=parameters.device)
    if whole:
        total = total + torch.nn.utils.get_total_norm(whole).square()
    for axes, gradients in split.items():
        squares = torch.nn.utils.get_total_norm(gradients).square()
        for axis in axes:
            squares = sum_over(squares, groups[axis])
        total = total + squares
    if "pp" in groups:
        total = sum_over(total, groups["pp"])
    norm = total.sqrt()
    torch.nn.utils.clip_grads_with_norm_(list(parameters.trainable.values()), max_norm, norm)
    return norm
