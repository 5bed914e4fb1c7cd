"""The rule that decides which unit starts next, and on which node. The simulator and runs ask the same functions."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshwright.ir.job_graph import JobNode
from meshwright.jobs.order import Unit

_LEAST = 1e-9


class NodeSlot(NamedTuple):
    """A place on a node that a unit takes: ``gpus`` are the numbers of its GPUs."""

    node: str
    cpus: float
    gpus: tuple[int, ...]
    memory_bytes: int


class Free:
    """What is free on each node. ``take`` and ``give`` change it."""

    def __init__(self, nodes: Mapping[str, JobNode]) -> None:
        self._nodes = dict(nodes)
        self._cpus = {name: node.cpus for name, node in nodes.items()}
        self._gpus = {name: tuple(range(node.gpus)) for name, node in nodes.items()}
        self._memory = {name: node.memory_bytes for name, node in nodes.items()}

    def take(self, unit: Unit) -> NodeSlot | None:
        """Take a place for the unit: on the node with the fewest free cores that has all it needs, the first of equal
        ones. None if no node has it now."""
        fitting = [name for name in self._nodes if self._fits(name, unit)]
        if not fitting:
            return None
        node = min(fitting, key=lambda name: self._cpus[name])
        gpus = self._gpus[node][: unit.gpus]
        slot = NodeSlot(node, unit.cpus, gpus, unit.memory_bytes)
        self._cpus[node] -= slot.cpus
        self._gpus[node] = self._gpus[node][unit.gpus :]
        if (memory := self._memory[node]) is not None:
            self._memory[node] = memory - slot.memory_bytes
        return slot

    def give(self, slot: NodeSlot) -> None:
        """Give a place back."""
        if slot.node not in self._nodes:
            return
        self._cpus[slot.node] += slot.cpus
        self._gpus[slot.node] = tuple(sorted(self._gpus[slot.node] + slot.gpus))
        if (memory := self._memory[slot.node]) is not None:
            self._memory[slot.node] = memory + slot.memory_bytes

    def drop(self, node: str) -> None:
        """Use a node no more: it was lost."""
        for held in (self._nodes, self._cpus, self._gpus, self._memory):
            held.pop(node, None)

    def _fits(self, name: str, unit: Unit) -> bool:
        memory = self._memory[name]
        return (
            has_labels(self._nodes[name], unit)
            and self._cpus[name] >= unit.cpus - _LEAST
            and len(self._gpus[name]) >= unit.gpus
            and (memory is None or memory >= unit.memory_bytes)
        )


def has_labels(node: JobNode, unit: Unit) -> bool:
    """Whether the node has the labels that the unit asks for."""
    return all(node.labels.get(name) == value for name, value in unit.labels)


def next_starts(ready: Iterable[Unit], left_s: Mapping[str, float], free: Free) -> list[tuple[Unit, NodeSlot]]:
    """Start every unit of ``ready`` for which there is a place, those with the longest path behind them (``left_s``)
    first; of equal ones, in the given order. A unit without a place does not keep later ones waiting."""
    started = []
    for unit in sorted(ready, key=lambda unit: -left_s[unit.name]):
        slot = free.take(unit)
        if slot is not None:
            started.append((unit, slot))
    return started


def could_run(unit: Unit, nodes: Mapping[str, JobNode]) -> bool:
    """Whether a node has all that the unit needs, while nothing else runs."""
    return Free(nodes).take(unit) is not None
