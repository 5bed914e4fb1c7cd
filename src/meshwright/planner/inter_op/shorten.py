"""Shorten a graph: keep one of several equal blocks in a row, and note which blocks it stands for.

Equal blocks are planned, lowered and priced once, so that the search takes as long for 1,000 layers as for 10.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from meshwright.ir.graph import Graph, Operator
from meshwright.ir.plan import starred
from meshwright.ir.stages import forward_operators
from meshwright.planner.intra_op.decisions import block_of

_ADD = "aten.add.Tensor"
DEEPEST = 2
"""Largest depth of blocks inside of blocks that are compared."""
_Source = tuple[object, ...]


@dataclass(frozen=True)
class Shortened:
    """A graph in which one block stands for all blocks of a run (equal blocks in a row).

    ``copies`` has an entry for each run: for each block that was removed, the forward operators of the kept block
    mapped to the equal operators of the removed block. The kept block comes before the removed blocks, which are in the
    order of the model.
    """

    graph: Graph
    copies: tuple[tuple[dict[str, str], ...], ...] = ()


@dataclass
class _Block:
    """A block with its operators in the order of the graph. ``key`` is equal for equal blocks."""

    name: str
    operators: list[Operator] = field(default_factory=list)
    key: object = None


def shorten(graph: Graph) -> Shortened:
    """Remove all blocks of a run except the first, and connect this block to what came before and after the run.

    A block is a repeated module (``layers.3``) with its backward operators, and with the additions that join its
    gradients to those of other blocks. Blocks are equal if their operators are equal and read equal values: of their
    own, of the blocks before and after, or of the same tensors outside. The first and the last block of a model read
    other values than those between, and are therefore kept. If the outermost blocks are not equal (the groups of a
    ResNet), the blocks inside of them are compared. Graphs without such runs stay as they are.
    """
    for depth in range(1, DEEPEST + 1):
        index = _Index(graph, depth)
        runs = [run for family in index.families.values() for run in _runs(family) if index.collapses(run)]
        if runs:
            break
    else:
        return Shortened(graph)
    removed = {operator.name for run in runs for block in run[1:] for operator in block.operators}
    renamed = {name: kept for run in runs for name, kept in index.replaced(run).items()}
    operators = tuple(
        msgspec.structs.replace(
            operator, inputs=tuple(renamed.get((operator.name, name), name) for name in operator.inputs)
        )
        for operator in graph.operators
        if operator.name not in removed
    )
    gone = {name for operator in graph.operators if operator.name in removed for name in operator.outputs}
    read = {name for operator in operators for name in operator.inputs}
    owned = {
        name
        for operator in graph.operators if operator.name in removed
        for name in operator.inputs if graph.tensors[name].kind in ("parameter", "buffer") and name not in read
    }  # fmt: skip
    gone |= owned
    storages = {name: kept for run in runs for name, kept in index.stored(run).items()}
    short = msgspec.structs.replace(
        graph,
        operators=operators,
        tensors={
            name: msgspec.structs.replace(tensor, storage=storages.get(name, tensor.storage))
            for name, tensor in graph.tensors.items()
            if name not in gone
        },
        parameters=tuple(name for name in graph.parameters if name not in gone),
        buffers=tuple(name for name in graph.buffers if name not in gone),
        gradients=tuple(entry for entry in graph.gradients if entry.parameter not in gone),
        buffer_updates={name: update for name, update in graph.buffer_updates.items() if name not in gone},
        tied={name: other for name, other in graph.tied.items() if other not in gone},
    )
    forward = {operator.name for operator in forward_operators(graph)}
    copies = tuple(
        tuple(
            {
                kept.name: copy.name
                for kept, copy in zip(run[0].operators, block.operators, strict=True)
                if kept.name in forward
            }
            for block in run[1:]
        )
        for run in runs
    )
    return Shortened(short, copies)


class _Index:
    """The blocks of a graph at a depth, by family (the starred name of a block), with the source of every value that
    they read."""

    def __init__(self, graph: Graph, depth: int) -> None:
        self.graph, self.depth = graph, depth
        self.producers = graph.producers()
        self.forward = {operator.name: place for place, operator in enumerate(forward_operators(graph))}
        self.block: dict[str, tuple[str, int]] = {}
        self.families: dict[str, list[_Block]] = {}
        self._collect()
        self.place = {
            operator.name: (family, number, local)
            for family, blocks in self.families.items()
            for number, block in enumerate(blocks)
            for local, operator in enumerate(block.operators)
        }
        self.results = {
            name: (*self.place[operator.name], output)
            for operator in graph.operators if operator.name in self.place
            for output, name in enumerate(operator.outputs)
        }  # fmt: skip
        for family, blocks in self.families.items():
            for number, block in enumerate(blocks):
                block.key = tuple(self._signature(family, number, operator) for operator in block.operators)

    def _collect(self) -> None:
        numbers: dict[str, dict[str, int]] = defaultdict(dict)
        for operator in forward_operators(self.graph):
            if name := block_of(operator, self.depth):
                numbers[starred(name)].setdefault(name, len(numbers[starred(name)]))
        self.families = {family: [_Block(name) for name in names] for family, names in numbers.items()}
        for operator in self.graph.operators:
            name = block_of(operator, self.depth)
            family = starred(name)
            if name and name in numbers.get(family, ()):
                where: tuple[str, int] | None = (family, numbers[family][name])
            else:
                where = self._joined(operator)
            if where is not None:
                self.block[operator.name] = where
                self.families[where[0]][where[1]].operators.append(operator)

    def _joined(self, operator: Operator) -> tuple[str, int] | None:
        """The block of an addition outside of all blocks that joins the gradients of blocks: its first block."""
        if operator.target != _ADD or not operator.backward or len(operator.inputs) < 2:
            return None
        makers = [self.producers[name].name for name in operator.inputs if name in self.producers]
        blocks = [self.block[name] for name in makers if name in self.block]
        if len(blocks) < len(operator.inputs) or len({family for family, _ in blocks}) > 1:
            return None
        return min(blocks, key=lambda block: block[1])

    def _signature(self, family: str, number: int, operator: Operator) -> object:
        """What must be equal in equal blocks."""
        tensors = [self.graph.tensors[name] for name in (*operator.inputs, *operator.outputs)]
        roles = tuple(self.graph.factor_classes[name].role for name in operator.classes.values())
        return (
            operator.target, operator.prologue, operator.backward, operator.flops, operator.bytes,
            starred(operator.module), msgspec.json.encode(operator.rule), roles,
            tuple((tensor.shape, tensor.dtype, tensor.kind) for tensor in tensors),
            tuple(self._source(family, number, name) for name in operator.inputs),
        )  # fmt: skip

    def _source(self, family: str, number: int, name: str) -> _Source:
        if name in self.results:
            other, block, local, output = self.results[name]
            if other == family and abs(block - number) <= 1:
                return "block", block - number, local, output
            return "outside", name
        own = self.families[family][number].name
        inside = self.graph.tensors[name].kind in ("parameter", "buffer") and name.startswith(own + ".")
        return ("own", name.removeprefix(own)) if inside else ("outside", name)

    # --- runs --------------------------------------------------------------------------------------------------------

    def collapses(self, run: Sequence[_Block]) -> bool:
        """Whether the blocks of a run run one directly after the other, and read and are read only by their neighbours,
        so that the first block can stand for all blocks."""
        places = [self.forward[op.name] for block in run for op in block.operators if op.name in self.forward]
        if sorted(places) != list(range(min(places), min(places) + len(places))) or places != sorted(places):
            return False
        removed = {operator.name: number for number, block in enumerate(run) for operator in block.operators if number}
        first, last = run[0], len(run) - 1
        kept = {operator.name for operator in first.operators}
        outside = {
            self.graph.loss, *self.graph.metrics.values(),
            *(update for buffer, update in self.graph.buffer_updates.items() if not self._owned(run, buffer)),
            *(entry.gradient for entry in self.graph.gradients if not self._owned(run, entry.parameter)),
        }  # fmt: skip
        made = {
            name: number
            for number, block in enumerate(run)
            for operator in block.operators
            for name in operator.outputs
        }
        if any(name in outside for name, number in made.items() if number):
            return False
        for operator in self.graph.operators:
            if operator.name in removed or operator.name in kept:
                continue
            # Operators after the run read its last block. In backward, operators before the run read its first block.
            if len({made[name] for name in operator.inputs if name in made} | {0, last}) > 2:
                return False
        return True

    def _owned(self, run: Sequence[_Block], name: str) -> bool:
        """Whether a parameter or buffer belongs to a block that is removed."""
        return any(name.startswith(block.name + ".") for block in run[1:])

    def replaced(self, run: Sequence[_Block]) -> dict[tuple[str, str], str]:
        """Maps (operator, input) to the tensor that the operator reads in the shortened graph instead."""
        first, last, removed = run[0], run[-1], _results(run[1:])
        replaced: dict[tuple[str, str], str] = {}
        for operator, twin in zip(first.operators, last.operators, strict=True):
            for name, end in zip(operator.inputs, twin.inputs, strict=True):
                if name in removed:  # the backward of the next block: now that of the block after the run
                    replaced[operator.name, name] = end
        twins = {twin: kept for kept, twin in _twins(first, last)}
        inside = {operator.name for block in run for operator in block.operators}
        for operator in self.graph.operators:
            if operator.name not in inside:
                replaced |= {(operator.name, name): twins[name] for name in operator.inputs if name in removed}
        return replaced

    def stored(self, run: Sequence[_Block]) -> dict[str, str]:
        """Maps a kept tensor whose memory a removed tensor owns to the owner of its memory in the shortened graph."""
        first, last, removed = run[0], run[-1], _results(run[1:])
        tensors = self.graph.tensors
        twins = {twin: kept for kept, twin in _twins(first, last)}
        stored = {kept: tensors[twin].storage for kept, twin in _twins(first, last) if tensors[kept].storage in removed}
        return stored | {
            name: twins[tensor.storage]
            for name, tensor in tensors.items()
            if tensor.storage in twins and name not in removed and name not in stored
        }  # fmt: skip


def _results(blocks: Sequence[_Block]) -> set[str]:
    return {name for block in blocks for operator in block.operators for name in operator.outputs}


def _twins(block: _Block, other: _Block) -> list[tuple[str, str]]:
    """The pairs of results of two equal blocks."""
    return [
        pair
        for operator, twin in zip(block.operators, other.operators, strict=True)
        for pair in zip(operator.outputs, twin.outputs, strict=True)
    ]


def _runs(family: Sequence[_Block]) -> Iterator[list[_Block]]:
    """Yield the runs of two or more equal blocks."""
    run: list[_Block] = []
    for block in family:
        if run and block.key != run[0].key:
            if len(run) > 1:
                yield run
            run = []
        run.append(block)
    if len(run) > 1:
        yield run
