"""The choice of one strategy for every decision, as numbers: what each costs alone, and tensors between them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Node:
    """One decision with ``len(costs)`` choices: the seconds of each, and the bytes that it holds at each of the moments
    at which memory is counted, [moments, choices]."""

    name: str
    costs: Costs
    memory: Costs

    @property
    def num_choices(self) -> int:
        return len(self.costs)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value between decisions: ``have[c]`` is the placement in which choice c of the node ``maker`` leaves it, and
    every reader (a node, and by its choices the placement that it wants) gets it for ``prices[have, want]`` seconds
    (infinite: impossible). Readers that want the same share what is made: each pair is paid once, however many readers
    there are. ``memory[moment, have, want]`` are the bytes of what was made for them."""

    maker: int
    have: Places
    readers: tuple[tuple[int, Places], ...]
    prices: Costs
    memory: Costs | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that it lies between, each once, rising."""
        return tuple(sorted({self.maker, *(node for node, _ in self.readers)}))


@dataclass(frozen=True, eq=False)
class Problem:
    """All decisions. ``limits`` are the bytes allowed at each moment."""

    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    limits: Costs = field(default_factory=lambda: np.zeros(0))

    def seconds(self, choices: Sequence[int]) -> float:
        """What these choices cost together; infinite where a tensor cannot be brought where it is wanted."""
        total = sum(float(node.costs[choice]) for node, choice in zip(self.nodes, choices, strict=True))
        for one in self.tensors:
            have = one.have[choices[one.maker]]
            total += sum(float(one.prices[have, want]) for want in _wanted(one, choices))
        return total

    def memory(self, choices: Sequence[int]) -> Costs:
        """The bytes at each moment."""
        total = np.zeros(len(self.limits))
        for node, choice in zip(self.nodes, choices, strict=True):
            total += node.memory[:, choice]
        for one in self.tensors:
            if one.memory is not None:
                have = one.have[choices[one.maker]]
                for want in _wanted(one, choices):
                    total += one.memory[:, have, want]
        return total

    def fits(self, choices: Sequence[int]) -> bool:
        """Whether no limit is passed."""
        return bool(np.all(self.memory(choices) <= self.limits * (1 + 1e-9)))


def _wanted(one: Tensor, choices: Sequence[int]) -> set[int]:
    return {int(want[choices[node]]) for node, want in one.readers}


def table_size(problem: Problem, nodes: Sequence[int]) -> int:
    """The entries of a table over the choices of these nodes."""
    return prod(problem.nodes[node].num_choices for node in nodes)


def table_of(problem: Problem, one: Tensor) -> Costs:
    """What a tensor costs for all choices of its nodes, an axis a node in the order of ``one.nodes``."""
    scope = one.nodes
    shape = tuple(problem.nodes[node].num_choices for node in scope)

    def along(node: int, values: NDArray[np.generic]) -> NDArray[np.generic]:
        return values.reshape([-1 if other == node else 1 for other in scope])

    table = np.zeros(shape)
    for want in range(one.prices.shape[1]):
        asked: NDArray[np.bool_] = np.zeros((1,) * len(scope), dtype=bool)
        for node, wants in one.readers:
            asked = asked | along(node, wants == want).astype(bool)
        if asked.any():
            table = table + np.where(asked, along(one.maker, one.prices[one.have, want]), 0.0)
    return table
