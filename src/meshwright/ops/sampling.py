"""Samples of images at positions of a grid, and grids of affine maps: images stay whole, positions are split."""

from collections.abc import Sequence
from typing import Any

import torch

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, make_rule
from meshwright.ops.space import SPACE, is_gradient, largest_flops

aten = torch.ops.aten


def _names(rank: int) -> tuple[str, str, str]:
    """Return the patterns of the image, the grid and the samples."""
    places = " ".join(f"{name}1" for name in SPACE[rank])
    return f"n c {' '.join(f'!{name}' for name in SPACE[rank])}", f"n {places} {rank}", f"n c {places}"


def sample_rule(call: Call) -> Rule:
    """``^n c !y !x, n y1 x1 2 -> n c y1 x1``; gradients are sums over positions (image) and channels (grid)."""
    image, grid, samples = _names(call.tensors[-1].dim() - 2)
    if not is_gradient(call.target):
        return make_rule(call, f"^{image}, {grid} -> {samples}")
    wanted = [image, grid][-len(call.outputs) :]
    return make_rule(call, f"^{samples}, {image}, {grid} -> {', '.join(wanted)}")


def affine_grid_rule(call: Call) -> Rule:
    """``^n !p !q -> n !y !x 2``, or the reverse: a position depends on its place in the whole image."""
    rank = max(tensor.dim() for tensor in (*call.tensors, *call.outputs)) - 2
    maps, grid = "n !p !q", f"n {' '.join(f'!{name}' for name in SPACE[rank])} {rank}"
    return make_rule(call, f"^{grid} -> {maps}" if is_gradient(call.target) else f"^{maps} -> {grid}")


def affine_grid_local(local: Local) -> Any:
    """Run ``aten.affine_grid_generator`` or its gradient on one rank, for the rank's samples."""
    value, size, *rest = local.args
    return local.call(local.target, value, _of_samples(size, local.length("n")), *rest, **local.kwargs)


def _of_samples(size: Sequence[int], samples: int) -> list[int]:
    return [samples, *size[1:]]


_SAMPLE = OperatorRule(sample_rule, flops=largest_flops)
_AFFINE = OperatorRule(affine_grid_rule, affine_grid_local, largest_flops)

RULES = {
    **dict.fromkeys([aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default], _SAMPLE),
    **dict.fromkeys([aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default], _SAMPLE),
    **dict.fromkeys([aten.affine_grid_generator.default, aten.affine_grid_generator_backward.default], _AFFINE),
}
