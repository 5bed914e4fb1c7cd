"""Operators that move elements without computing: views, permutations, slices, joins."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, count, pairwise
from operator import mul
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, arguments, make_rule
from meshwright.ops.patterns import aligned, letters, named, normalize_dim, operand
from meshwright.torch_private import disable_current_modes

aten = torch.ops.aten


def common_factors(left: list[int], right: list[int]) -> tuple[list[list[str]], list[list[str]], dict[str, int]]:
    """Return the common factors of a reshape from ``left`` to ``right``, and their sizes. For example,
    ``[8, 16, 64] -> [128, 4, 16]`` is ``b s (h d) -> (b s) h d``. Dims without common factors get ``!`` letters."""
    fresh = (f"_{index}" for index in count())
    sizes: dict[str, int] = {}
    names: tuple[list[list[str]], list[list[str]]] = [[] for _ in left], [[] for _ in right]
    for spans in _spans(left, right):
        sides = list(zip((left, right), spans, names, strict=True))
        ends = [list(accumulate((shape[dim] for dim in span), mul)) for shape, span, _ in sides]
        cuts = sorted({1, *ends[0], *ends[1]})
        if 0 in cuts or any(large % small for small, large in pairwise(cuts)):
            for shape, span, of in sides:
                for dim in span:
                    name = next(fresh)
                    of[dim], sizes[name] = [f"!{name}"], shape[dim]
            continue
        for small, large in pairwise(cuts):
            name = next(fresh)
            sizes[name] = large // small
            for (_, span, of), reached in zip(sides, ends, strict=True):
                of[span[bisect_left(reached, large)]].append(name)
    return *names, sizes


_EMPTY = 2**61 - 1
"""A prime that stands for the size 0 in ``_spans``, which compares products of sizes."""


def _spans(left: list[int], right: list[int]) -> Iterator[tuple[range, range]]:
    """Yield the shortest runs of dims of ``left`` and ``right`` that have equal numbers of elements. Dims of size 1 at
    the ends of a run are left out."""
    left_ends, right_ends = (list(accumulate((size or _EMPTY for size in shape), mul)) for shape in (left, right))
    for before, reached in pairwise(sorted({1, *left_ends} & {1, *right_ends})):
        yield (
            range(bisect_right(left_ends, before), bisect_left(left_ends, reached) + 1),
            range(bisect_right(right_ends, before), bisect_left(right_ends, reached) + 1),
        )


def _dims_text(names: list[list[str]], shape: list[int]) -> str:
    return operand([
        dim[0] if len(dim) == 1 else f"({' '.join(dim)})" if dim else str(size)
        for dim, size in zip(names, shape, strict=True)
    ])  # fmt: skip


def view_rule(call: Call) -> Rule:
    """The pattern of a reshape, squeeze or unsqueeze has the common factors of both shapes."""
    left, right = list(call.tensors[0].shape), list(call.outputs[0].shape)
    names_left, names_right, sizes = common_factors(left, right)
    pattern = f"^{_dims_text(names_left, left)} -> {_dims_text(names_right, right)}"
    return Rule(pattern=pattern, sizes=sizes)


def view_local(local: Local) -> Any:
    """Run a view, reshape or squeeze on one rank as a reshape to the shape of the rank's part."""
    return local.call(aten.reshape.default, local.args[0], local.shape())


def permute_rule(call: Call) -> Rule:
    """``b s h -> b h s``."""
    rank = call.tensors[0].dim()
    names, order = letters(rank), list(range(rank))
    if call.target is aten.permute.default:
        order = [normalize_dim(dim, rank) for dim in call.args[1]]
    elif rank > 1:
        first, second = (0, 1) if call.target is aten.t.default else call.args[1:3]
        order[first], order[second] = order[second], order[first]
    return make_rule(call, f"^{operand(names)} -> {operand([names[dim] for dim in order])}")


