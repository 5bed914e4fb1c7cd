"""Which factors an operator can still be split over, given what has been chosen."""

import math
from dataclasses import dataclass

from meshwright.ir.graph import Graph, Operator
from meshwright.ir.plan import Strategy


@dataclass
class Factors:
    """A graph, the axes' sizes, and the strategies chosen so far (which grow)."""

    graph: Graph
    sizes: dict[str, int]
    strategies: dict[str, Strategy]

    def is_batch(self, name: str) -> bool:
        """Whether a factor class is the batch."""
        return self.graph.factor_classes[name].role == "batch"

    def touches_batch(self, operator: Operator) -> bool:
        """Whether an input of the operator has a batch dim."""
        return any(
            self.is_batch(name) for tensor in operator.inputs for dim in self.graph.tensors[tensor].dims for name in dim
        )

    def fits(self, operator: Operator, letter: str, axis: str) -> bool:
        """Whether the operator can split its factor ``letter`` over ``axis`` too."""
        rule, strategy = operator.rule, self.strategies[operator.name]
        if rule is None or not rule.splittable(letter):
            return False
        others = math.prod(self.sizes[other] for other, choice in strategy.items() if choice == letter)
        return rule.sizes[letter] % (others * self.sizes[axis]) == 0
