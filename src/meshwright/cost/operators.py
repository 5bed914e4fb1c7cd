"""One operator on one rank: its share of FLOPs and bytes, and the seconds that the device takes for it."""

from collections.abc import Sequence
from math import prod

from meshwright.cost.kernels import Cost, Rates
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.kernel import Kernel, Operand, attention_of, product_of
from meshwright.ir.kind import kind_of
from meshwright.ir.layout import TIME
from meshwright.ir.placement import Placements, input_placements, is_linear, local_shape, output_placements
from meshwright.ir.plan import Strategy
from meshwright.ir.rule import OWN

Passes = tuple[tuple[str, float], ...]

_ALWAYS: dict[str, tuple[Passes, int]] = {
    "meshwright.cross_entropy_backward": ((("activation", 2), ("pointwise", 2)), 10),
    "aten.cumsum": ((("reduction", 2),), 1),
}
_SPLIT: dict[str, tuple[Passes, int]] = {
    "batch_norm": ((("reduction", 2), ("pointwise", 2)), 16),
    "batch_norm_backward": ((("reduction", 2), ("pointwise", 5)), 14),
    "softmax": ((("reduction", 2), ("pointwise", 4), ("activation", 2)), 16),
    "norm": ((("reduction", 2), ("pointwise", 7)), 14),
    "norm_backward": ((("reduction", 4), ("pointwise", 12)), 14),
}
"""Operators that run as several kernels: always (by target), or where a factor is split that only a decomposition can
split (by kind). How often each kind of kernel reads or writes the tensor, and how many kernels there are."""


class Parts:
    """The parts of tensors that one rank works on; ``sizes`` are of the axes that divide anything, time included."""

    def __init__(self, graph: Graph, sizes: dict[str, int]) -> None:
        self.graph, self.sizes = graph, sizes

    def known(self, placements: Placements) -> Placements:
        """Without axes that divide nothing."""
        return {axis: one for axis, one in placements.items() if axis in self.sizes}

    def part(self, tensor: str, placements: Placements) -> Operand:
        """One rank's part of a tensor."""
        one = self.graph.tensors[tensor]
        return Operand(local_shape(one.shape, self.known(placements), self.sizes), one.dtype)

    def num_bytes(self, tensor: str, placements: Placements) -> int:
        """Of one rank's part of a tensor."""
        return self.part(tensor, placements).num_bytes

    def wanted(self, operator: Operator, strategy: Strategy, position: int) -> Placements:
        """How an operator wants an input."""
        return self.known(input_placements(operator.rule, strategy, position, self.sizes)) if operator.rule else {}

    def made(self, operator: Operator, strategy: Strategy, output: int) -> Placements:
        """How it gives an output."""
        return self.known(output_placements(operator.rule, strategy, output, self.sizes)) if operator.rule else {}

    def divisor(self, operator: Operator, strategy: Strategy) -> float:
        """By what its work is divided on the rank with the largest part, over all axes on which it splits a factor."""
        rule, result = operator.rule, 1.0
        if rule is None:
            return result
        for choice in dict.fromkeys(choice for choice in strategy.values() if choice and not is_linear(choice)):
            size = rule.sizes[rule.members(choice)[0]]
            count = prod(self.sizes[axis] for axis, one in strategy.items() if one == choice)
            result *= count if size % count == 0 else size / -(-size // count)
        return result

    def decomposed(self, operator: Operator, strategy: Strategy) -> list[tuple[str, str]]:
        """The (axis, factor) pairs for which it runs as its decomposition (over samples of its own it does not)."""
        rule = operator.rule
        return [
            (axis, choice)
            for axis, choice in strategy.items()
            if rule is not None and axis != TIME and choice in rule.decompositions and choice != OWN
        ]

    def letters_bytes(self, operator: Operator, strategy: Strategy, text: str, item_bytes: int = 4) -> int:
        """One rank's bytes of what a decomposition communicates: ``"2 c"``, ``"b s"``."""
        rule = operator.rule
        assert rule is not None
        total = item_bytes
        for word in text.split():
            if word.isdigit():
                total *= int(word)
            elif word in rule.sizes:
                parts = prod(self.sizes[axis] for axis, choice in strategy.items() if choice == word)
                total *= -(-rule.sizes[word] // parts)
        return total


def operator_cost(parts: Parts, rates: Rates, operator: Operator, strategy: Strategy) -> Cost:
    """An operator on one rank, without what it communicates."""
    inputs = [parts.part(name, parts.wanted(operator, strategy, at)) for at, name in enumerate(operator.inputs)]
    outputs = [parts.part(name, parts.made(operator, strategy, at)) for at, name in enumerate(operator.outputs)]
    flops = operator.flops / parts.divisor(operator, strategy)
    return kernels_cost(rates, operator, inputs, outputs, flops, decomposed=bool(parts.decomposed(operator, strategy)))


def kernels_cost(
    rates: Rates, operator: Operator, inputs: Sequence[Operand], outputs: Sequence[Operand], flops: float,
    decomposed: bool = False,
) -> Cost:  # fmt: skip
    """The kernels of an operator, from one rank's parts of its inputs and outputs; ``decomposed``: a factor is split
    that only a decomposition can split."""
    if operator.bytes == 0:  # a view
        return Cost(rates.kernel_s)
    several = _ALWAYS.get(_base(operator)) or (_SPLIT.get(kind_of(operator)) if decomposed else None)
    if several is None:
        return rates.cost(kernel_of(operator, inputs, outputs, flops))
    passes, kernels = several
    largest = max(one.num_bytes for one in (*inputs, *outputs))
    cost = Cost(max(0, kernels - len(passes)) * rates.kernel_s)
    for one, times in passes:
        cost += rates.stream(one, times * largest)
    return Cost(cost.seconds, flops, cost.bytes)


def kernel_of(operator: Operator, inputs: Sequence[Operand], outputs: Sequence[Operand], flops: float) -> Kernel:
    """An operator as one kernel."""
    kind, read, made = kind_of(operator), [one.num_bytes for one in inputs], [one.num_bytes for one in outputs]
    moved = sum(read) + sum(made)
    if kind == "gather":  # what is looked up, not the table
        moved = sum(read) - max(read, default=0) + 2 * sum(made)
    dtype = outputs[0].dtype if outputs else ""
    product = product_of(operator.target, kind, inputs, outputs[0], flops) if outputs else None
    attention = None
    if _base(operator) in ("meshwright.attention", "meshwright.attention_backward"):
        backward, words = kind == "attention_backward", operator.arguments.split(", ")
        at = 7 if backward else 4  # of dropout, then causal, in the operators' signatures (``ops/library.py``)
        dropout, causal = words[at : at + 2] if len(words) > at + 1 else ("0.0", "False")
        attention = attention_of(backward, inputs, flops, dropout=float(dropout) > 0, causal=causal == "True")
    return Kernel(kind, dtype, flops, moved, product=product, attention=attention)


def _base(operator: Operator) -> str:
    return ".".join(operator.target.split(".")[:2])