def expand_rule(call: Call) -> Rule:
    """``b 1 k -> b s k``: the new factor can be split at no cost."""
    shape = call.outputs[0].shape
    right = named(shape)
    return make_rule(call, f"^{operand(aligned(right, shape, call.tensors[0].shape))} -> {operand(right)}")


def expand_local(local: Local) -> Any:
    """Run ``aten.expand`` on one rank, to the shape of the rank's part."""
    return local.call(aten.expand.default, local.args[0], local.shape())


def slice_rule(call: Call) -> Rule:
    """A sliced dim stays whole, unless the slice takes all of it."""
    source, output = call.tensors[0], call.outputs[0]
    left, right = letters(source.dim()), letters(output.dim())
    for index, (before, after) in enumerate(zip(source.shape, output.shape, strict=True)):
        if before != after:
            left[index], right[index] = f"!x{index}", f"!y{index}"
    return make_rule(call, f"^{operand(left)} -> {operand(right)}")


def select_rule(call: Call) -> Rule:
    """The dim from which select takes one index, or from which unbind takes every index, stays whole."""
    rank = call.tensors[0].dim()
    names = letters(rank, fixed=(normalize_dim(arguments(call)["dim"], rank),))
    right = operand([name for name in names if name[0] != "!"])
    return make_rule(call, f"^{operand(names)} -> {', '.join([right] * len(call.outputs))}")


def _part_of(whole: Tensor, part: Tensor, dim: int, names: tuple[str, str]) -> tuple[str, str]:
    """Return the patterns of a tensor and of the part that slice or select takes from one dim. If the part has only
    some of the dim's rows, ``names`` are the letters of the dim in the tensor and in the part."""
    dim = normalize_dim(dim, whole.dim())
    left = letters(whole.dim())
    right = list(left)
    if part.dim() < whole.dim():
        left[dim] = f"!{left[dim]}"
        del right[dim]
    elif part.shape[dim] != whole.shape[dim]:
        left[dim], right[dim] = names
    return operand(left), operand(right)


def scatter_back_rule(call: Call) -> Rule:
    """The gradient of slice or select: zero outside of the part that was taken, so the dim of this part stays whole."""
    whole, part = _part_of(call.outputs[0], call.tensors[0], call.args[2], ("!y", "!x"))
    return make_rule(call, f"^{part} -> {whole}")


def scatter_into_rule(call: Call) -> Rule:
    """The dim that slice_scatter or select_scatter overwrites in part stays whole."""
    target, source = call.tensors
    whole, part = _part_of(target, source, arguments(call)["dim"], ("!x", "!y"))
    return make_rule(call, f"^{whole}, ^{part} -> {whole}")


def scatter_back_local(local: Local) -> Any:
    """Run the gradient of slice, select or diagonal on one rank, with the shape of the rank's part."""
    return local.call(local.target, local.args[0], local.shape(), *local.args[2:], **local.kwargs)


def _joined(whole: Tensor, parts: Sequence[Tensor], dim: int) -> tuple[str, list[str]]:
    """Return the pattern of a tensor and the patterns of its parts along a dim. Parts of equal size have the tensor's
    factors: ``b (3 f)`` and ``b f, b f, b f``."""
    dim, names = normalize_dim(dim, whole.dim()), letters(whole.dim())
    equal = len({part.shape[dim] for part in parts}) == 1

    def spelled(middle: str) -> str:
        return operand([*names[:dim], middle, *names[dim + 1 :]])

    together = "!x" if not equal else names[dim] if len(parts) == 1 else f"({len(parts)} {names[dim]})"
    return spelled(together), [spelled(names[dim] if equal else f"!y{index}") for index in range(len(parts))]


def split_rule(call: Call) -> Rule:
    """Equal parts share their factors with the whole: ``b (3 f) -> b f, b f, b f``."""
    whole, parts = _joined(call.tensors[0], call.outputs, arguments(call)["dim"])
    return make_rule(call, f"^{whole} -> {', '.join(parts)}")


