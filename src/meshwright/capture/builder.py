"""Builds the Graph from traced operators: names, rules with joined factors, FLOPs, repeated blocks, the prologue."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, fx, nn

from meshwright.capture import refusals
from meshwright.capture.batch import Leaves, take_apart
from meshwright.capture.calls import written
from meshwright.capture.factors import Atom, BoundRule, Rendered, bind, dim_atoms, leaves, unify, unused
from meshwright.capture.functionalize import functionalized, is_getitem
from meshwright.capture.opaque import OpaqueRegions
from meshwright.capture.provenance import repeated
from meshwright.capture.reads import Reads
from meshwright.capture.recorder import Rewrites
from meshwright.capture.rules import RuleOfCall, Rules
from meshwright.capture.tracer import InPlace, LossFunction, Traced, forward_hooks, trace
from meshwright.capture.values import Read, put_contents
from meshwright.garbage import nothing_collected
from meshwright.ir import graph as ir
from meshwright.ir.precision import Precision
from meshwright.ir.rule import Rule
from meshwright.ops.base import Call, OperatorRule, Target, Unsplit
from meshwright.ops.table import VISIBLE
from meshwright.ops.table import rewrites as canonical_rewrites
from meshwright.ops.view import VIEWS
from meshwright.torch_private import DisableTorchFunction


@dataclass
class Capture:
    """A captured graph, and what a trainer needs beside it.

    ``leaves`` is the structure of the batch, without data. ``constants`` are the tensors that the step holds. ``reads``
    has the values that the step read from Python objects. ``moved`` maps the place of such a value, if the step changed
    it, to the change in words.
    """

    graph: ir.Graph
    leaves: Leaves
    constants: dict[str, Tensor]
    rules: Mapping[Target, OperatorRule]
    training: bool = True
    reads: list[Read] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)
    opaque: OpaqueRegions | None = None


@dataclass
class _Operation:
    node: fx.Node
    call: Call
    call_rule: RuleOfCall
    inputs: list[fx.Node]
    outputs: list[fx.Node | None]
    positions: tuple[int, ...]
    name: str = ""
    bound: BoundRule | None = None

    @property
    def custom(self) -> dict[str, Any]:
        """The origin of the call (``Provenance.here``)."""
        return self.node.meta.get("custom", {})

    @property
    def module(self) -> str:
        """The path of the module that made the call."""
        return str(self.custom.get("module", ""))

    @property
    def output_names(self) -> list[str]:
        """The names of the operator's outputs in the graph."""
        is_tuple = len(self.outputs) > 1
        return [f"{self.name}.{index}" if is_tuple else self.name for index in range(len(self.outputs))]


@nothing_collected()
def capture(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    training: bool = True,
    rules: Mapping[Target, OperatorRule] | None = None,
    precision: Precision | None = None,
    in_place: InPlace | None = None,
) -> Capture:
    """Capture one training step (or evaluation) of ``model`` on a global batch as a graph.

    The step is traced at the batch's size and at twice that size. Both traces must run equal operators. Dims whose
    sizes differ between the traces are the batch. At batch size 1, PyTorch leaves out operators (such as an expand to
    1), so the batch is then found at sizes 2 and 4. If operators work in place, the step is traced once more with only
    the rewrites ``VISIBLE``, because the others may copy a tensor that an operator changes in place. All rewrites are
    applied when this trace is recorded again without in-place operators (``functionalized``).

    ``precision`` is the precision of products (``capture/precision.py``); None keeps the model's own dtypes.
    ``in_place`` replaces calls of opaque regions (``capture/opaque_trace.py``).

    Raises:
        CaptureError: the step cannot be traced, or depends on the batch size or on Python values that it changes.
        RuleError: a rule's pattern does not fit its operator.
    """
    size = take_apart(batch).size
    reads, hooks = Reads(model, loss_fn), forward_hooks(model)

    def at(batch_size: int, rewrites: Rewrites) -> Traced:
        with reads:
            return trace(
                model, loss_fn, batch, training=training, batch_size=batch_size, rewrites=rewrites, precision=precision,
                in_place=in_place,
            )  # fmt: skip

    rewrites: Rewrites = canonical_rewrites()
    traced = at(size, rewrites)
    if put_contents(hooks):  # the first call set up forward hooks, which are now undone; this call keeps them
        trace(model, loss_fn, batch, training=training, precision=precision, in_place=in_place)
        reads = Reads(model, loss_fn)
        traced = at(size, rewrites)
    if traced.mutates:
        traced = at(size, rewrites := VISIBLE)
    sizes = (2, 4) if size == 1 else (size, 2 * size)
    pair = {batch_size: traced if batch_size == size else at(batch_size, rewrites) for batch_size in sizes}
    refusals.other_random_numbers([step.drawn for step in (traced, *pair.values())])
    refusals.other_operators({batch_size: step.graph for batch_size, step in pair.items()})
    moved = reads.check_moved(pair[sizes[1]].graph, lambda: at(sizes[1], rewrites).graph)
    with DisableTorchFunction():  # the user's function modes are meant for the step, which has been traced by now
        captured = _Builder(model, functionalized(traced), pair, size, rules or {}, precision).build(training)
    captured.reads, captured.moved = reads.recorded, moved
    return captured


