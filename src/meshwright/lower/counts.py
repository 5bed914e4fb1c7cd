"""Counts the kernels (with FLOPs and bytes) and the collectives of each call in a rank's lowered graph."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from meshwright.capture.outputs import outputs_of
from meshwright.capture.rules import Rules
from meshwright.ir.codec import codec_of
from meshwright.ir.convolution import work_of
from meshwright.ir.halo import most_rows
from meshwright.ir.kernel import (
    ALONE,
    AttentionSettings,
    AttentionSizes,
    ConvolutionSizes,
    ExpertSizes,
    Kernel,
    Operand,
    RingSizes,
    attention_of,
    drawing_bytes,
    in_float8,
    product_of,
)
from meshwright.ir.kind import kind_of_target
from meshwright.ir.opaque import read_call
from meshwright.ir.program import Collective, CollectiveKind
from meshwright.ir.shapes import shapes_of
from meshwright.lower.fuse import FUNCTIONAL
from meshwright.ops import collectives, experts, float8, opaque
from meshwright.ops.attention import SETTINGS_AT
from meshwright.ops.base import Call, OperatorRule, Target, arguments, contraction_flops
from meshwright.ops.convolution_algorithms import DIRECTIONS
from meshwright.ops.halo import each
from meshwright.ops.ring import num_steps
from meshwright.ops.table import operator_rule
from meshwright.torch_private import OpOverload

aten, ours = torch.ops.aten, torch.ops.meshwright

_KINDS: dict[Any, CollectiveKind] = {
    collectives.ALL_REDUCE: "all_reduce",
    collectives.ALL_GATHER: "all_gather",
    collectives.REDUCE_SCATTER: "reduce_scatter",
    collectives.ALL_TO_ALL: "all_to_all",
    collectives.GATHER_PARTS: "all_gather",
    collectives.REDUCE_TO_PARTS: "reduce_scatter",
    collectives.SHIFT: "shift",
    collectives.HALO_EXCHANGE: "halo",
    collectives.HALO_REDUCE: "halo",
    collectives.HALO_RETURN: "halo",
}
_PASSES = {
    ours.cross_entropy_backward.default: (("activation", 2, 1), ("pointwise", 2, 9)),
    aten.cumsum.default: (("reduction", 2, 1),),
}
"""Maps an operator to its kernels, with one entry for each kind. An entry has the kind, the number of times that these
kernels together read or write the largest tensor, and the number of kernels."""
_NOTHING = frozenset({aten.empty.memory_format, aten.new_empty.default})
_ACROSS: dict[Any, Target] = {
    ours.attention_ring.default: ours.attention.default,
    ours.attention_ring_backward.default: ours.attention_backward.default,
    ours.experts_across.default: ours.experts.default,
    ours.experts_across_backward.default: ours.experts_backward.default,
}
"""Maps an operator whose kernel communicates to the operator that computes the same result on a single rank."""
_RINGS = (ours.attention_ring.default, ours.attention_ring_backward.default)


def num_bytes(*values: Tensor) -> int:
    """The number of bytes in all elements of ``values``."""
    return sum(value.numel() * value.element_size() for value in values)


class Counter:
    """Counts the kernels of calls. Equal calls are counted only once, because a model repeats equal blocks. ``own``
    maps an operator to the user's rule."""

    def __init__(self, own: Mapping[Target, OperatorRule]) -> None:
        self._own, self._rules = own, Rules(own)
        self._known: dict[Hashable, tuple[Kernel, ...]] = {}

    def kernels(self, call: Call) -> tuple[Kernel, ...]:
        """The kernels of a call. The call must not be a view."""
        in_place = "out" in call.kwargs and call.kwargs["out"] is call.args[0]
        ring, mask = _ring(call) if call.target in _RINGS else (ALONE, None)
        sizes = _sizes(call.args), _sizes(tuple(call.kwargs.items())), _sizes(call.outputs)
        key = (call.target, in_place, ring, *sizes)
        if key not in self._known:
            self._known[key] = self._counted(call, in_place, ring, mask)
        return self._known[key]

    def _counted(
        self, call: Call, in_place: bool, ring: RingSizes = ALONE, mask: Tensor | None = None
    ) -> tuple[Kernel, ...]:
        target, outputs = call.target, call.outputs
        if target in _NOTHING:
            return ()
        call = _functional(call)
        dtype = str(outputs[0].dtype).removeprefix("torch.") if outputs else ""
        read, written = num_bytes(*call.tensors), num_bytes(*outputs)
        if target in _PASSES:
            largest = max(map(num_bytes, (*call.tensors, *outputs)))
            return tuple(Kernel(kind, dtype, 0.0, times * largest, calls) for kind, times, calls in _PASSES[target])
        if target is collectives.GATHER_MULTIPLY:
            whole, *products = outputs
            calls = (
                Call(aten.mm.default, (whole, weight), {}, (product,))
                for weight, product in zip(call.args[1], products, strict=True)
            )
            return tuple(kernel for each in calls for kernel in self._counted(each, False))
        if target is collectives.MULTIPLY_SCATTER:  # the terms of all ranks for this rank's rows, before they are added
            left, right = call.args[:2]
            terms = outputs_of(aten.mm.default, (left, right), {})
            (product,) = self._counted(Call(aten.mm.default, (left, right), {}, (terms,)), False)
            moved = num_bytes(terms, *outputs)
            return (
                msgspec.structs.replace(product, workspace_bytes=num_bytes(terms)),
                Kernel("reduction", dtype, 0.0, moved),
            )
        if target in opaque.RULES:
            return (_opaque(call, dtype, read + written),)
        if target is collectives.ADD_ROWS:  # in place: only these rows are read and written
            return (Kernel("pointwise", dtype, 0.0, 3 * num_bytes(call.args[1])),)
        if target is aten.convolution_backward.default:
            return tuple(self._convolution_backward(call, dtype))
        if target is float8.FLOAT8_MM:  # each operand is rounded first
            wide = self._counted(Call(aten.mm.default, call.args[:2], {}, outputs), False)
            rounded = tuple(
                Kernel("pointwise", dtype, 0.0, num_bytes(operand) + operand.numel()) for operand in call.args[:2]
            )
            return (*rounded, *map(in_float8, wide))
        if target in DIRECTIONS:
            return work_of(convolution_sizes(call, DIRECTIONS[target]), call.args[-1]).kernels
        kind = kind_of_target(str(target)) if isinstance(target, OpOverload) else "pointwise"
        if kind == "gather":  # only the looked-up rows are read, not the whole table
            return (Kernel(kind, dtype, 0.0, read - max(map(num_bytes, call.tensors), default=0) + 2 * written),)
        if kind == "scatter" and in_place:  # only some elements of a tensor change
            *_, changed = call.tensors
            return (Kernel(kind, dtype, 0.0, read - num_bytes(call.args[0]) + 2 * num_bytes(changed)),)
        flops = self._flops(call)
        product = _kernel(call, kind, dtype, flops * ring.size, read + written, ring, mask)
        if target is aten.convolution.default:
            product = msgspec.structs.replace(product, convolution=convolution_sizes(call, "forward"))
        if target in (aten.addmm.default, aten.addmm.out):  # the bias is written first, and the product added to it
            return product, Kernel("pointwise", dtype, 0.0, written)
        return (product,)

    def _flops(self, call: Call) -> float:
        if call.target in experts.KERNEL_FLOPS:
            return experts.KERNEL_FLOPS[call.target](call, None)
        operator = operator_rule(call.target, self._own)
        if operator is None:
            return 0.0
        by_rule = operator.flops is contraction_flops or call.target in self._own
        return self._rules.of(call).flops if by_rule else operator.flops(call, None)

    def _convolution_backward(self, call: Call, dtype: str) -> Sequence[Kernel]:
        """One kernel for each requested gradient: of the input, of the weight."""
        kernels: list[Kernel] = []
        for index, kind in enumerate(("convolution_input", "convolution_weight")):
            if call.args[-1][index]:
                output = call.outputs[len(kernels)]
                alone = [other == index for other in range(3)]
                flops = self._flops(Call(call.target, (*call.args[:-1], alone), {}, (output,)))
                gradient_call = Call(call.target, call.args, call.kwargs, (output,))
                gradient, images, weight = call.tensors[:3]
                moved = num_bytes(gradient, images if index else weight, output)
                sizes = convolution_sizes(call, ("input", "weight")[index])
                kernel = _kernel(gradient_call, kind, dtype, flops, moved)
                kernels.append(msgspec.structs.replace(kernel, convolution=sizes))
        return kernels