def split_local(local: Local) -> Any:
    """Run ``aten.split`` or ``split_with_sizes`` on one rank, with the sizes that the outputs have on this rank."""
    dim = normalize_dim(arguments(local)["dim"], len(local.shape()))
    if isinstance(local.args[1], int):
        return local.call(local.target, local.args[0], local.shape()[dim], dim)
    sizes = [local.shape(index)[dim] for index in range(len(local.args[1]))]
    return local.call(local.target, local.args[0], sizes, dim)


def cat_rule(call: Call) -> Rule:
    """Equal parts share their factors with the whole: ``b f, b f -> b (2 f)``."""
    whole, parts = _joined(call.outputs[0], call.tensors, arguments(call)["dim"])
    return make_rule(call, f"{', '.join(f'^{part}' for part in parts)} -> {whole}")


def cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Capture cat without the empty 1-d tensors that PyTorch ignores. A single remaining tensor needs no cat."""
    full = [tensor for tensor in tensors if tensor.numel() or tensor.dim() != 1]
    if len(full) == 1:
        return full[0]
    return NotImplemented if len(full) == len(tensors) else aten.cat.default(full, dim)


def view(self: Tensor, size: list[int]) -> Tensor:
    """Capture a view of a contiguous copy if the strides of the tensor do not allow a view. Strides can differ from the
    strides in the user's step, because capture replaces in-place operators."""
    if self.is_contiguous():
        return NotImplemented
    with disable_current_modes():
        strided = torch.empty_strided(self.shape, self.stride(), device="meta")
        try:
            strided.view(size)
        except RuntimeError:
            pass
        else:
            return NotImplemented
    return aten.view.default(aten.clone.default(self, memory_format=torch.contiguous_format), size)


def stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Capture stack as a cat of unsqueezed tensors."""
    return aten.cat.default([aten.unsqueeze.default(tensor, dim) for tensor in tensors], dim)


def pixel_shuffle(self: Tensor, upscale_factor: int) -> Tensor:
    """Capture pixel_shuffle as a permutation between reshapes, which turns channels into pixels."""
    *lead, channels, height, width = self.shape
    times, count = upscale_factor, len(lead)
    whole = self.reshape(*lead, channels // times**2, times, times, height, width)
    order = [*range(count), *(count + index for index in (0, 3, 1, 4, 2))]
    return whole.permute(order).reshape(*lead, channels // times**2, height * times, width * times)


def rot90(self: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Capture rot90 as flips and a transposition."""
    first, second = dims
    flipped: Tensor = self.flip([[], [second], [first, second], [first]][k % 4])
    return flipped.transpose(first, second) if k % 2 else flipped


