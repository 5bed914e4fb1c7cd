"""Shorten a graph: of several equal blocks in a row, keep one, and record which blocks it stands for.

Equal blocks are planned, lowered and priced once. So the search takes the same time for 1,000 layers as for 10.
"""

import itertools
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
"""The largest depth of nested blocks that are compared."""
_Link = tuple[object, ...]


@dataclass(frozen=True)
class Shortened:
    """A graph in which one block stands for all blocks of a run (equal blocks in a row).

    ``copies`` has an entry for each run, with a dict for each removed block. It maps the forward operators of the kept
    block to the equal operators of the removed block. The kept block comes before the removed blocks, which are in the
    order of the model.
    """

    graph: Graph
    copies: tuple[tuple[dict[str, str], ...], ...] = ()


@dataclass
class _Block:
    """A block with its operators in the order of the graph. ``key`` is equal for equal blocks. ``given`` has the
    tensors that the block reads from outside, in order. Its own results, parameters and buffers are left out."""

    name: str
    operators: list[Operator] = field(default_factory=list)
    key: object = None
    given: list[str] = field(default_factory=list)


def shorten(graph: Graph) -> Shortened:
    """Remove all blocks of a run except the first, and connect this block to the operators before and after the run.

    A block is a repeated module (``layers.3``) with its backward operators, and with the additions that join its
    gradients with those of other blocks. Blocks in a row are equal under two conditions: their operators are equal, and
    all read the same results of their neighbours (forward: results of the previous block; backward: results of the next
    block). As an exception, the last block may read other tensors of equal shapes. All other values that the blocks
    read must be the same. If the outermost blocks are not equal (the groups of a ResNet), the blocks inside of them are
    compared. Graphs without such runs stay unchanged.
    """
    for depth in range(1, DEEPEST + 1):
        index = _Index(graph, depth)
        runs = [run for family in index.families for run in index.runs(family)]
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
    """The blocks of a graph at a given depth, by family (the starred name of a block), with the source of every value
    that they read."""

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
                block.given = [
                    name
                    for operator in block.operators for name in operator.inputs
                    if self._source(family, number, name) is None
                ]  # fmt: skip

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
        """For an addition outside of all blocks that joins gradients of blocks: the first of these blocks."""
        if operator.target != _ADD or not operator.backward or len(operator.inputs) < 2:
            return None
        makers = [self.producers[name].name for name in operator.inputs if name in self.producers]
        blocks = [self.block[name] for name in makers if name in self.block]
        if len(blocks) < len(operator.inputs) or len({family for family, _ in blocks}) > 1:
            return None
        return min(blocks, key=lambda block: block[1])

    def _signature(self, family: str, number: int, operator: Operator) -> object:
        """The properties of an operator that must be equal in equal blocks."""
        tensors = [self.graph.tensors[name] for name in (*operator.inputs, *operator.outputs)]
        roles = tuple(self.graph.factor_classes[name].role for name in operator.classes.values())
        return (
            operator.target, operator.prologue, operator.backward, operator.flops, operator.bytes,
            starred(operator.module), msgspec.json.encode(operator.rule), roles,
            tuple((tensor.shape, tensor.dtype, tensor.kind) for tensor in tensors),
            tuple(self._source(family, number, name) for name in operator.inputs),
        )  # fmt: skip

    def _source(self, family: str, number: int, name: str) -> _Link | None:
        """The source of a tensor within the operator's own block; None if the tensor comes from outside the block."""
        if name in self.results:
            return self.results[name][2:] if self.results[name][:2] == (family, number) else None
        own = self.families[family][number].name
        inside = self.graph.tensors[name].kind in ("parameter", "buffer") and name.startswith(own + ".")
        return (name.removeprefix(own),) if inside else None

    # --- runs --------------------------------------------------------------------------------------------------------

    def runs(self, family: str) -> Iterator[list[_Block]]:
        """Yield the runs of two or more equal blocks that can be shortened.

        The kept block must read results of another block. The first block of a model does not, and the placement of its
        inputs may differ. If the last block prevents this, it is left out.
        """
        for numbers in self._equal(family):
            if len(numbers) > 1 and not self._follows(family, *numbers[:2]):
                numbers = numbers[1:]
            run = [self.families[family][number] for number in numbers]
            parts = (run, run[:-1])
            yield from itertools.islice((part for part in parts if len(part) > 1 and self._collapses(part)), 1)

    def _equal(self, family: str) -> Iterator[list[int]]:
        """Yield the indices of equal blocks in a row that have the same links."""
        run: list[int] = []
        links: tuple[_Link, ...] | None = None
        for number, block in enumerate(self.families[family]):
            equal = bool(run) and block.key == self.families[family][run[0]].key
            now = self._links(family, number) if equal else None
            if now is None or (len(run) > 1 and now != links):
                yield run
                run = []
            run.append(number)
            links = now
        yield run

    def _follows(self, family: str, first: int, second: int) -> bool:
        """Whether block ``first`` reads results of the block before it where ``second`` reads results of ``first``."""
        given, links = self.families[family][first].given, self._links(family, second) or ()
        forward = [name for name, link in zip(given, links, strict=True) if link[0] == "forward"]
        return all(self.results.get(name, ())[:2] == (family, first - 1) for name in forward)

    def _links(self, family: str, number: int) -> tuple[_Link, ...] | None:
        """The links between block ``number`` and the previous equal block, for each tensor that they read from outside.
        None if they read different tensors that neither of them makes."""
        before, block = self.families[family][number - 1 : number + 1]
        links: list[_Link] = []
        for earlier, later in zip(before.given, block.given, strict=True):
            if earlier == later:
                links.append(("same", earlier))
            elif self.results.get(later, ())[:2] == (family, number - 1):
                links.append(("forward", *self.results[later][2:]))
            elif self.results.get(earlier, ())[:2] == (family, number):
                links.append(("backward", *self.results[earlier][2:]))
            else:
                return None
        return tuple(links)

    def _collapses(self, run: Sequence[_Block]) -> bool:
        """Whether the first block can stand for all blocks of a run: the blocks run directly one after the other, and
        exchange values only with their neighbours."""
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
        """Whether a parameter or buffer belongs to a removed block."""
        return any(name.startswith(block.name + ".") for block in run[1:])

    def replaced(self, run: Sequence[_Block]) -> dict[tuple[str, str], str]:
        """Maps (operator, input) to the tensor that the operator reads in the shortened graph instead."""
        first, last, removed = run[0], run[-1], _results(run[1:])
        replaced: dict[tuple[str, str], str] = {}
        for operator, twin in zip(first.operators, last.operators, strict=True):
            for name, end in zip(operator.inputs, twin.inputs, strict=True):
                if name in removed:  # backward of the next block, here the block after the run
                    replaced[operator.name, name] = end
        twins = {twin: kept for kept, twin in _twins(first, last)}
        inside = {operator.name for block in run for operator in block.operators}
        for operator in self.graph.operators:
            if operator.name not in inside:
                replaced |= {(operator.name, name): twins[name] for name in operator.inputs if name in removed}
        return replaced

    def stored(self, run: Sequence[_Block]) -> dict[str, str]:
        """Maps a kept tensor, whose memory belongs to a removed tensor, to the owner of its memory in the shortened
        graph."""
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
