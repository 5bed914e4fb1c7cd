"""Fourier transforms and views of complex numbers: split over every dim that is not transformed."""

from typing import Any

import torch

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, elementwise_flops, make_rule
from meshwright.ops.patterns import letters, normalize_dim, operand

aten = torch.ops.aten


def transform_rule(call: Call) -> Rule:
    """``^b !x -> b !x``; a transform from or to real numbers changes the length: ``^b !x -> b !y``."""
    source, output = call.tensors[0], call.outputs[0]
    dims = tuple(normalize_dim(dim, source.dim()) for dim in call.args[1])
    left, right = letters(source.dim(), fixed=dims), letters(source.dim(), fixed=dims)
    for dim in dims:
        if source.shape[dim] != output.shape[dim]:
            right[dim] = f"!y{dim}"
    return make_rule(call, f"^{' '.join(left)} -> {' '.join(right)}")


def parts_rule(call: Call) -> Rule:
    """``^b s -> b s 2`` (real and imaginary part), or the reverse."""
    names = letters(min(call.tensors[0].dim(), call.outputs[0].dim()))
    complex_dims, real_dims = operand(names), operand([*names, "2"])
    return make_rule(
        call,
        f"^{real_dims} -> {complex_dims}"
        if call.target is aten.view_as_complex.default
        else f"^{complex_dims} -> {real_dims}",
    )


def conjugate_rule(call: Call) -> Rule:
    """``^b s -> b s``; a Python number as the argument is not an operand."""
    names = operand(letters(call.outputs[0].dim()))
    return make_rule(call, f"{f'^{names}' if call.tensors else ''} -> {names}")


def conjugate_local(local: Local) -> Any:
    """Compute the conjugate in memory: a collective would send a lazy conjugate view without conjugating its values."""
    value = local.args[0]
    if isinstance(value, complex):
        return local.call(aten.scalar_tensor.default, value.conjugate(), dtype=local.dtype())
    return local.call(aten.conj_physical.default, value)


_TRANSFORM = OperatorRule(transform_rule, flops=elementwise_flops)

RULES = {
    aten._conj.default: OperatorRule(conjugate_rule, conjugate_local),
    **dict.fromkeys([aten._fft_c2c.default, aten._fft_c2r.default, aten._fft_r2c.default], _TRANSFORM),
    **dict.fromkeys([aten.view_as_complex.default, aten.view_as_real.default], OperatorRule(parts_rule)),
}