def channel_shuffle(self: Tensor, groups: int) -> Tensor:
    """Capture channel_shuffle as a transposition between reshapes."""
    samples, channels, *space = self.shape
    return self.reshape(samples, groups, channels // groups, *space).transpose(1, 2).reshape(self.shape)


def pixel_unshuffle(self: Tensor, downscale_factor: int) -> Tensor:
    """Capture pixel_unshuffle as a permutation between reshapes, which turns pixels into channels."""
    *lead, channels, height, width = self.shape
    times, count = downscale_factor, len(lead)
    whole = self.reshape(*lead, channels, height // times, times, width // times, times)
    order = [*range(count), *(count + index for index in (0, 2, 4, 1, 3))]
    return whole.permute(order).reshape(*lead, channels * times**2, height // times, width // times)


def repeat_rule(call: Call) -> Rule:
    """A repeated dim gets a literal factor: ``b k -> (3 b) k`` repeats the first dim three times."""
    rank, repeats = call.tensors[0].dim(), call.args[1]
    names, offset = letters(rank), len(repeats) - rank
    right = [*map(str, repeats[:offset])]
    right += [name if times == 1 else f"({times} {name})" for name, times in zip(names, repeats[offset:], strict=True)]
    return make_rule(call, f"^{operand(names)} -> {operand(right)}")


def positions_rule(call: Call) -> Rule:
    """Dims whose positions matter (flipped dims, rolled dims, the dims of a triangle) stay whole."""
    rank = call.tensors[0].dim()
    dims = arguments(call).get("dims", (-2, -1))
    if call.target is aten.roll.default and not dims:
        dims = range(rank)
    names = operand(letters(rank, fixed=tuple(normalize_dim(dim, rank) for dim in dims)))
    return make_rule(call, f"^{names} -> {names}")


def diagonal_rule(call: Call) -> Rule:
    """``^b !m !n -> b !d``, or the reverse: the two dims of the diagonal stay whole."""
    given, source, output = arguments(call), call.tensors[0], call.outputs[0]
    rank = max(source.dim(), output.dim())
    pair = tuple(normalize_dim(given[name], rank) for name in ("dim1", "dim2"))
    names = letters(rank, fixed=pair)
    whole, part = operand(names), operand([*(name for name in names if name[0] != "!"), "!d"])
    if len(call.tensors) > 1:
        return make_rule(call, f"^{whole}, ^{part} -> {whole}")
    return make_rule(call, f"^{whole} -> {part}" if source.dim() == rank else f"^{part} -> {whole}")


_VIEW = OperatorRule(view_rule, view_local)
_PERMUTE = OperatorRule(permute_rule)
_SELECT = OperatorRule(select_rule)
_SPLIT = OperatorRule(split_rule, split_local)
_SCATTER_BACK = OperatorRule(scatter_back_rule, scatter_back_local)
_SCATTER_INTO = OperatorRule(scatter_into_rule)
_POSITIONS = OperatorRule(positions_rule)
_DIAGONAL = OperatorRule(diagonal_rule)

RULES = {
    **dict.fromkeys([aten.view.default, aten._unsafe_view.default, aten.reshape.default], _VIEW),
    **dict.fromkeys([aten.t.default, aten.transpose.int, aten.permute.default], _PERMUTE),
    aten.unsqueeze.default: OperatorRule(view_rule),
    **dict.fromkeys([aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims], _VIEW),
    aten.expand.default: OperatorRule(expand_rule, expand_local),
    aten.slice.Tensor: OperatorRule(slice_rule),
    **dict.fromkeys([aten.select.int, aten.unbind.int], _SELECT),
    **dict.fromkeys([aten.slice_backward.default, aten.select_backward.default], _SCATTER_BACK),
    **dict.fromkeys([aten.split.Tensor, aten.split_with_sizes.default], _SPLIT),
    **dict.fromkeys([aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default], _SPLIT),
    **dict.fromkeys([aten.slice_scatter.default, aten.select_scatter.default], _SCATTER_INTO),
    **dict.fromkeys([aten.diagonal.default, aten.diagonal_scatter.default, aten.diag_embed.default], _DIAGONAL),
    aten.diagonal_backward.default: OperatorRule(diagonal_rule, scatter_back_local),
    aten.cat.default: OperatorRule(cat_rule),
    aten.repeat.default: OperatorRule(repeat_rule),
    **dict.fromkeys([aten.tril.default, aten.triu.default, aten.flip.default, aten.roll.default], _POSITIONS),
}

CANONICAL = {
    aten.cat.default: cat,
    aten.channel_shuffle.default: channel_shuffle,
    aten.pixel_shuffle.default: pixel_shuffle,
    aten.pixel_unshuffle.default: pixel_unshuffle,
    aten.rot90.default: rot90,
    aten.stack.default: stack,
    aten.view.default: view,
}
VIEWS = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default,
        aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
        aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
        aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.alias.default, aten.detach.default,
        aten.as_strided.default, aten.diagonal.default, aten.unfold.default, aten.view.dtype, aten.view_as_real.default,
        aten.view_as_complex.default,
    }
)  # fmt: skip
"""Operators whose outputs share memory with their first input."""
