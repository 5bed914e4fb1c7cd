"""Mixtures of experts as one operator, forward and backward: every token goes through the experts chosen for it.

With expert parallelism (Lepikhin et al., "GShard", 2021), tokens and experts are split over the same ranks. There are
two algorithms. By default, tokens travel to the ranks of their experts: the ranks tell each other at run time how many
tokens they send, so the host needs numbers that the router computes. With ``gather``, every rank gathers the tokens of
all ranks, applies its own experts, and the results are summed and scattered: no host waits for a device.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.errors import PlanError
from meshwright.ir.operator_algorithm import GATHER
from meshwright.ir.rule import Rule
from meshwright.ops import grouped_experts
from meshwright.ops.base import Call, Local, OperatorRule, Value, arguments, make_rule
from meshwright.ops.collectives import Exchange, exchange_over
from meshwright.ops.grouped_experts import gated, gated_backward
from meshwright.ops.library import define

aten = torch.ops.aten
ours = torch.ops.meshwright


def _experts(
    tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str, first: int,
    parts: int = 1, kept: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Apply experts: tokens [t, k], index and weights [t, a], up [e, 2 f or f, k], down [e, o, f] -> [t, o].

    Each token has ``a`` experts. ``first`` is the number of the first expert on this rank. Experts on other ranks add
    nothing. ``parts`` is the number of ranks with equal numbers of experts; only costs depend on it. ``kept`` is filled
    with the activations after ``up`` [t a, 2 f or f], one expert after the other.
    """
    if tokens.device.type != "cpu":
        result, groups, hidden = grouped_experts.forward(tokens, index, weights, up, down, activation, first)
        if kept is not None:
            kept.copy_(groups.of_slots(hidden))
        return result
    total = tokens.new_zeros(tokens.shape[0], down.shape[1], dtype=torch.promote_types(tokens.dtype, weights.dtype))
    begin = 0
    for expert in range(down.shape[0]):
        rows, slots = torch.where(index == first + expert)
        into = None if kept is None else kept[begin : (begin := begin + len(rows))]
        hidden = torch.mm(tokens[rows], up[expert].t(), out=into)
        inner = gated(hidden, activation, down.shape[2])
        total.index_add_(0, rows, F.linear(inner, down[expert]) * weights[rows, slots, None])
    return total.to(tokens.dtype)


