"""Splits a stage's graph into one function per phase; backward recomputes the values that forward does not keep."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import msgspec
import torch
from torch import Tensor, fx

from meshwright.capture.fx_graph import FxGraph
from meshwright.ir.program import Program
from meshwright.ir.recomputation import Recomputation
from meshwright.ir.schedule import ActionKind
from meshwright.ir.stages import ALTERNATIVES, BACKWARD, FORWARD, INPUT, LATE, PHASES, PROLOGUE, REDUCE, WEIGHT
from meshwright.lower.function import DISPATCHED, BoxedFunction, Kernels, boxed_function
from meshwright.lower.fuse import accumulate_products, reuse_memory, write_into_buckets
from meshwright.lower.pieces import ProductDivider
from meshwright.lower.prefetch import prefetch, sink_waits, start_early
from meshwright.lower.regions import Compiler
from meshwright.ops import collectives
from meshwright.ops.view import VIEWS

aten = torch.ops.aten

_NOTED = (FORWARD, BACKWARD)
_VIEWS = VIEWS | {aten.reshape.default, aten.contiguous.default}
_AGAIN = _VIEWS | {aten._to_copy.default}


class PhaseFunction:
    """A phase's function, and the names of the values that it takes and returns. The function takes its values in one
    list, which it empties. It is compiled at first use, because some phases are never used: a schedule runs backward in
    one piece or in two, and an evaluation runs no backward."""

    def __init__(
        self,
        inputs: Iterable[str],
        outputs: Iterable[str],
        make: Callable[[], fx.Graph],
        compile: Callable[[fx.Graph], BoxedFunction],
    ) -> None:
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._make: Callable[[], fx.Graph] | None = make
        self._compile = compile

    def forget(self) -> None:
        """Free the stage's graph, from which this function would be compiled, because the function will not be
        called."""
        self._make = None

    @cached_property
    def function(self) -> BoxedFunction:
        """The compiled function of the phase's graph; checked and compiled at first use."""
        self.graph.lint()
        return self._compile(self.graph)

    @cached_property
    def graph(self) -> fx.Graph:
        """The phase's graph; made at first use."""
        assert self._make is not None, "it was forgotten"
        graph = self._make()
        self._make = None
        return graph


@dataclass(frozen=True)
class EmittedStage:
    """A stage's graph with the calls of all phases, and its program without recomputation. The graph does not change
    when it is split into functions, so plans that differ in recomputation can share it. ``places`` maps each group to
    this rank's index in it."""

    graph: fx.Graph
    program: Program
    places: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LoweredStage:
    """A stage's program, and the function of each phase. The program's ``phases`` are empty, because running the stage
    does not need them; :func:`meshwright.lower.describe.describe` fills them in."""

    program: Program
    functions: Mapping[str, PhaseFunction]


def partition(
    emitted: EmittedStage,
    again: Recomputation,
    constants: dict[str, Tensor],
    compiler: Compiler | None = None,
    kernels: Kernels = DISPATCHED,
    note: Callable[[str], None] | None = None,
    symmetric: Collection[str] = (),
    ahead: int = 1,
    graphs: bool = False,
) -> LoweredStage:
    """Make the function of every phase. Every node needs ``meta["phase"]``. Call ``propagate`` first.

    ``backward`` is also split into two functions: ``input`` computes the gradients that are sent to the previous stage,
    and ``weight`` computes the rest. If the program runs its phases ``together``, the function of the prologue runs all
    of them, and calls ``note`` where forward and backward begin. ``compiler`` compiles runs of operators. ``kernels``
    maps an operator to the function that replaces it. ``symmetric`` names the groups that run products in pieces in
    memory that they share (``lower/pieces.py``). Parameters are gathered ``ahead`` buckets before their use. With
    ``graphs``, phases are captured as graphs of kernels: a collective ends in the phase in which it begins.
    """
    graph, program = emitted.graph, emitted.program
    program = msgspec.structs.replace(program, together=program.together and not again.names)
    split = _Partition(graph, again, compiler, note, ProductDivider(emitted.places, symmetric), ahead)
    members: dict[str, list[fx.Node]] = {phase: [] for phase in PHASES}
    for node in graph.nodes:
        if node.op == "call_function":
            begun = node.all_input_nodes[0] if graphs and node.target is collectives.WAIT else node
            phase = node.meta["phase"] if begun.meta.get("phase") == REDUCE else begun.meta["phase"]
            members[PROLOGUE if program.together else phase].append(node)
    members[INPUT], members[WEIGHT] = _input_and_weight(members[BACKWARD], program)
    orders = {phase: split.order(phase, nodes) for phase, nodes in members.items()}
    taken = {phase: split.taken(order) for phase, order in orders.items()}
    result = {}
    for phase, nodes in members.items():
        others = [taken[other] for other in PHASES if other not in ALTERNATIVES.get(phase, (phase,))]
        outputs = [node for node in nodes if node.meta.get("returned") or any(node in inputs for inputs in others)]
        make = partial(split.graph_of, phase, orders[phase], taken[phase], outputs)
        names = (node.name for node in taken[phase]), (node.name for node in outputs)
        result[phase] = PhaseFunction(*names, make, partial(boxed_function, constants=constants, kernels=kernels))
    return LoweredStage(program, result)


def _input_and_weight(backward: list[fx.Node], program: Program) -> tuple[list[fx.Node], list[fx.Node]]:
    """Split backward in two: the nodes on which sent gradients depend, and the rest."""
    sent_down = {transfer.value.name for transfer in program.crossing(ActionKind.SEND_B)}
    needed: set[fx.Node] = set()
    inside = set(backward)
    pending = [node for node in backward if node.name in sent_down]
    while pending:
        node = pending.pop()
        if node in inside and node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return [node for node in backward if node in needed], [node for node in backward if node not in needed]


