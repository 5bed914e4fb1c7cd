"""Matrix products. ``addmm`` is captured as mm + add, so that no rank adds a bias that is not its to add."""

from typing import Any

import torch
from torch import Tensor

from meshwright.ops.base import OperatorRule, contraction_flops, make_rule

aten = torch.ops.aten


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Canonical addmm."""
    product = aten.mm.default(mat1, mat2)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (self if beta == 1 else self * beta)


def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Canonical baddbmm."""
    product = aten.bmm.default(batch1, batch2)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (self if beta == 1 else self * beta)


def addmv(self: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """Canonical addmv."""
    product = aten.mv.default(mat, vec)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (self if beta == 1 else self * beta)


RULES = {
    aten.mm.default: OperatorRule(lambda call: make_rule(call, "^m j, ^^j f -> m f"), flops=contraction_flops),
    aten.bmm.default: OperatorRule(lambda call: make_rule(call, "^g m j, ^^g j f -> g m f"), flops=contraction_flops),
    aten.mv.default: OperatorRule(lambda call: make_rule(call, "^m k, ^^k -> m"), flops=contraction_flops),
    aten.dot.default: OperatorRule(lambda call: make_rule(call, "^k, ^^k -> ."), flops=contraction_flops),
}

CANONICAL = {aten.addmm.default: addmm, aten.addmv.default: addmv, aten.baddbmm.default: baddbmm}
