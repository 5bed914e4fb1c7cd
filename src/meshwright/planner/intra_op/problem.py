"""The optimization problem in numbers: decisions with the cost of each choice, and tensors that connect decisions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ProblemNode:
    """A decision with ``len(costs)`` choices. ``costs`` has the seconds of each choice. ``memory``, of shape [moments,
    choices], has the bytes that each choice holds at each moment at which memory is limited."""

    name: str
    costs: Costs
    memory: Costs

    @property
    def num_choices(self) -> int:
        """The number of choices of the decision."""
        return len(self.costs)


@dataclass(frozen=True, eq=False)
class ProblemTensor:
    """A value that one decision makes and others read. Placements are numbered.

    ``have[c]`` is the placement in which choice c of the node ``maker`` leaves the value. Each entry of ``readers`` is
    a node, with the placement that each of its choices needs. ``prices[have, want]`` is the seconds to bring the value
    from one placement to the other (infinite: impossible). Readers that need the same placement share one copy, and its
    price counts once. ``memory[moment, have, want]`` is the bytes of the copy.
    """

    maker: int
    have: Places
    readers: tuple[tuple[int, Places], ...]
    prices: Costs
    memory: Costs | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that the tensor connects, each once, in rising order."""
        return tuple(sorted({self.maker, *(node for node, _ in self.readers)}))


@dataclass(frozen=True, eq=False)
class Problem:
    """All decisions and the tensors between them. ``limits`` has the bytes that are allowed at each moment."""

    nodes: tuple[ProblemNode, ...]
    tensors: tuple[ProblemTensor, ...]
    limits: Costs = field(default_factory=lambda: np.zeros(0))

    def seconds(self, choices: Sequence[int]) -> float:
        """The seconds of all ``choices`` together; infinite if a tensor cannot be brought to a placement that a reader
        needs."""
        total = sum(float(node.costs[choice]) for node, choice in zip(self.nodes, choices, strict=True))
        for tensor in self.tensors:
            have = tensor.have[choices[tensor.maker]]
            total += sum(float(tensor.prices[have, want]) for want in _wanted(tensor, choices))
        return total

    def memory(self, choices: Sequence[int]) -> Costs:
        """The bytes that all ``choices`` together hold at each moment."""
        total = np.zeros(len(self.limits))
        for node, choice in zip(self.nodes, choices, strict=True):
            total += node.memory[:, choice]
        for tensor in self.tensors:
            if tensor.memory is not None:
                have = tensor.have[choices[tensor.maker]]
                for want in _wanted(tensor, choices):
                    total += tensor.memory[:, have, want]
        return total

    def fits(self, choices: Sequence[int]) -> bool:
        """Whether these choices stay within the memory limit of every moment."""
        return bool(np.all(self.memory(choices) <= self.limits * (1 + 1e-9)))


def _wanted(tensor: ProblemTensor, choices: Sequence[int]) -> set[int]:
    return {int(want[choices[node]]) for node, want in tensor.readers}


def table_size(problem: Problem, nodes: Sequence[int]) -> int:
    """The number of entries of a table over the choices of ``nodes``."""
    return prod(problem.nodes[node].num_choices for node in nodes)


def table_of(problem: Problem, tensor: ProblemTensor) -> Costs:
    """The seconds to bring a tensor to all its readers, for all choices of its nodes: an array with one axis per node,
    in the order of ``tensor.nodes``."""
    scope = tensor.nodes
    shape = tuple(problem.nodes[node].num_choices for node in scope)

    def along(node: int, values: NDArray[np.generic]) -> NDArray[np.generic]:
        return values.reshape([-1 if other == node else 1 for other in scope])

    table = np.zeros(shape)
    for want in range(tensor.prices.shape[1]):
        asked: NDArray[np.bool_] = np.zeros((1,) * len(scope), dtype=bool)
        for node, wants in tensor.readers:
            asked = asked | along(node, wants == want).astype(bool)
        if asked.any():
            table = table + np.where(asked, along(tensor.maker, tensor.prices[tensor.have, want]), 0.0)
    return table
