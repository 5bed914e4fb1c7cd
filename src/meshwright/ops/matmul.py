"""Matrix products. ``addmm`` is captured as mm + add: if ranks compute terms of a sum, only the sum gets the bias."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, OperatorRule, Target, contraction_flops, make_rule
from meshwright.ops.patterns import letters, operand

aten = torch.ops.aten


def _added(product: Target) -> Callable[..., Tensor]:
    def canonical(self: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
        """Capture an operator such as ``addmm`` as a product and an addition: ``beta self + alpha (left right)``."""
        result: Tensor = product(left, right)
        result = result if alpha == 1 else result * alpha
        return result if beta == 0 else result + (self if beta == 1 else self * beta)

    return canonical


def trilinear_rule(call: Call) -> Rule:
    """``n i, o i j, n j -> n o``: the product of three tensors, of which some dims are summed (``nn.Bilinear``)."""
    *missing, summed = call.args[3:7]
    rank = call.tensors[0].dim() + len(missing[0])
    dims = [[dim for dim in range(rank) if dim not in those] for those in missing]
    pairs = [dict(zip(of, tensor.shape, strict=True)) for of, tensor in zip(dims, call.tensors, strict=True)]
    sizes, names = [max(pair.get(dim, 1) for pair in pairs) for dim in range(rank)], letters(rank)
    inputs = [operand([names[dim] if size == sizes[dim] else "1" for dim, size in pair.items()]) for pair in pairs]
    output = operand([name for dim, name in enumerate(names) if dim not in summed])
    return make_rule(call, f"^{inputs[0]}, ^^{inputs[1]}, ^^^{inputs[2]} -> {output}")


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left.unsqueeze(1) * right


def _summed(left: Tensor, right: Tensor) -> Tensor:
    return aten.bmm.default(left, right).sum(0)


RULES = {
    aten.mm.default: OperatorRule(lambda call: make_rule(call, "^m j, ^^j f -> m f"), flops=contraction_flops),
    aten.bmm.default: OperatorRule(lambda call: make_rule(call, "^g m j, ^^g j f -> g m f"), flops=contraction_flops),
    aten.mv.default: OperatorRule(lambda call: make_rule(call, "^m k, ^^k -> m"), flops=contraction_flops),
    aten._trilinear.default: OperatorRule(trilinear_rule, flops=contraction_flops),
    aten.dot.default: OperatorRule(lambda call: make_rule(call, "^k, ^^k -> ."), flops=contraction_flops),
}

CANONICAL = {
    aten.addmm.default: _added(aten.mm.default),
    aten.addmv.default: _added(aten.mv.default),
    aten.baddbmm.default: _added(aten.bmm.default),
    aten.addr.default: _added(_outer),
    aten.addbmm.default: _added(_summed),
}
