"""Mixtures of experts as one operator: every token through the experts chosen for it, forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, Local, OperatorRule, make_rule
from meshwright.ops.library import LIBRARY

aten = torch.ops.aten
ours = torch.ops.meshwright

LIBRARY.define(
    "experts(Tensor tokens, Tensor index, Tensor weights, Tensor up, Tensor down, str activation, SymInt first)"
    " -> Tensor"
)
LIBRARY.define(
    "experts_backward(Tensor grad, Tensor tokens, Tensor index, Tensor weights, Tensor up, Tensor down, str activation,"
    " SymInt first) -> (Tensor, Tensor, Tensor, Tensor)"
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda value: F.gelu(value, approximate="tanh"),
    "relu": F.relu,
}


def _gated(hidden: Tensor, activation: str, width: int) -> Tensor:
    """``act(gate) * up`` where there are two halves, else ``act(up)``."""
    if hidden.shape[-1] == width:
        return ACTIVATIONS[activation](hidden)
    gate, up = hidden.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def _experts(
    tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str, first: int
) -> Tensor:
    """tokens [t, k], index and weights [t, a], up [e, 2 f or f, k], down [e, o, f] -> [t, o].

    ``first`` is the number of the first expert that is here; tokens of others add nothing.
    """
    total = tokens.new_zeros(tokens.shape[0], down.shape[1], dtype=torch.promote_types(tokens.dtype, weights.dtype))
    for expert in range(down.shape[0]):
        rows, slots = torch.where(index == first + expert)
        inner = _gated(F.linear(tokens[rows], up[expert]), activation, down.shape[2])
        total.index_add_(0, rows, F.linear(inner, down[expert]) * weights[rows, slots, None])
    return total.to(tokens.dtype)


def _experts_backward(
    grad: Tensor, tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str, first: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of tokens, weights, up and down. What is inside of an expert is computed again, not kept."""
    grads = (torch.zeros_like(tokens), torch.zeros_like(weights), torch.zeros_like(up), torch.zeros_like(down))
    for expert in range(down.shape[0]):
        rows, slots = torch.where(index == first + expert)
        with torch.enable_grad():
            hidden = F.linear(tokens[rows], up[expert]).detach().requires_grad_()
            inner = _gated(hidden, activation, down.shape[2])
        mine, share = grad[rows], weights[rows, slots, None]
        back = torch.mm(mine, down[expert])
        grads[1][rows, slots] = (back * inner.detach()).sum(-1).to(weights.dtype)
        scaled = mine * share.to(mine.dtype)
        torch.mm(scaled.t(), inner.detach(), out=grads[3][expert])
        (inside,) = torch.autograd.grad(inner, hidden, back * share.to(mine.dtype))
        torch.mm(inside.t(), tokens[rows], out=grads[2][expert])
        grads[0].index_add_(0, rows, torch.mm(inside, up[expert]))
    return grads


for _name, _kernel in (("experts", _experts), ("experts_backward", _experts_backward)):
    LIBRARY.impl(_name, _kernel, "CPU")
    LIBRARY.impl(_name, _kernel, "CUDA")
torch.library.register_fake(
    "meshwright::experts", lambda tokens, index, weights, up, down, *_: tokens.new_empty(len(tokens), down.shape[1]),
    lib=LIBRARY,
)  # fmt: skip
torch.library.register_fake(
    "meshwright::experts_backward",
    lambda grad, tokens, index, *values: tuple(torch.empty_like(value) for value in (tokens, *values[:3])),
    lib=LIBRARY,
)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, *values: Any) -> Tensor:
        context.save_for_backward(*values[:5])
        context.activation = values[5]
        result: Tensor = ours.experts(*values, 0)
        return result

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weights, up, down = ours.experts_backward(grad, *context.saved_tensors, context.activation, 0)
        return tokens, None, weights, up, down, None


def experts(tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Every token [t, k] through its experts [t, a], their results weighed and summed: [t, o], differentiable."""
    result: Tensor = _Experts.apply(tokens, index, weights, up, down, activation)
    return result


def _names(call: Call, up: int, down: int) -> tuple[str, str]:
    gated = call.tensors[up].shape[1] == 2 * call.tensors[down].shape[2]
    return ("e (2 f) !k" if gated else "e f !k"), "e o f"


def experts_rule(call: Call) -> Rule:
    """``t !k, t a, t a, e (2 f) !k, e o f -> t o``: what other experts, slots or features add is on other ranks."""
    up, down = _names(call, 3, 4)
    return make_rule(call, f"t !k, t a, ^t a, {up}, ^^{down} -> t o")


def experts_backward_rule(call: Call) -> Rule:
    """Linear in the gradient; what is split in one result is a sum in the others."""
    up, down = _names(call, 4, 5)
    return make_rule(call, f"^t o, t !k, t a, t a, {up}, {down} -> t !k, t a, {up}, {down}")


def experts_local(local: Local) -> Any:
    """A rank that holds some experts runs those, by their numbers in the whole."""
    index, parts = local.coordinate("e")
    return local.call(local.target, *local.args[:-1], local.args[-1] + index * (local.size("e") // parts))


def _flops(products: int) -> Callable[[Call, Rule | None], float]:
    """Two operations for each token, slot and weight of an expert, in so many products as forward has one."""

    def count(call: Call, rule: Rule | None) -> float:
        first = 1 if products > 1 else 0
        up, down = call.tensors[first + 3], call.tensors[first + 4]
        each = float(up[0].numel() + down[0].numel())
        again = float(up[0].numel()) if products > 1 else 0.0
        return 2.0 * call.tensors[first + 1].numel() * (products * each + again)

    return count


RULES = {
    ours.experts.default: OperatorRule(experts_rule, experts_local, _flops(1), frozenset("e")),
    ours.experts_backward.default: OperatorRule(experts_backward_rule, experts_local, _flops(2), frozenset("e")),
}
