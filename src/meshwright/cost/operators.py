"""One operator on one rank: its share of FLOPs and bytes, and the seconds that the device takes for it."""

from math import prod

import msgspec

from meshwright.ir.device import Device
from meshwright.ir.graph import ITEM_BYTES, Graph, Operator
from meshwright.ir.kind import COMPUTE, kind_of
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


class Cost(msgspec.Struct, frozen=True):
    """What some kernels do on one rank."""

    seconds: float = 0.0
    flops: float = 0.0
    bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.seconds + other.seconds, self.flops + other.flops, self.bytes + other.bytes)


class Rates:
    """Seconds of kernels on a device, by kind, dtype and size: the roofline with the device's efficiency curves.

        arithmetic_s = FLOPs / (peak * efficiency(kind, FLOPs))
        memory_s     = bytes / (bandwidth * efficiency(kind, bytes))
        seconds      = kernel_s + memory_s                          kinds that are bound by memory
                       kernel_s + max(arithmetic_s, memory_s)       others, with bytes at the full bandwidth
                       kernel_s + arithmetic_s + memory_s           products, where their operands' cost was measured

    (S. Williams, A. Waterman, D. Patterson, "Roofline", 2009.) A product that is flat, with few rows for its weights,
    pays for bringing them in order before it multiplies, and a core does not do both at once.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        kernels = device.kernels
        self.kernel_s = kernels.kernel_s if kernels is not None else 0.0
        self._bandwidth = device.memory_bandwidth_bytes_per_s
        peaks = device.peak_flops_per_s
        self._peaks = peaks | {
            "float16": peaks.get("float16", peaks.get("bfloat16", max(peaks.values()))),
            "bfloat16": peaks.get("bfloat16", peaks.get("float16", max(peaks.values()))),
            "float32": peaks.get("tfloat32", 0.0) or peaks.get("float32", max(peaks.values())),
            "float64": peaks.get("float64", min(peaks.values())),
        }

    def seconds(self, kind: str, dtype: str, flops: float, num_bytes: float) -> float:
        """One kernel."""
        streamed = num_bytes / self._bandwidth
        if kind not in COMPUTE:
            return self.kernel_s + streamed / self.device.efficiency_at(kind, num_bytes)
        peak = self._peaks.get(dtype, self._peaks["float32"])
        arithmetic_s = flops / (peak * self.device.efficiency_at(kind, flops))
        if kind == "matmul" and "operands" in self.device.efficiency:
            return self.kernel_s + arithmetic_s + streamed / self.device.efficiency_at("operands", num_bytes)
        return self.kernel_s + max(arithmetic_s, streamed)

    def stream(self, kind: str, num_bytes: float, kernels: int = 1) -> Cost:
        """Kernels of a kind that is bound by memory, over so many bytes together."""
        if num_bytes <= 0:
            return Cost()
        return Cost(self.seconds(kind, "", 0.0, num_bytes) + (kernels - 1) * self.kernel_s, 0.0, round(num_bytes))


class Parts:
    """The parts of tensors that one rank works on; ``sizes`` are of the axes that divide anything, time included."""

    def __init__(self, graph: Graph, sizes: dict[str, int]) -> None:
        self.graph, self.sizes = graph, sizes

    def known(self, placements: Placements) -> Placements:
        """Without axes that divide nothing."""
        return {axis: one for axis, one in placements.items() if axis in self.sizes}

    def num_bytes(self, tensor: str, placements: Placements) -> int:
        """Of one rank's part of a tensor."""
        one = self.graph.tensors[tensor]
        return prod(local_shape(one.shape, self.known(placements), self.sizes)) * ITEM_BYTES[one.dtype]

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
    if operator.bytes == 0:  # a view
        return Cost(rates.kernel_s)
    graph, kind = parts.graph, kind_of(operator)
    inputs = [parts.num_bytes(name, parts.wanted(operator, strategy, at)) for at, name in enumerate(operator.inputs)]
    outputs = [parts.num_bytes(name, parts.made(operator, strategy, at)) for at, name in enumerate(operator.outputs)]
    total = sum(inputs) + sum(outputs)
    if kind == "gather":  # what is looked up, not the table
        total = sum(inputs) - max(inputs, default=0) + 2 * sum(outputs)
    base = ".".join(operator.target.split(".")[:2])
    several = _ALWAYS.get(base) or (_SPLIT.get(kind) if parts.decomposed(operator, strategy) else None)
    if several is not None:
        passes, kernels = several
        largest = max(inputs + outputs)
        cost = Cost(max(0, kernels - len(passes)) * rates.kernel_s)
        for one, times in passes:
            cost += rates.stream(one, times * largest)
        return Cost(cost.seconds, operator.flops / parts.divisor(operator, strategy), cost.bytes)
    flops = operator.flops / parts.divisor(operator, strategy)
    dtype = graph.tensors[operator.outputs[0]].dtype if operator.outputs else ""
    return Cost(rates.seconds(kind, dtype, flops, total), flops, total)
