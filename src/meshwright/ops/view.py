"""Operators that move elements without computing: views, permutations, slices, joins."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, letters, make_rule, neutral, normalize_dim

aten = torch.ops.aten


def common_factors(left: list[int], right: list[int]) -> tuple[list[list[str]], list[list[str]], dict[str, int]]:
    """Factors that explain a reshape from ``left`` to ``right``: ``[8, 16, 64] -> [128, 4, 16]`` is
    ``b s (h d) -> (b s) h d``. Dims that share no factors get ``!`` letters of their own."""
    fresh = neutral("_")
    sizes: dict[str, int] = {}
    names_left: list[list[str]] = [[] for _ in left]
    names_right: list[list[str]] = [[] for _ in right]
    i = j = 0
    while i < len(left) or j < len(right):
        if i < len(left) and left[i] == 1 and (j >= len(right) or right[j] != 1):
            i += 1
            continue
        if j < len(right) and right[j] == 1 and (i >= len(left) or left[i] != 1):
            j += 1
            continue
        if i >= len(left) or j >= len(right):
            break
        start_i, start_j = i, j
        product_left, product_right = left[i], right[j]
        while product_left != product_right:
            if product_left < product_right:
                i += 1
                product_left *= left[i]
            else:
                j += 1
                product_right *= right[j]
        i, j = i + 1, j + 1
        _refine(left, right, (start_i, i), (start_j, j), names_left, names_right, sizes, fresh)
    return names_left, names_right, sizes


def _refine(
    left: list[int], right: list[int], span_left: tuple[int, int], span_right: tuple[int, int],
    names_left: list[list[str]], names_right: list[list[str]], sizes: dict[str, int], fresh: Any,
) -> None:  # fmt: skip
    a, b = span_left[0], span_right[0]
    rest_a, rest_b = left[a], right[b]
    found: list[tuple[int, int, int]] = []
    while a < span_left[1] and b < span_right[1]:
        small, large = min(rest_a, rest_b), max(rest_a, rest_b)
        if small == 0 or large % small:
            for index in range(*span_left):
                names_left[index] = [f"!{next(fresh)}"]
                sizes[names_left[index][0][1:]] = left[index]
            for index in range(*span_right):
                names_right[index] = [f"!{next(fresh)}"]
                sizes[names_right[index][0][1:]] = right[index]
            return
        found.append((a, b, small))
        rest_a, rest_b = rest_a // small, rest_b // small
        if rest_a == 1:
            a += 1
            rest_a = left[a] if a < span_left[1] else 1
        if rest_b == 1:
            b += 1
            rest_b = right[b] if b < span_right[1] else 1
    for index_left, index_right, size in found:
        if size == 1:
            continue
        name = next(fresh)
        sizes[name] = size
        names_left[index_left].append(name)
        names_right[index_right].append(name)


def _dims_text(names: list[list[str]], shape: list[int]) -> str:
    texts = []
    for dim, size in zip(names, shape, strict=True):
        texts.append(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" if dim else str(size))
    return " ".join(texts) or "."


def view_rule(call: Call) -> Rule:
    """A reshape: both sides are written in their common factors."""
    left, right = list(call.tensors[0].shape), list(call.outputs[0].shape)
    names_left, names_right, sizes = common_factors(left, right)
    pattern = f"^{_dims_text(names_left, left)} -> {_dims_text(names_right, right)}"
    return Rule(pattern=pattern, sizes=sizes)


def view_local(local: Local) -> Any:
    return local.call(aten.reshape.default, local.args[0], local.shape())


def permute_rule(call: Call) -> Rule:
    """``b s h -> b h s``."""
    rank = call.tensors[0].dim()
    names = letters(rank)
    if call.target is aten.t.default:
        order = [1, 0] if rank == 2 else list(range(rank))
    elif call.target is aten.transpose.int:
        first, second = (normalize_dim(dim, rank) for dim in call.args[1:3])
        order = list(range(rank))
        order[first], order[second] = second, first
    else:
        order = [normalize_dim(dim, rank) for dim in call.args[1]]
    return make_rule(call, f"^{' '.join(names) or '.'} -> {' '.join(names[dim] for dim in order) or '.'}")


def unsqueeze_rule(call: Call) -> Rule:
    """Dims of size 1 that come or go."""
    names = [
        name if size != 1 else "1"
        for name, size in zip(letters(call.tensors[0].dim()), call.tensors[0].shape, strict=True)
    ]
    kept = iter(name for name in names if name != "1")
    right = ["1" if size == 1 else next(kept) for size in call.outputs[0].shape]
    return make_rule(call, f"^{' '.join(names) or '.'} -> {' '.join(right) or '.'}")


def expand_rule(call: Call) -> Rule:
    """``b 1 k -> b s k``: the new factor can be split, it costs nothing."""
    source, output = call.tensors[0], call.outputs[0]
    offset = output.dim() - source.dim()
    right = [name if size != 1 else "1" for name, size in zip(letters(output.dim()), output.shape, strict=True)]
    left = [
        right[offset + index] if size == output.shape[offset + index] else "1"
        for index, size in enumerate(source.shape)
    ]
    return make_rule(call, f"^{' '.join(left) or '.'} -> {' '.join(right) or '.'}")


def expand_local(local: Local) -> Any:
    return local.call(aten.expand.default, local.args[0], local.shape())


def slice_rule(call: Call) -> Rule:
    """A slice keeps its dim whole, unless it takes all of it."""
    source, output = call.tensors[0], call.outputs[0]
    left, right = letters(source.dim()), letters(output.dim())
    for index, (before, after) in enumerate(zip(source.shape, output.shape, strict=True)):
        if before != after:
            left[index], right[index] = f"!x{index}", f"!y{index}"
    return make_rule(call, f"^{' '.join(left)} -> {' '.join(right)}")


def select_rule(call: Call) -> Rule:
    """One index of a dim."""
    rank = call.tensors[0].dim()
    dim = normalize_dim(call.args[1], rank)
    names = letters(rank, fixed=(dim,))
    right = [name for index, name in enumerate(names) if index != dim]
    return make_rule(call, f"^{' '.join(names)} -> {' '.join(right) or '.'}")


def scatter_back_rule(call: Call) -> Rule:
    """Gradients of slice and select: zeros but for the part that was taken."""
    source, output = call.tensors[0], call.outputs[0]
    dim = normalize_dim(call.args[2], output.dim())
    right = letters(output.dim())
    if source.dim() == output.dim():
        left = list(right)
        if source.shape[dim] != output.shape[dim]:
            left[dim], right[dim] = "!x", "!y"
    else:
        left = [name for index, name in enumerate(right) if index != dim]
        right[dim] = f"!{right[dim]}"
    return make_rule(call, f"^{' '.join(left) or '.'} -> {' '.join(right)}")


def scatter_into_rule(call: Call) -> Rule:
    """slice_scatter and select_scatter: the dim that a part of is overwritten stays whole."""
    target, source = call.tensors
    dim = normalize_dim(call.argument(2, "dim", 0), target.dim())
    left = letters(target.dim())
    right = list(left)
    if source.dim() < target.dim():
        left[dim] = f"!{left[dim]}"
        del right[dim]
    elif source.shape[dim] != target.shape[dim]:
        left[dim], right[dim] = "!x", "!y"
    one = " ".join(left)
    return make_rule(call, f"^{one}, ^{' '.join(right) or '.'} -> {one}")


def scatter_back_local(local: Local) -> Any:
    return local.call(local.target, local.args[0], local.shape(), *local.args[2:], **local.kwargs)


def split_rule(call: Call) -> Rule:
    """Equal parts share their factors with the whole: ``b (3 f) -> b f, b f, b f``."""
    source = call.tensors[0]
    rank = source.dim()
    dim = normalize_dim(call.argument(2, "dim", 0), rank)
    count = len(call.outputs)
    names = letters(rank)
    equal = len({output.shape[dim] for output in call.outputs}) == 1
    if count == 1:
        return make_rule(call, f"^{' '.join(names)} -> {' '.join(names)}")
    left = list(names)
    left[dim] = f"({count} {names[dim]})" if equal else "!x"
    outputs = []
    for index in range(count):
        right = list(names)
        right[dim] = names[dim] if equal else f"!y{index}"
        outputs.append(" ".join(right))
    return make_rule(call, f"^{' '.join(left)} -> {', '.join(outputs)}")


def split_local(local: Local) -> Any:
    rank = len(local.shape())
    dim = normalize_dim(local.args[2] if len(local.args) > 2 else local.kwargs.get("dim", 0), rank)
    if isinstance(local.args[1], int):
        return local.call(local.target, local.args[0], local.shape()[dim], dim)
    sizes = [local.shape(index)[dim] for index in range(len(local.args[1]))]
    return local.call(local.target, local.args[0], sizes, dim)


def unbind_rule(call: Call) -> Rule:
    """A dim taken apart."""
    rank = call.tensors[0].dim()
    dim = normalize_dim(call.argument(1, "dim", 0), rank)
    names = letters(rank, fixed=(dim,))
    right = " ".join(name for index, name in enumerate(names) if index != dim) or "."
    return make_rule(call, f"^{' '.join(names)} -> {', '.join([right] * len(call.outputs))}")


def cat_rule(call: Call) -> Rule:
    """Equal parts share their factors with the whole: ``b f, b f -> b (2 f)``."""
    tensors = call.tensors
    rank = tensors[0].dim()
    dim = normalize_dim(call.argument(1, "dim", 0), rank)
    names = letters(rank)
    equal = len({tensor.shape[dim] for tensor in tensors}) == 1
    parts = []
    for index in range(len(tensors)):
        part = list(names)
        if not equal:
            part[dim] = f"!y{index}"
        parts.append("^" + " ".join(part))
    right = list(names)
    right[dim] = "!x" if not equal else names[dim] if len(tensors) == 1 else f"({len(tensors)} {names[dim]})"
    return make_rule(call, f"{', '.join(parts)} -> {' '.join(right)}")


def cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Canonical cat: without the empty tensors that PyTorch allows for history's sake; of one tensor, itself."""
    full = [tensor for tensor in tensors if tensor.numel() or tensor.dim() != 1]
    if len(full) == 1:
        return full[0]
    return NotImplemented if len(full) == len(tensors) else aten.cat.default(full, dim)