class _Builder:
    def __init__(
        self, model: nn.Module, traced: Traced, pair: dict[int, Traced], size: int, own: Mapping[Target, OperatorRule],
        precision: Precision | None,
    ) -> None:  # fmt: skip
        self.model, self.traced, self.pair, self.size, self.own = model, traced, pair, size, own
        self.precision = precision
        self.scalars, self.gradients, self.updates = traced.results()
        self.rules, self.rendered = Rules(own), Rendered()
        self.atoms: dict[fx.Node, list[list[Atom]]] = {}
        self.names: dict[fx.Node, str] = {}
        self.batched: list[Atom] = []

    def build(self, training: bool) -> Capture:
        self._name_placeholders()
        self._find_batch()
        operations = self._operations()
        for operation in operations:
            self._join(operation)
        self._join_gradients()
        return self._finish(operations, training)

    def _name_placeholders(self) -> None:
        traced = self.traced
        names = [*traced.parameters, *traced.buffers, *traced.inputs]
        for node, name in zip(traced.placeholders, names, strict=True):
            self.names[node] = name
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                self.names[node] = f"constant.{node.target}"
                node.meta["val"] = traced.constants[node.target]
        for node in self.names:
            self.atoms[node] = [[Atom(int(size))] for size in node.meta["val"].shape]

    def _find_batch(self) -> None:
        """Mark the dims of inputs whose sizes differ between the two traces as the batch."""
        smaller, larger = self.pair.values()
        for node, first, second in zip(
            self.traced.placeholders, smaller.placeholders, larger.placeholders, strict=True
        ):
            for dim, (a, b) in enumerate(zip(first.meta["val"].shape, second.meta["val"].shape, strict=True)):
                if a != b:
                    self.batched += self.atoms[node][dim]
                    self.atoms[node][dim][0].hint = "b"

    def _operations(self) -> list[_Operation]:
        result = []
        counts: Counter[str] = Counter()
        for node in self.traced.graph.nodes:
            if node.op != "call_function" or is_getitem(node):
                continue
            value = node.meta["val"]
            outputs: list[fx.Node | None]
            present: list[int] = []
            if isinstance(value, Tensor):
                values, outputs = [value], [node]
            else:
                taken = {user.args[1]: user for user in node.users if is_getitem(user)}
                present = [index for index, item in enumerate(value) if isinstance(item, Tensor)]
                values, outputs = [value[index] for index in present], [taken.get(index) for index in present]
            fake = torch.fx.map_arg((node.args, node.kwargs), lambda item: item.meta["val"])
            call = Call(node.target, tuple(fake[0]), dict(fake[1]), tuple(values))
            operation = _Operation(node, call, self.rules.of(call), _tensor_nodes(node), outputs, tuple(present))
            module = operation.module
            stem = f"{module}:{_short(node.target)}" if module else _short(node.target)
            operation.name = f"{stem}#{counts[stem]}"
            counts[stem] += 1
            result.append(operation)
        return result

    def _join(self, operation: _Operation) -> None:
        rule = operation.call_rule.rule
        if isinstance(rule, Unsplit):
            output_atoms = [[[Atom(int(size))] for size in value.shape] for value in operation.call.outputs]
        else:
            bound = operation.bound = bind(rule, operation.call_rule.contiguous)
            for operand, node in zip(bound.inputs, operation.inputs, strict=True):
                for operand_dim, node_dim in zip(dim_atoms(operand), self.atoms[node], strict=True):
                    unify(node_dim, operand_dim)
            output_atoms = [dim_atoms(operand) for operand in bound.outputs]
        for output, name, atoms in zip(operation.outputs, operation.output_names, output_atoms, strict=True):
            if output is not None:
                self.names[output], self.atoms[output] = name, atoms

    def _join_gradients(self) -> None:
        by_name = {name: node for node, name in self.names.items()}
        for parameter, gradient in self.gradients.items():
            if gradient is not None and gradient in self.atoms:
                for left, right in zip(self.atoms[by_name[parameter]], self.atoms[gradient], strict=True):
                    unify(left, right)

    def _classes(self, operations: list[_Operation]) -> tuple[dict[int, str], dict[str, ir.FactorClass]]:
        batched = {id(leaves([atom])[0]) for atom in self.batched}
        names: dict[int, str] = {}
        classes: dict[str, ir.FactorClass] = {}
        groups = [dim for dims in self.atoms.values() for dim in dims]
        groups += [atoms for operation in operations if operation.bound for atoms in operation.bound.letters.values()]
        for dim in groups:
            for atom in leaves(dim):
                if id(atom) not in names:
                    batch = id(atom) in batched
                    if batch:
                        atom.hint = "b"
                    name = names[id(atom)] = unused(atom.hint or "x", classes)
                    classes[name] = ir.FactorClass(name=name, size=atom.size, role="batch" if batch else "")
        return names, classes

    def _finish(self, operations: list[_Operation], training: bool) -> Capture:
        names, classes = self._classes(operations)
        tensors = self._tensors(operations, names)
        prologue = self._prologue(operations)
        repeats = repeated([operation.module for operation in operations])
        result: list[ir.Operator] = []
        lines = self._forward_lines(operations)
        for operation in operations:
            rule: Rule | None = None
            members: dict[str, str] = {}
            letters: dict[str, tuple[str, ...]] = {}
            if operation.bound is not None:
                rule, members, letters = self.rendered(operation.bound, names)
            custom, module, call_rule = operation.custom, operation.module, operation.call_rule
            result.append(
                ir.Operator(
                    name=operation.name,
                    target=str(operation.call.target),
                    inputs=tuple(self.names[node] for node in operation.inputs),
                    outputs=tuple(operation.output_names),
                    rule=rule,
                    arguments=written(operation.node.args, operation.node.kwargs, operation.name),
                    positions=operation.positions,
                    classes=members,
                    letters=letters,
                    reason=call_rule.rule.reason if isinstance(call_rule.rule, Unsplit) else "",
                    flops=call_rule.flops,
                    bytes=call_rule.num_bytes,
                    module=module,
                    source=custom.get("source") or lines.get(custom.get("sequence", -1), ""),
                    backward=bool(custom.get("backward")),
                    prologue=operation.name in prologue,
                    repeat=repeats.get(module, ""),
                    sequence=int(custom.get("sequence", -1)),
                )
            )
        graph = self._graph(tensors, tuple(result), classes)
        return Capture(graph, self.traced.leaves, self.traced.constants, self.own, training)

    @staticmethod
    def _forward_lines(operations: list[_Operation]) -> dict[int, str]:
        """The source line of each forward operator, by its sequence number."""
        return {
            custom["sequence"]: custom["source"]
            for custom in (operation.custom for operation in operations)
            if custom.get("source") and "sequence" in custom and not custom.get("backward")
        }

    def _tensors(self, operations: list[_Operation], names: dict[int, str]) -> dict[str, ir.Tensor]:
        traced = self.traced
        kinds: dict[str, ir.TensorKind] = dict.fromkeys(traced.parameters, "parameter")
        kinds.update(dict.fromkeys(traced.buffers, "buffer"))
        kinds.update(dict.fromkeys(traced.inputs, "input"))
        gradients = {self.names[node] for node in self.gradients.values() if node in self.names}
        tensors: dict[str, ir.Tensor] = {}

        def add(name: str, value: Tensor, kind: ir.TensorKind, storage: str, atoms: list[list[Atom]]) -> None:
            tensors[name] = ir.Tensor(
                name=name,
                shape=tuple(map(int, value.shape)),
                dtype=str(value.dtype).removeprefix("torch."),
                kind=kind,
                storage=storage,
                dims=tuple(tuple(names[id(atom)] for atom in leaves(dim) if atom.size != 1) for dim in atoms),
            )

        for node, name in self.names.items():
            if node.op in ("placeholder", "get_attr"):
                add(name, node.meta["val"], kinds.get(name, "constant"), name, self.atoms[node])
        for operation in operations:
            outputs = zip(operation.output_names, operation.outputs, operation.call.outputs, strict=True)
            for name, output, value in outputs:
                view = operation.call.target in VIEWS and operation.inputs
                storage = tensors[self.names[operation.inputs[0]]].storage if view else name
                kind: ir.TensorKind = "gradient" if name in gradients else "activation"
                atoms = self.atoms[output] if output is not None else []
                add(name, value, kind, storage, atoms)
        return tensors

    def _prologue(self, operations: list[_Operation]) -> set[str]:
        """Return the operators that depend on no parameter, no buffer and no random number. An operator that makes a
        scalar (such as the total of class weights), and the operators that it depends on, may also read buffers that
        the step does not change."""
        result = self._independent(operations, {*self.traced.parameters, *self.traced.buffers})
        allowed = self._independent(operations, {*self.traced.parameters, *self._buffer_updates()})
        needed: set[fx.Node | None] = set()
        for operation in reversed(operations):
            number = not any(value.dim() for value in operation.call.outputs)
            if operation.name in allowed and (number or not needed.isdisjoint(operation.outputs)):
                needed.update(operation.inputs)
                result.add(operation.name)
        return result

    def _independent(self, operations: list[_Operation], state: set[str]) -> set[str]:
        """Return the operators that depend on no tensor in ``state`` and on no random number."""
        tainted = {node for node, name in self.names.items() if name in state}
        result = set()
        for operation in operations:
            if operation.call_rule.random or any(node in tainted for node in operation.inputs):
                tainted.update(output for output in operation.outputs if output is not None)
            else:
                result.add(operation.name)
        return result

    def _buffer_updates(self) -> dict[str, str]:
        """Map each buffer that the step changes to the tensor with its new value."""
        named = {name: self.names[node] for name, node in self.updates.items()}
        return {name: value for name, value in named.items() if value != name}

    def _graph(
        self, tensors: dict[str, ir.Tensor], operators: tuple[ir.Operator, ...], classes: dict[str, ir.FactorClass]
    ) -> ir.Graph:
        traced = self.traced
        loss, *metrics = (self.names[node] for node in self.scalars)
        graph = ir.Graph(
            model=type(self.model).__name__,
            batch_size=self.size,
            tensors=tensors,
            operators=operators,
            factor_classes=classes,
            inputs=tuple(traced.inputs),
            parameters=tuple(traced.parameters),
            buffers=tuple(traced.buffers),
            loss=loss,
            metrics=dict(zip(traced.metrics, metrics, strict=True)),
            gradients=tuple(
                ir.ParameterGradient(parameter=name, gradient=self.names[node] if node is not None else None)
                for name, node in self.gradients.items()
            ),
            buffer_updates=self._buffer_updates(),
            tied=traced.tied,
            precision=self.precision,
        )
        return msgspec.structs.replace(graph, fingerprint=ir.fingerprint(graph))


def _tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the tensor inputs in order of appearance. A repeated input is listed each time."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), nodes.append)
    return [item for item in nodes if isinstance(item.meta.get("val"), Tensor)]


def _short(target: Any) -> str:
    """``aten.mm.default`` -> ``mm``."""
    return str(target).split(".")[1] if "." in str(target) else getattr(target, "__name__", str(target))