def _accumulations(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node | None]:
    """Maps each addition to a gradient to the previous addition to the same gradient; all phases keep this order."""
    latest: dict[fx.Node, fx.Node] = {}
    result: dict[fx.Node, fx.Node | None] = {}
    for node in nodes:
        if node.target is aten.add_.Tensor:
            total = node.all_input_nodes[0]
            result[node] = latest.get(total)
            latest[total] = node
    return result


class _Partition:
    def __init__(
        self, graph: fx.Graph, again: Recomputation, compiler: Compiler | None, note: Callable[[str], None] | None,
        pieces: ProductDivider, ahead: int,
    ) -> None:  # fmt: skip
        self.graph, self.again, self.compiler, self.note, self.pieces = graph, again, compiler, note, pieces
        self.ahead = ahead
        self.output = next(node for node in graph.nodes if node.op == "output")
        self.cheap: dict[fx.Node, bool] = {}

    def order(self, phase: str, nodes: list[fx.Node]) -> list[fx.Node]:
        """The nodes of a phase, in the order in which they run. In backward, recomputed forward nodes come just before
        their first use. Every gradient is accumulated as soon as it is computed, to free its memory and the memory of
        its inputs early. Buckets are reduced as soon as their last gradient is computed, one at a time."""
        inside = set(nodes)
        order: list[fx.Node] = []
        done: set[fx.Node] = set()
        reductions = {node for node in nodes if node.target is collectives.REDUCE_TO_PARTS}
        under_way: list[fx.Node] = []
        before = _accumulations(nodes) if phase in LATE else {}

        def place(node: fx.Node) -> None:
            if node in done or node.op != "call_function":
                return
            again = phase in LATE and node.meta["phase"] == FORWARD and self._computed_again(node)
            if node not in inside and not again:
                return
            done.add(node)
            for source in node.all_input_nodes:
                place(source)
            order.append(node)
            for user in node.users:
                if user in before and (before[user] is None or before[user] in done):
                    place(user)
                elif user in reductions and done.issuperset(user.all_input_nodes):
                    while under_way:
                        finish(under_way.pop())
                    place(user)
                    under_way.append(user)

        def finish(node: fx.Node) -> None:
            for user in node.users:
                place(user)
                finish(user)

        for node in nodes:
            place(node)
        return order

    @staticmethod
    def taken(order: list[fx.Node]) -> dict[fx.Node, None]:
        """The values, except constants, that a phase's nodes read but do not compute."""
        inside = set(order)
        return {
            source: None
            for node in order
            for source in node.all_input_nodes
            if source not in inside and source.op != "get_attr"
        }

    def graph_of(
        self, phase: str, order: list[fx.Node], taken: dict[fx.Node, None], outputs: list[fx.Node]
    ) -> fx.Graph:
        """Copy a phase's nodes into a graph of their own, and run all passes over it."""
        constants = {source: None for node in order for source in node.all_input_nodes if source.op == "get_attr"}
        new = FxGraph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in taken:
            copies[node] = new.placeholder(node.name)
            copies[node].meta.update(node.meta)
        for node in (*constants, *order):
            copies[node] = new.node_copy(node, copies.__getitem__)
        new.output([copies[node] for node in outputs])
        self.pieces.divide(new)
        if self.compiler is not None:
            self.compiler.compile(new)
        write_into_buckets(new)
        prefetch(new, self.ahead)
        sink_waits(new)
        start_early(new)
        accumulate_products(new)
        reuse_memory(new)
        if self.note is not None and phase == PROLOGUE:
            self._note(new, self.note)
        return new

    @staticmethod
    def _note(graph: fx.Graph, note: Callable[[str], None]) -> None:
        """Insert calls of ``note`` at the beginnings of forward and backward in this function."""
        for begun in _NOTED:
            first = next(
                (node for node in graph.nodes if node.meta.get("phase") == begun and node.op != "placeholder"), None
            )
            if first is not None:
                with graph.inserting_before(first):
                    graph.call_function(note, (begun,))

    def _computed_again(self, node: fx.Node) -> bool:
        """Whether backward recomputes a forward node, instead of taking its value from forward."""
        if node in self.cheap:
            return self.cheap[node]
        self.cheap[node] = self._released(node)
        if self.cheap[node]:
            return True
        operator = str(node.meta.get("operator", ""))
        if node.op != "call_function" or node.meta.get("returned") or not self.again.holds(operator):
            return False
        if node.target in (collectives.WAIT, *collectives.STARTS):
            # A collective may work in place: run again on a value that is kept, it would reduce it twice.
            source = node.args[0]
            if not (isinstance(source, fx.Node) and self._computed_again(source)):
                return False
        elif self.again.whole_block(operator):
            block = self.again.block(operator)
            for user in node.users:
                if user is not self.output and self.again.block(str(user.meta.get("operator", ""))) != block:
                    return False  # another block reads the value, so it is kept
        self.cheap[node] = True
        return True

    def _released(self, node: fx.Node) -> bool:
        """Whether a node is a parameter that is released after forward, or a view or cast of such a parameter."""
        if node.op != "call_function" or node.meta.get("returned"):
            return False
        source = node.args[0] if node.args else None
        view = node.target in _AGAIN and isinstance(source, fx.Node) and self._released(source)
        return bool(node.meta.get("released")) or view
