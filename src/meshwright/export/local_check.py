"""Checks that a model's code, run on a rank's parts, has the shapes of the plan: captures it with split layers.

Code between split layers may hold sizes of the whole model (``view(b, s, self.num_heads, -1)``). Then it fails on
parts, or computes something else. A copy of the model, whose split layers have a rank's weights, shows this without
ranks: each of its operators must have the shape that the plan's operator has on a rank.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.api import capture
from meshwright.errors import MeshwrightError
from meshwright.export.modules import AXIS, NONE, Split, Splits
from meshwright.ir.graph import Graph
from meshwright.ir.placement import local_shape
from meshwright.ir.plan import starred
from meshwright.ir.precision import Precision

LossFunction = Callable[[nn.Module, Any], Any]


def pins_for_code(
    graph: Graph, model: nn.Module, loss_fn: LossFunction, batch: Any, expected: Splits, ranks: int,
    precision: Precision | None,
) -> dict[str, str]:  # fmt: skip
    """Pins for the modules whose code does not compute on parts. Empty if the code of the whole model does."""

    def is_right(modules: Mapping[str, Split]) -> bool:
        try:
            captured = capture(_on_one_rank(model, modules, ranks), loss_fn, batch, precision=precision)
        except (MeshwrightError, RuntimeError, ValueError, TypeError, IndexError):
            return False  # the code of the user's model may raise any of these on tensors of another size
        return _equal_shapes(graph, captured, modules, expected, ranks)

    if is_right(expected.modules):
        return {}
    groups: dict[str, dict[str, Split]] = {}
    for path, split in expected.modules.items():
        groups.setdefault(starred(path).rpartition(".")[0], {})[path] = split
    failing = [group for group in groups.values() if len(groups) == 1 or not is_right(group)]
    return {starred(path): NONE for group in failing or groups.values() for path in group}


def _equal_shapes(graph: Graph, captured: Graph, modules: Mapping[str, Split], expected: Splits, ranks: int) -> bool:
    """Whether the operators outside of ``modules`` have the shapes of their parts in the captured copy, whose split
    modules are ``modules``."""

    def part(name: str) -> tuple[int, ...]:
        shape = graph.tensors[name].shape
        if not expected.origin.get(name, frozenset()) & modules.keys():
            return shape
        return local_shape(shape, {AXIS: expected.local[name]}, {AXIS: ranks})

    return _calls(graph, modules, part) == _calls(captured, modules, lambda name: captured.tensors[name].shape)


def _calls(
    graph: Graph, modules: Mapping[str, Split], shape_of: Callable[[str], tuple[int, ...]]
) -> dict[str, list[tuple[str, list[tuple[int, ...]]]]]:
    """The forward operators of each module that is not split, in order, with the shapes of their outputs. Copies are
    left out: whether a view needs one depends on sizes of 1."""
    calls: dict[str, list[tuple[str, list[tuple[int, ...]]]]] = {}
    for operator in graph.operators:
        kind = operator.name.rpartition(":")[2].partition("#")[0]
        if not operator.backward and operator.module not in modules and kind != "clone":
            shapes = [shape_of(name) for name in operator.outputs]
            calls.setdefault(operator.module, []).append((VIEWS.get(kind, kind), shapes))
    return calls


VIEWS = {"_unsafe_view": "view"}


def _on_one_rank(model: nn.Module, modules: Mapping[str, Split], ranks: int) -> nn.Module:
    """A copy of the model whose split layers have the weights of one rank, without values."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    shrunk = copy.deepcopy(model, memo)
    for path, split in modules.items():
        module = shrunk.get_submodule(path)
        outputs = split.style == "column"
        dim = 0 if outputs == (split.kind == "linear") else 1
        _shrink(module, "weight", dim, ranks)
        if outputs and getattr(module, "bias", None) is not None:
            _shrink(module, "bias", 0, ranks)
        forward: Callable[..., Tensor] = module.forward
        if split.gathered:
            module.forward = partial(_gathered, forward, ranks)
        elif split.whole_input:
            module.forward = partial(_of_a_part, forward, ranks)
    return shrunk


def _shrink(module: nn.Module, name: str, dim: int, ranks: int) -> None:
    whole: nn.Parameter = getattr(module, name)
    shape = list(whole.shape)
    shape[dim] //= ranks
    part = torch.empty(shape, dtype=whole.dtype, device="meta")
    setattr(module, name, nn.Parameter(part, whole.requires_grad))


def _gathered(forward: Callable[..., Tensor], ranks: int, *inputs: Any, **named: Any) -> Tensor:
    return torch.cat([forward(*inputs, **named)] * ranks, dim=-1)


def _of_a_part(forward: Callable[..., Tensor], ranks: int, whole: Tensor, **named: Any) -> Tensor:
    return forward(whole.narrow(-1, 0, whole.shape[-1] // ranks), **named)
