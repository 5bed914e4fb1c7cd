"""What operators communicate inside, where they run as the decomposition of a factor that no pattern can split."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from meshwright.cost.node import Exchange
from meshwright.cost.operators import Parts
from meshwright.ir.graph import ITEM_BYTES, Operator
from meshwright.ir.halo import Halo, most_rows
from meshwright.ir.placement import Placements, local_shape
from meshwright.ir.plan import Strategy

_COLLECTIVES = {"gather": "all_gather", "all_to_all": "all_to_all", "ring": "all_gather"}
"""By the first word of what a decomposition communicates; what goes round a ring is what a gather would bring."""


@dataclass
class Inside:
    """What one operator communicates, and the bytes of parts that are copied to lie beside what came."""

    exchanges: list[Exchange] = field(default_factory=list)
    copied_bytes: int = 0


class Decomposed:
    """Exchanges of the operators of one stage; halos that an operator before has exchanged are not exchanged again."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._halos: set[tuple[object, ...]] = set()

    def of(self, operator: Operator, strategy: Strategy, inputs: Sequence[object]) -> Inside:
        """Of one operator, whose ``inputs`` are the values that it reads, whatever stands for them."""
        result = Inside()
        for axis, factor in self._parts.decomposed(operator, strategy):
            assert operator.rule is not None
            for text in operator.rule.decompositions[factor]:
                halo = Halo.parse(text)
                if halo is None:
                    result.exchanges.append(self._collective(operator, strategy, axis, text))
                else:
                    self._halo(result, operator, strategy, inputs, axis, halo)
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

    def _halo(
        self, result: Inside, operator: Operator, strategy: Strategy, inputs: Sequence[object], axis: str, halo: Halo
    ) -> None:
        value = inputs[halo.operand] if halo.operand < len(inputs) else operator.name
        key = (id(value), axis, halo.dim, halo.stride, halo.window, halo.padding, halo.count)
        num_bytes = self.halo_bytes(operator, strategy, axis, halo)
        if num_bytes and key not in self._halos:
            result.exchanges.append(Exchange(f"{operator.name} {halo}", "halo", axis, num_bytes))
        self._halos.add(key)
        name, placements = self._operand(operator, strategy, halo.operand)
        result.copied_bytes += self._parts.num_bytes(name, placements)

    def halo_bytes(self, operator: Operator, strategy: Strategy, axis: str, halo: Halo) -> int:
        """What the busiest rank of an axis gets from others; dims before this one have their halos (corners)."""
        assert operator.rule is not None
        name, placements = self._operand(operator, strategy, halo.operand)
        tensor, sizes = self._parts.graph.tensors[name], self._parts.sizes
        shape = list(local_shape(tensor.shape, placements, sizes))
        for other, factor in self._parts.decomposed(operator, strategy):
            for one in map(Halo.parse, operator.rule.decompositions[factor]):
                if one is not None and one.operand == halo.operand and one.dim < halo.dim:
                    low, high = one.ranges(sizes[other])[0]
                    shape[one.dim] = high - low
        parts = sizes[axis]
        shape[halo.dim] = most_rows(halo.ranges(parts), tensor.shape[halo.dim] // parts)
        return prod(shape) * ITEM_BYTES[tensor.dtype]

    def _operand(self, operator: Operator, strategy: Strategy, position: int) -> tuple[str, Placements]:
        """An input, or after these an output: its name, and how it lies."""
        count = len(operator.inputs)
        if position < count:
            return operator.inputs[position], self._parts.wanted(operator, strategy, position)
        return operator.outputs[position - count], self._parts.made(operator, strategy, position - count)