def convolution_sizes(call: Call, direction: str) -> ConvolutionSizes:
    """The sizes of a call of a convolution, or of one of its gradients."""
    if direction == "forward":
        (images, weight), output = call.tensors[:2], call.outputs[0]
    else:
        output, images, weight = call.tensors[:3]
    first = 2 + (direction != "forward") + (call.target not in DIRECTIONS)  # aten's calls have a bias
    *settings, transposed, _, groups = call.args[first : first + 6]
    image, out_size, kernel = (tuple(map(int, tensor.shape[2:])) for tensor in (images, output, weight))
    stride, padding, dilation = (tuple(each(setting, len(image))) for setting in settings)
    dtype = str(images.dtype).removeprefix("torch.")
    samples, channels = map(int, images.shape[:2])
    return ConvolutionSizes(
        direction, samples, channels, int(output.shape[1]), image, out_size, kernel, stride, padding, dilation, groups,
        transposed, dtype,
    )  # fmt: skip


def _sizes(value: Any) -> Hashable:
    """An argument or result as part of a key. A tensor is represented by its shape and dtype."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return tuple(map(_sizes, value)) if isinstance(value, tuple | list) else value


def _ring(call: Call) -> tuple[RingSizes, Tensor | None]:
    """The ring in which a call of attention runs, and its mask."""
    given = arguments(call)
    query, key, value, mask, size, balanced = (
        given[name] for name in ("query", "key", "value", "mask", "size", "balanced")
    )
    moving = [key, value, *([mask] if mask is not None and mask.shape[-1] == key.shape[2] else [])]
    steps = num_steps(query.shape[2], key.shape[2], size, given["index"], given["row"], given["window"])
    copied = () if balanced else tuple(tensor for tensor in moving if not tensor.is_contiguous())
    return RingSizes(size, steps, balanced, num_bytes(*moving), num_bytes(*copied)), mask


def _kernel(
    call: Call, kind: str, dtype: str, flops: float, moved_bytes: int, ring: RingSizes = ALONE,
    mask: Tensor | None = None,
) -> Kernel:  # fmt: skip
    """The call as a single kernel. If it is a matrix product or attention, the kernel has its sizes. ``mask``: the
    mask of attention in a ring. The call itself is counted without its mask."""
    operands = [_operand(tensor) for tensor in call.tensors]
    product = product_of(str(call.target), kind, operands, _operand(call.outputs[0]), flops) if call.outputs else None
    attention: AttentionSizes | None = None
    if call.target in SETTINGS_AT:
        given = arguments(call)
        settings = AttentionSettings(
            given["dropout"] > 0, given["causal"], given["window"], given["first"], given["algorithm"], ring
        )
        backward = kind == "attention_backward"
        if mask is not None:
            operands.insert(3 + backward, _operand(mask))
        attention = attention_of(backward, operands, settings)
    sizes = _expert_sizes(call) if call.target in experts.KERNELS else None
    drawn = drawing_bytes(call.outputs[0].shape) if kind == "random" else 0
    return Kernel(
        kind, dtype, flops, moved_bytes, product=product, attention=attention, experts=sizes, workspace_bytes=drawn
    )


def _expert_sizes(call: Call) -> ExpertSizes:
    backward = call.target in experts.BACKWARD
    tokens, index, _, up, down = call.tensors[backward : backward + 5]
    experts_here, hidden, width = map(int, up.shape)
    inner, result = int(down.shape[2]), int(down.shape[1])
    return ExpertSizes(len(tokens), index.numel(), experts_here, width, hidden, inner, result, backward)


def _operand(value: Tensor) -> Operand:
    return Operand(tuple(map(int, value.shape)), str(value.dtype).removeprefix("torch."))


def _functional(call: Call) -> Call:
    """A call with the same arithmetic that returns a new tensor and does not communicate."""
    target, args, kwargs = call.target, call.args, call.kwargs
    if target in (aten.addmm.default, aten.addmm_.default, aten.addmm.out):
        target, args, kwargs = aten.mm.default, args[1:3], {}
    elif target in _ACROSS:
        target = _ACROSS[target]
        if call.target in _RINGS:  # the last four say where the ring is; the mask may cover the keys of all ranks
            place = 3 if call.target is ours.attention_ring.default else 4
            args = (*args[:place], None, *args[place + 1 : -4])
        args = args[: len(target._schema.arguments)]  # type: ignore[attr-defined]
    elif target in FUNCTIONAL:
        target, keyword = FUNCTIONAL[target]
        kwargs = {name: value for name, value in kwargs.items() if name != keyword}
    elif "out" in kwargs:
        kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    return Call(target, args, kwargs, call.outputs)


def started(call: Call, axes: Mapping[str, int]) -> Collective | None:
    """The collective that a call starts; None if it starts none. ``axes`` maps a mesh axis to its size."""
    if call.target not in _KINDS:
        return None
    given = arguments(call)
    kind, axis = _KINDS[call.target], given["group"]
    if kind == "halo":
        (value,), ranges = call.tensors, tuple(zip(given["lows"], given["highs"], strict=True))
        size = num_bytes(value) // value.shape[given["dim"]] * most_rows(ranges, given["edges"])
    else:
        states = (given.get("state"), given.get("before"))
        crossing = [tensor for tensor in call.tensors if not any(tensor is state for state in states)]
        size = max(num_bytes(*call.outputs), num_bytes(*crossing))
    if given.get("codec"):
        return Collective(kind, axis, axes[axis], size, given["algorithm"], given["label"], *_coded(call, given))
    return Collective(kind, axis, axes[axis], size, given.get("algorithm", ""), given["label"])


def _coded(call: Call, given: Mapping[str, Any]) -> tuple[str, int, tuple[int, ...]]:
    """The codec of a collective, the bytes of an element, and the elements of the coded vectors that are added up."""
    codec = codec_of(given["codec"])
    shapes = shapes_of(given.get("shapes", ()))
    summed = codec.summed_lengths(shapes) if codec.exchange == "sums" else ()
    return given["codec"], call.tensors[0].element_size(), summed


def inside(call: Call, label: str) -> tuple[Collective, ...]:
    """The collectives that a call's kernel runs itself. A ring is counted as an all-gather that moves the same
    bytes."""
    if call.target in (collectives.GATHER_MULTIPLY, collectives.MULTIPLY_SCATTER):
        axis, size = call.args[-2:]
        if call.target is collectives.GATHER_MULTIPLY:
            return (Collective("all_gather", axis, size, num_bytes(call.outputs[0]), label=label),)
        return (Collective("reduce_scatter", axis, size, size * num_bytes(*call.outputs), label=label),)
    if call.target not in _ACROSS:
        return ()
    *given, axis, size = call.args
    back = call.target in (ours.attention_ring_backward.default, ours.experts_across_backward.default)
    counts: list[tuple[CollectiveKind, int]]
    if call.target in (ours.experts_across.default, ours.experts_across_backward.default):
        tokens, index = given[1:3] if back else given[:2]
        slots = index.shape[1]
        counts = [("all_to_all", slots * num_bytes(tokens))] * 2
        counts += [("all_to_all", slots * num_bytes(given[0]))] if back else []
    else:
        query, key, value = given[1:4] if back else given[:3]
        keys = num_bytes(key, value) * (2 if back else 1)  # their gradients travel with them
        window, row, _, index, balanced = given[-5:]
        steps = num_steps(query.shape[2], key.shape[2], size, index, row, window)
        counts = [("all_gather", keys * size * (steps - 1) // (size - 1))]
        counts += [("all_to_all", 2 * keys)] if balanced else []
    return tuple(Collective(kind, axis, size, count, label=label) for kind, count in counts)


def _opaque(call: Call, dtype: str, moved_bytes: int) -> Kernel:
    """A region as a kernel that takes the time that was measured."""
    backward = call.target is opaque.BACKWARD
    given = read_call(call.args[2 if backward else 1])
    cost = given.measured(backward)
    if cost is None:
        return Kernel("opaque", dtype, 0.0, moved_bytes)
    scratch = round(cost.scratch_bytes * given.share)
    return Kernel("opaque", dtype, 0.0, moved_bytes, measured_s=cost.seconds(given.share), workspace_bytes=scratch)
