"""What a rank runs in one go, with its cost: what the walk over a stage is made of."""

from dataclasses import dataclass, field

from meshwright.cost.operators import Cost
from meshwright.ir.graph import Graph


@dataclass(frozen=True)
class Exchange:
    """A collective over an axis, of ``bytes`` (as ``cost.collective.Network`` counts them), over ranks that all come to
    it."""

    what: str
    kind: str
    axis: str
    bytes: int


@dataclass(eq=False)
class Node:
    """Something that runs in one go: kernels, then collectives. ``storages`` are the memory that it makes, by key, with
    bytes; ``scratch_bytes`` are needed while it runs. It is

    early        its collectives could start as soon as its input is made
    accumulates  it adds to what is there before the micro-batch
    joins        it reduces many gradients, when the last is made, and those before have been
    reduces      the number of the bucket of gradients that it reduces; else -1
    gathers      it makes parameters whole, and could start when those before have arrived
    released     parameters that were gathered for one use, or a view of one
    halo         rows of neighbours and nothing else
    """

    what: str
    phase: str
    operator: str
    cost: Cost
    inputs: list["Node"] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    storages: dict[str, int] = field(default_factory=dict)
    views: list[str] = field(default_factory=list)
    early: bool = False
    in_place: bool = False
    returned: bool = False
    accumulates: bool = False
    joins: bool = False
    reduces: int = -1
    gathers: bool = False
    released: bool = False
    halo: bool = False
    scratch_bytes: int = 0


def storage_readers(graph: Graph) -> dict[str, int]:
    """How often the memory behind a tensor is read, other than by views of it."""
    readers: dict[str, int] = {}
    for operator in graph.operators:
        made = {graph.tensors[output].storage for output in operator.outputs if output in graph.tensors}
        for name in operator.inputs:
            storage = graph.tensors[name].storage
            if storage not in made:
                readers[storage] = readers.get(storage, 0) + 1
    return readers