def _experts_kept(
    tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str, first: int,
    parts: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Apply experts, and return the activations after ``up`` too. If other ranks hold experts, the last rows of these
    activations are unused."""
    kept = tokens.new_empty(index.numel(), up.shape[1])
    return _experts(tokens, index, weights, up, down, activation, first, parts, kept), kept


def _experts_backward(
    grad: Tensor, tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str, first: int,
    parts: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of tokens, weights, up and down. Activations inside an expert are recomputed."""
    return _experts_backward_kept(grad, tokens, index, weights, up, down, None, activation, first, parts)


def _experts_backward_kept(
    grad: Tensor, tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, kept: Tensor | None,
    activation: str, first: int, parts: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of tokens, weights, up and down. ``kept`` has forward's activations after ``up``;
    if it is None, they are recomputed."""
    if tokens.device.type != "cpu":
        return grouped_experts.backward(grad, tokens, index, weights, up, down, kept, activation, first)
    # A product over no rows writes zeros: the gradients of up and down are written as a whole.
    grads = (*map(torch.zeros_like, (tokens, weights)), *map(torch.empty_like, (up, down)))
    begin = 0
    for expert in range(down.shape[0]):
        rows, slots = torch.where(index == first + expert)
        again = torch.mm(tokens[rows], up[expert].t()) if kept is None else kept[begin : (begin := begin + len(rows))]
        inner = gated(again, activation, down.shape[2])
        grad_rows, share = grad[rows], weights[rows, slots, None]
        back = torch.mm(grad_rows, down[expert])
        grads[1][rows, slots] = (back * inner).sum(-1).to(weights.dtype)
        scaled = grad_rows * share.to(grad_rows.dtype)
        torch.mm(scaled.t(), inner, out=grads[3][expert])
        inside = gated_backward(back * share.to(grad_rows.dtype), again, activation)
        torch.mm(inside.t(), tokens[rows], out=grads[2][expert])
        grads[0].index_add_(0, rows, torch.mm(inside, up[expert]))
    return grads[0], grads[1], grads[2], grads[3]


@dataclass(frozen=True)
class Dispatch:
    """Sends tokens to the ranks of their experts, and results back. All ranks hold equal numbers of experts, in order.

    this rank's tokens   0 1 2     experts of each   0: a c   1: b c   2: a d      rank 0 has a b, rank 1 has c d
    sent, by expert      a:0 a:2 b:1 | c:0 c:1 d:2    counts  [[2, 1], [2, 1]]
    """

    exchange: Exchange
    order: Tensor
    counts: Tensor
    slots: int

    @classmethod
    def of(cls, exchange: Exchange, index: Tensor, num_experts: int, size: int) -> "Dispatch":
        """Return the dispatch of tokens to the experts ``index`` [t, a]; ``size`` ranks hold all ``num_experts``."""
        chosen = index.reshape(-1)
        counts = torch.bincount(chosen, minlength=num_experts).view(size, num_experts // size)
        return cls(exchange, torch.argsort(chosen, stable=True), counts, index.shape[1])

    def sent(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Send ``values`` [t a, ...]. Return the rows that came for this rank's experts, the expert of each row
        [rows, 1], and the numbers of rows by sender and expert."""
        rows, received_counts = self.exchange(values[self.order], self.counts)
        size, experts = received_counts.shape
        numbers = torch.arange(experts, device=rows.device).repeat(size).repeat_interleave(received_counts.view(-1))
        return rows, numbers.unsqueeze(1), received_counts

    def returned(self, rows: Tensor, received_counts: Tensor) -> Tensor:
        """Send the experts' results ``rows`` back to the ranks of their tokens. Return the results for this rank's
        tokens [t, a, ...]. ``received_counts`` are the numbers of rows from ``sent``."""
        back, _ = self.exchange(rows, received_counts)
        result = torch.empty_like(back)
        result[self.order] = back
        return result.view(-1, self.slots, *back.shape[1:])


def across(
    exchange: Exchange, tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str,
    first: int, num_experts: int, *, size: int,
) -> Tensor:  # fmt: skip
    """Apply experts to this rank's tokens, with the experts split over ``size`` ranks."""
    dispatch = Dispatch.of(exchange, index, num_experts, size)
    rows, numbers, received_counts = dispatch.sent(tokens.repeat_interleave(index.shape[1], 0))
    outputs = _experts(rows, numbers, rows.new_ones(len(rows), 1), up, down, activation, first)
    return (dispatch.returned(outputs, received_counts) * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


def across_backward(
    exchange: Exchange, grad: Tensor, tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor,
    activation: str, first: int, num_experts: int, *, size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of this rank's ``tokens``, of their routing ``weights``, and of the matrices ``up`` and
    ``down`` of this rank's experts."""
    dispatch = Dispatch.of(exchange, index, num_experts, size)
    width = torch.promote_types(tokens.dtype, weights.dtype)
    slots = index.shape[1]
    packed = [*(tensor.repeat_interleave(slots, 0) for tensor in (tokens, grad)), weights.reshape(-1, 1)]
    rows, numbers, received_counts = dispatch.sent(torch.cat([tensor.to(width) for tensor in packed], 1))
    token, gradient, weight = rows.split([tokens.shape[1], grad.shape[1], 1], 1)
    grads = _experts_backward(
        gradient.to(grad.dtype), token.to(tokens.dtype), numbers, weight.to(weights.dtype), up, down, activation, first
    )
    back = dispatch.returned(torch.cat([grads[0].to(width), grads[1].to(width)], 1), received_counts)
    token_grads, weight_grads = back.split([tokens.shape[1], 1], 2)
    return token_grads.sum(1).to(tokens.dtype), weight_grads.squeeze(2).to(weights.dtype), grads[2], grads[3]


def _over_ranks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel of ``across`` or ``across_backward`` whose last arguments are the ranks' group and its size."""

    def kernel(*values: Any) -> Any:
        *given, group, size = values
        return function(exchange_over(group, size), *given, size=size)

    return kernel


def _shape(tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, *_: Any) -> Tensor:
    return tokens.new_empty(len(tokens), down.shape[1])


def _shapes_kept(tokens: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, *_: Any) -> list[Tensor]:
    return [_shape(tokens, index, weights, up, down), tokens.new_empty(index.numel(), up.shape[1])]


def _shapes(grad: Tensor, tokens: Tensor, index: Tensor, *values: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(value) for value in (tokens, *values[:3]))


_GIVEN = "Tensor tokens, Tensor index, Tensor weights, Tensor up, Tensor down, str activation, SymInt first"
_PARTS = ", SymInt parts=1"
_ACROSS = ", SymInt num_experts, str group, SymInt size"
_GRADIENTS = "(Tensor, Tensor, Tensor, Tensor)"
define(f"experts({_GIVEN}{_PARTS}) -> Tensor", _experts, _shape)
define(f"experts_backward(Tensor grad, {_GIVEN}{_PARTS}) -> {_GRADIENTS}", _experts_backward, _shapes)
define(f"experts_kept({_GIVEN}{_PARTS}) -> (Tensor, Tensor)", _experts_kept, _shapes_kept)
define(
    f"experts_backward_kept(Tensor grad, {_GIVEN.replace('str', 'Tensor hidden, str')}{_PARTS}) -> {_GRADIENTS}",
    _experts_backward_kept, _shapes,
)  # fmt: skip
define(f"experts_across({_GIVEN}{_ACROSS}) -> Tensor", _over_ranks(across), _shape)
define(
    f"experts_across_backward(Tensor grad, {_GIVEN}{_ACROSS}) -> {_GRADIENTS}", _over_ranks(across_backward), _shapes
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
    """Apply to every token [t, k] its experts ``index`` [t, a], and sum the weighted results to [t, o]. The result is
    differentiable."""
    result: Tensor = _Experts.apply(tokens, index, weights, up, down, activation)
    return result


def experts_rule(call: Call) -> Rule:
    """``t !k, t a, t a, e (2 f) !k, e o f -> t o``: if ``e``, ``a`` or ``f`` is split, the ranks' results are summed.

    The gradients are linear in the gradient of the result. A split factor that a gradient does not have makes this
    gradient a sum over the ranks."""
    gated = call.tensors[-2].shape[1] == 2 * call.tensors[-1].shape[2]
    up, down = ("e (2 f) !k" if gated else "e f !k"), "e o f"
    pattern = f"t !k, t a, ^t a, {up}, ^^{down} -> t o"
    if call.target is ours.experts_backward.default:
        pattern = f"^t o, t !k, t a, t a, {up}, {down} -> t !k, t a, {up}, {down}"
    return make_rule(call, pattern, decompositions={"te": "all_to_all"}, joint={"te": ("t", "e")}, equal=("te",))


def experts_local(local: Local) -> Any:
    """Run the experts that this rank holds. If tokens and experts are split over the same ranks (factor ``te``), tokens
    travel to the ranks of their experts, and results travel back; or all tokens are gathered (``gather``).

    Raises:
        PlanError: the plan names another algorithm.
    """
    index, parts = local.coordinate("e")
    if not local.is_split("te"):
        return local.call(local.target, *local.args[:-1], local.args[-1] + local.bounds("e")[index], parts)
    if local.algorithm == GATHER:
        return _gathered(local)
    if local.algorithm:
        raise PlanError(
            f"{local.algorithm!r} is no algorithm of experts", where=f"operator_algorithms: {local.name}",
            remedy=f"write {GATHER!r}, or leave it out: tokens then travel to the ranks of their experts",
        )  # fmt: skip
    group, size = local.group("te")
    total, position = local.size("e"), 2 if local.target is ours.experts_backward.default else 1
    each, given = total // size // parts, list(local.args[:-1])
    if parts > 1 and local.outside("e", "te"):
        # an expert's number has the digits (e, te, rest); renumber to (te, e, rest): the receiving rank comes first
        numbers = local.call(aten.reshape.default, local.call(aten.arange.default, total), [parts, size, each])
        order = local.call(aten.argsort.default, local.call(aten.reshape.default, local.call(
            aten.transpose.int, numbers, 0, 1), [-1]))  # fmt: skip
        given[position] = local.call(aten.index.Tensor, order, [given[position]])
    target = ours.experts_across_backward.default if position == 2 else ours.experts_across.default
    return local.call(target, *given, index * each, total, group, size)


def _gathered(local: Local) -> Any:
    """Gather the tokens of all ranks that split ``te``, apply this rank's experts, and scatter the sums of results."""
    back = local.target is ours.experts_backward.default
    *tensors, up, down, activation, _ = local.args
    (_, size) = local.group("te")
    (index, parts), (place, _) = local.coordinate("e"), local.coordinate("te")
    each = local.size("e") // size // parts
    first = each * (index * size + place if parts > 1 and local.outside("e", "te") else place * parts + index)
    gathered = []
    for position, tensor in enumerate(tensors):
        rows, *rest = local.input_shape(position)
        gathered.append(local.call(aten.reshape.default, local.all_gather(tensor, "te"), [size * rows, *rest]))
    results = local.call(local.target, *gathered, up, down, activation, first, size * parts)

    def scattered(value: Value, output: int) -> Value:
        return local.reduce_scatter(local.call(aten.reshape.default, value, [size, *local.shape(output)]), "te")

    if not back:
        return scattered(results, 0)
    grads = [local.call(operator.getitem, results, number) for number in range(4)]
    return scattered(grads[0], 0), scattered(grads[1], 1), *grads[2:]


def _flops(products: int, *, again: bool = False) -> Callable[[Call, Rule | None], float]:
    """Count two operations for each token, each of its experts on this rank (as many as on each of the ranks that share
    the experts) and each weight of the expert, ``products`` times. With ``again``, count ``up`` once more."""

    def count(call: Call, rule: Rule | None) -> float:
        first = 1 if products > 1 else 0
        up, down = call.tensors[first + 3], call.tensors[first + 4]
        each = float(up[0].numel() + down[0].numel())
        number = call.tensors[first + 1].numel() / arguments(call).get("parts", 1)
        return 2.0 * number * (products * each + again * float(up[0].numel()))

    return count


RULES = {
    ours.experts.default: OperatorRule(experts_rule, experts_local, _flops(1), frozenset("e")),
    ours.experts_backward.default: OperatorRule(experts_rule, experts_local, _flops(2), frozenset("e")),
}
KERNEL_FLOPS: dict[Any, Callable[[Call, Rule | None], float]] = {
    ours.experts_backward.default: _flops(2, again=True), ours.experts_kept.default: _flops(1),
    ours.experts_backward_kept.default: _flops(2),
}  # fmt: skip
"""Maps a kernel to the function that counts its FLOPs. ``experts_backward`` recomputes the activations inside experts;
``experts_backward_kept`` reads the activations that forward kept."""
BACKWARD = frozenset({ours.experts_backward.default, ours.experts_backward_kept.default})
KERNELS = frozenset({ours.experts.default, ours.experts_kept.default, *BACKWARD})
"""The kernels of experts; those in ``BACKWARD`` have the gradient of the result first."""