def view(self: Tensor, size: list[int]) -> Tensor:
    """Canonical view: of a copy, where the strides do not allow a view. They are not those of the user's step where
    an operator that worked in place has become one that does not."""
    if self.is_contiguous():
        return NotImplemented
    with _disable_current_modes():
        strided = torch.empty_strided(self.shape, self.stride(), device="meta")
        try:
            strided.view(size)
        except RuntimeError:
            pass
        else:
            return NotImplemented
    return aten.view.default(aten.clone.default(self, memory_format=torch.contiguous_format), size)


def stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Canonical stack: a cat of unsqueezed tensors."""
    return aten.cat.default([aten.unsqueeze.default(tensor, dim) for tensor in tensors], dim)


def pixel_shuffle(self: Tensor, upscale_factor: int) -> Tensor:
    """Canonical form: channels become pixels by a permutation."""
    *lead, channels, height, width = self.shape
    times, count = upscale_factor, len(lead)
    whole = self.reshape(*lead, channels // times**2, times, times, height, width)
    order = [*range(count), *(count + index for index in (0, 3, 1, 4, 2))]
    return whole.permute(order).reshape(*lead, channels // times**2, height * times, width * times)


def pixel_unshuffle(self: Tensor, downscale_factor: int) -> Tensor:
    """Canonical form: pixels become channels by a permutation."""
    *lead, channels, height, width = self.shape
    times, count = downscale_factor, len(lead)
    whole = self.reshape(*lead, channels, height // times, times, width // times, times)
    order = [*range(count), *(count + index for index in (0, 2, 4, 1, 3))]
    return whole.permute(order).reshape(*lead, channels * times**2, height // times, width // times)


def pad_rule(call: Call) -> Rule:
    """Padded dims stay whole."""
    source, output = call.tensors[0], call.outputs[0]
    left, right = letters(source.dim()), letters(output.dim())
    padding = list(call.args[1])
    for index in range(len(padding) // 2):
        if any(padding[2 * index : 2 * index + 2]):
            dim = source.dim() - 1 - index
            left[dim], right[dim] = f"!x{dim}", f"!y{dim}"
    linear = "^" if call.argument(2, "value", 0) == 0 else ""
    return make_rule(call, f"{linear}{' '.join(left)} -> {' '.join(right)}")


def repeat_rule(call: Call) -> Rule:
    """Dims repeated n times: ``b k -> (3 b) k``."""
    source, output = call.tensors[0], call.outputs[0]
    offset = output.dim() - source.dim()
    names = letters(source.dim())
    right = []
    for index, times in enumerate(call.args[1]):
        if index < offset:
            right.append(str(times))
        else:
            name = names[index - offset]
            right.append(name if times == 1 else f"({times} {name})")
    return make_rule(call, f"^{' '.join(names) or '.'} -> {' '.join(right) or '.'}")


def triangle_rule(call: Call) -> Rule:
    """tril and triu look at positions: the last two dims stay whole."""
    rank = call.tensors[0].dim()
    names = " ".join(letters(rank, fixed=(rank - 2, rank - 1)))
    return make_rule(call, f"^{names} -> {names}")


def flip_rule(call: Call) -> Rule:
    """Flipped (or rolled) dims stay whole."""
    rank = call.tensors[0].dim()
    dims = call.args[1] if call.target is aten.flip.default else (call.argument(2, "dims") or list(range(rank)))
    names = " ".join(letters(rank, fixed=tuple(normalize_dim(dim, rank) for dim in dims))) or "."
    return make_rule(call, f"^{names} -> {names}")


_VIEW = OperatorRule(view_rule, view_local)
_PERMUTE = OperatorRule(permute_rule)
_UNSQUEEZE = OperatorRule(unsqueeze_rule)
_SQUEEZE = OperatorRule(unsqueeze_rule, view_local)
_SPLIT = OperatorRule(split_rule, split_local)
_SCATTER_BACK = OperatorRule(scatter_back_rule, scatter_back_local)

RULES = {
    aten.view.default: _VIEW,
    aten._unsafe_view.default: _VIEW,
    aten.reshape.default: _VIEW,
    aten.t.default: _PERMUTE,
    aten.transpose.int: _PERMUTE,
    aten.permute.default: _PERMUTE,
    aten.unsqueeze.default: _UNSQUEEZE,
    aten.squeeze.default: _SQUEEZE,
    aten.squeeze.dim: _SQUEEZE,
    aten.squeeze.dims: _SQUEEZE,
    aten.expand.default: OperatorRule(expand_rule, expand_local),
    aten.slice.Tensor: OperatorRule(slice_rule),
    aten.select.int: OperatorRule(select_rule),
    aten.slice_backward.default: _SCATTER_BACK,
    aten.select_backward.default: _SCATTER_BACK,
    aten.split.Tensor: _SPLIT,
    aten.split_with_sizes.default: _SPLIT,
    aten.unsafe_split.Tensor: _SPLIT,
    aten.unsafe_split_with_sizes.default: _SPLIT,
    aten.slice_scatter.default: OperatorRule(scatter_into_rule),
    aten.select_scatter.default: OperatorRule(scatter_into_rule),
    aten.unbind.int: OperatorRule(unbind_rule),
    aten.cat.default: OperatorRule(cat_rule),
    aten.constant_pad_nd.default: OperatorRule(pad_rule),
    aten.repeat.default: OperatorRule(repeat_rule),
    aten.tril.default: OperatorRule(triangle_rule),
    aten.triu.default: OperatorRule(triangle_rule),
    aten.flip.default: OperatorRule(flip_rule),
    aten.roll.default: OperatorRule(flip_rule),
}

CANONICAL = {
    aten.cat.default: cat,
    aten.pixel_shuffle.default: pixel_shuffle,
    aten.pixel_unshuffle.default: pixel_unshuffle,
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
"""Targets whose outputs share memory with their first input."""
