"""What operators communicate inside, where they run as the decomposition of a factor that no pattern can split."""

from dataclasses import dataclass, field
from math import prod

from meshwright.cost.node import Exchange
from meshwright.cost.operators import Parts
from meshwright.ir.graph import ITEM_BYTES, Operator
from meshwright.ir.halo import Halo, most_rows, outside, owned
from meshwright.ir.placement import Placements, bounds, local_shape
from meshwright.ir.plan import Strategy

_COLLECTIVES = {"gather": "all_gather", "all_to_all": "all_to_all", "ring": "all_gather"}
"""By the first word of what a decomposition communicates; what goes round a ring is what a gather would bring."""


@dataclass(frozen=True)
class Fetch:
    """The halo that an operator reads of its input number ``operand``: rows of neighbours, with those of padding
    ``num_bytes``. Who reads the same rows of the same value has an equal ``key``."""

    operand: int
    key: tuple[object, ...]
    exchange: Exchange
    num_bytes: int


@dataclass
class Inside:
    """What one operator communicates before and after its kernels, and the bytes of parts that are copied to lie beside
    what came."""

    fetched: list[Fetch] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    copied_bytes: int = 0


class Decomposed:
    """Exchanges inside of operators."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def of(self, operator: Operator, strategy: Strategy) -> Inside:
        """Of one operator."""
        result = Inside()
        for axis, factor in self._parts.decomposed(operator, strategy):
            assert operator.rule is not None
            for text in operator.rule.decompositions[factor]:
                halo = Halo.parse(text)
                if halo is None:
                    result.exchanges.append(self._collective(operator, strategy, axis, text))
                else:
                    self._halo(result, operator, strategy, axis, halo)
        return result

    def _collective(self, operator: Operator, strategy: Strategy, axis: str, text: str) -> Exchange:
        word, _, letters = text.partition(" ")
        kind = _COLLECTIVES.get(word, "all_reduce")
        size = self._parts.sizes[axis]
        if word in ("all_to_all", "ring"):
            times, position = map(int, letters.split())
            wanted = self._parts.wanted(operator, strategy, position)
            num_bytes = times * self._parts.num_bytes(operator.inputs[position], wanted)
            num_bytes *= size if word == "ring" else 1
        else:
            num_bytes = self._parts.letters_bytes(operator, strategy, letters)
            num_bytes *= size if kind == "all_gather" else 1
        return Exchange(f"{operator.name} {text}", kind, axis, num_bytes)

    def _halo(self, result: Inside, operator: Operator, strategy: Strategy, axis: str, halo: Halo) -> None:
        """A halo, in bytes of what the busiest rank gets; dims before this one have theirs already (corners)."""
        name, placements = self._operand(operator, strategy, halo.operand)
        tensor, sizes = self._parts.graph.tensors[name], self._parts.sizes
        shape = list(local_shape(tensor.shape, placements, sizes))
        before = self._before(operator, strategy, halo)
        for other, one in before:
            low, high = one.ranges(bounds(one.count, [sizes[other]]))[0]
            shape[one.dim] = high - low
        ranges = halo.ranges(bounds(halo.count, [sizes[axis]]))
        edges = bounds(tensor.shape[halo.dim], [sizes[axis]])
        each = prod(size for dim, size in enumerate(shape) if dim != halo.dim) * ITEM_BYTES[tensor.dtype]
        padded = any(low < 0 or high > edges[-1] for low, high in ranges)
        if not (got := most_rows(ranges, edges)) and not padded:
            return
        result.copied_bytes += self._parts.num_bytes(name, placements)
        if not got:
            return
        exchange = Exchange(f"{operator.name} {halo}", "halo", axis, got * each)
        if halo.operand >= len(operator.inputs):
            result.exchanges.append(exchange)
            return
        key = tuple((other, one.dim, one.stride, one.window, one.padding, one.count) for other, one in (
            *before, (axis, halo)))  # fmt: skip
        strips = max(
            sum(high - low for low, high in outside(one, owned(edges, part))) for part, one in enumerate(ranges)
        )
        result.fetched.append(Fetch(halo.operand, key, exchange, strips * each))

    def _before(self, operator: Operator, strategy: Strategy, halo: Halo) -> list[tuple[str, Halo]]:
        """The halos of an operand along dims before that of ``halo``, with their axes."""
        assert operator.rule is not None
        found = [
            (axis, one)
            for axis, factor in self._parts.decomposed(operator, strategy)
            for one in map(Halo.parse, operator.rule.decompositions[factor])
            if one is not None and one.operand == halo.operand and one.dim < halo.dim
        ]
        return sorted(found, key=lambda pair: pair[1].dim)

    def _operand(self, operator: Operator, strategy: Strategy, position: int) -> tuple[str, Placements]:
        """An input, or after these an output: its name, and how it lies."""
        count = len(operator.inputs)
        if position < count:
            return operator.inputs[position], self._parts.wanted(operator, strategy, position)
        return operator.outputs[position - count], self._parts.made(operator, strategy, position - count)
