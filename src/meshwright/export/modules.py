"""Finds the modules that ``parallelize_module`` can split as a plan does, and the splits that it cannot do.

PyTorch's ``parallelize_module`` splits whole modules. Between them, unchanged code runs on each rank's own tensors:

    q_proj (column) ──▶ view, attention, view ──▶ o_proj (row) ──▶ add
       whole in            heads of this rank        whole out

Such code computes what the plan computes only if every operator there runs on parts, and needs no exchange.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from meshwright.ir.graph import Graph, Operator
from meshwright.ir.placement import Placement, Shard, input_placements, is_linear, is_split, output_placements
from meshwright.ir.plan import Plan, Strategy, starred

AXIS = "tp"
Kind = Literal["linear", "embedding", ""]
"""The kind of a module with parameters. Modules of other kinds cannot be split."""
Style = Literal["column", "row"]
"""How a module is split: a linear layer by output features (column) or input features (row); an embedding by features
(column) or by vocabulary (row)."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """A module that is split. ``gathered``: its output is gathered. ``whole_input``: a row layer whose input is whole,
    so that each rank takes its part of the input first."""

    style: Style
    kind: Kind
    gathered: bool = False
    whole_input: bool = False


@dataclass
class Splits:
    """The result of ``splits``: the modules that are split, and pins under which a new plan has fewer other splits
    (empty: ``modules`` computes what the plan does). ``local`` maps a tensor to its placement on a rank, if a
    rank has a part of it, and ``origin`` to the split modules that the part comes from. ``summed`` names whole
    parameters that only parts use, so that each rank has a term of their gradients."""

    modules: dict[str, Split] = field(default_factory=dict)
    pins: dict[str, str] = field(default_factory=dict)
    local: dict[str, Shard] = field(default_factory=dict)
    origin: dict[str, frozenset[str]] = field(default_factory=dict)
    summed: tuple[str, ...] = ()


def splits(graph: Graph, plan: Plan, kinds: Mapping[str, Kind]) -> Splits:
    """Find the modules that are split over ``tp``, and the operators between them that need an exchange.

    ``kinds`` maps the path of each module that has parameters of its own to its kind."""
    result = Splits()
    if plan.mesh.sizes.get(AXIS, 1) == 1:
        return result
    for path, kind in kinds.items():
        style = _style(graph, plan, path, kind)
        if style is not None:
            result.modules[path] = Split(style=style, kind=kind)
        else:
            result.pins |= {starred(reader): NONE for reader in _readers(graph, plan, path)}
    if not result.pins:
        _Walk(graph, plan, result).run()
    return result


NONE = f"none@{AXIS}"
"""The pin that leaves a module whole."""


def _readers(graph: Graph, plan: Plan, path: str) -> set[str]:
    """The modules whose operators read a parameter of module ``path`` that is split over ``tp``."""
    own = {name for name in graph.parameters if name.rpartition(".")[0] == path}
    split = {name for name in own if is_split(plan.storage(name).get(AXIS))}
    return {operator.module for operator in graph.operators if not operator.backward and split & {*operator.inputs}}


def _style(graph: Graph, plan: Plan, path: str, kind: Kind) -> Style | None:
    weight = f"{path}.weight" if path else "weight"
    tied = {*graph.tied, *graph.tied.values()}
    if weight not in graph.tensors or not kind or weight in tied:
        return None
    shard = plan.storage(weight).get(AXIS)
    if not isinstance(shard, Shard) or shard.outer > 1 or shard.unit > 1:
        return None
    by_outputs = shard.dim == (0 if kind == "linear" else 1)
    return "column" if by_outputs else "row"


class _Walk:
    """Follows each rank's own tensors through the forward operators."""

    def __init__(self, graph: Graph, plan: Plan, splits: Splits) -> None:
        self.graph, self.splits = graph, splits
        self.sizes = plan.sizes(0)
        self.strategies = plan.strategies(graph)
        self.forward = [operator for operator in graph.operators if not operator.backward]
        self.modules = {out: operator.module for operator in self.forward for out in operator.outputs}
        self.pinned = set(plan.layout.pin)
        self.roots: dict[str, frozenset[str]] = {name: frozenset({name}) for name in graph.parameters}
        """Whole tensors that depend on parameters, with these parameters."""
        self.of_batch: set[str] = set(graph.inputs)
        """Tensors that depend on the batch."""
        self.whole_uses: set[str] = set()
        self.part_uses: dict[str, Operator] = {}

    def run(self) -> None:
        """Follow the tensors, and keep what is found in ``splits``."""
        self._find_gathers()
        for operator in self.forward:
            split = self.splits.modules.get(operator.module)
            if split is not None:
                self._enter(operator, split)
            else:
                self._pass(operator)
            self._trace(operator)
        for name, operator in self.part_uses.items():
            if name in self.whole_uses:
                self._blame(operator)
        self.splits.summed = tuple(self.part_uses)

    def _trace(self, operator: Operator) -> None:
        """Note which outputs depend on the batch, which whole outputs on parameters, and how parameters are used."""
        if self.of_batch & {*operator.inputs}:
            self.of_batch.update(operator.outputs)
        roots = frozenset[str]().union(*(self.roots.get(name, ()) for name in operator.inputs))
        if not roots:
            return
        if self.splits.local.keys() & {*operator.outputs}:
            return
        self.roots |= dict.fromkeys(operator.outputs, roots)
        if operator.module not in self.splits.modules and self.of_batch & {*operator.outputs}:
            uses = (self.roots.get(name, ()) for name in operator.inputs if name not in self.of_batch)
            self.whole_uses.update(*uses)

    def _find_gathers(self) -> None:
        """Mark the column modules whose output is read whole."""
        inside = {out: op.module for op in self.forward if op.module in self.splits.modules for out in op.outputs}
        for operator in self.forward:
            for index, name in enumerate(operator.inputs):
                path = inside.get(name, operator.module)
                if path == operator.module or self.splits.modules[path].style == "row":
                    continue
                reader = self.splits.modules.get(operator.module)
                whole = reader.style == "column" if reader else not is_split(self._expected(operator, index))
                if whole:
                    self._change(path, gathered=True)

    def _change(self, path: str, **changes: bool) -> None:
        self.splits.modules[path] = msgspec.structs.replace(self.splits.modules[path], **changes)

    def _enter(self, operator: Operator, split: Split) -> None:
        """Handle an operator inside a split module, whose result PyTorch's parallel style makes right."""
        local = self.splits.local
        for name in operator.inputs:
            tensor = self.graph.tensors[name]
            if tensor.kind == "parameter" or self._producer(name) == operator.module:
                continue
            if split.style == "row" and split.kind == "linear" and name not in local:
                self._change(operator.module, whole_input=True)
            elif split.style == "column" and name in local:
                self._blame(operator)
        for index, name in enumerate(operator.outputs):
            placement = self._produced(operator, index)
            gathered = self.splits.modules[operator.module].gathered
            if split.style == "column" and not gathered and isinstance(placement, Shard):
                local[name], self.splits.origin[name] = placement, frozenset({operator.module})

    def _pass(self, operator: Operator) -> None:
        """Handle an operator outside split modules."""
        local = self.splits.local
        parts = [name for name in operator.inputs if name in local]
        if not parts:
            return
        choice, rule = self._strategy(operator).get(AXIS, ""), operator.rule
        fits = rule is not None and choice != "" and not is_linear(choice) and choice not in rule.decompositions
        for index, name in enumerate(operator.inputs):
            expected = self._expected(operator, index)
            fits = fits and (expected if is_split(expected) else None) == local.get(name)
        produced = [self._produced(operator, index) for index in range(len(operator.outputs))]
        fits = fits and all(isinstance(placement, Shard) for placement in produced)
        for name in {*operator.inputs} - {*parts}:
            # Each rank has a term of the gradient of a whole tensor. Terms of parameters can be added later.
            if name in self.roots and name in self.of_batch:
                fits = False
            elif name in self.roots:
                self.part_uses |= dict.fromkeys(self.roots[name], operator)
        if not fits:
            self._blame(operator)
            return
        origin = frozenset().union(*(self.splits.origin[name] for name in parts))
        for name, placement in zip(operator.outputs, produced, strict=True):
            assert isinstance(placement, Shard), "checked above"
            local[name], self.splits.origin[name] = placement, origin

    def _blame(self, operator: Operator) -> None:
        """Pin the operators of the model itself if ``operator`` is one of them, because the output of a module can be
        gathered. Else, or if this was done, pin the modules whose parts reach the operator, and those beside them."""
        if not operator.module and "" not in self.pinned:
            self.splits.pins[""] = NONE
            return
        origins = {path for name in operator.inputs for path in self.splits.origin.get(name, ())}
        parents = {starred(path).rpartition(".")[0] for path in origins}
        for path in self.splits.modules:
            if path in origins or ("." in path and starred(path).rpartition(".")[0] in parents):
                self.splits.pins[starred(path)] = NONE

    def _strategy(self, operator: Operator) -> Strategy:
        return self.strategies[operator.name]

    def _expected(self, operator: Operator, index: int) -> Placement | None:
        """The placement in which the plan gives an operator its input; None if the input is whole."""
        if operator.rule is None or index >= len(operator.rule.parsed.inputs):
            return None
        return input_placements(operator.rule, self._strategy(operator), index, self.sizes).get(AXIS)

    def _produced(self, operator: Operator, index: int) -> Placement | None:
        if operator.rule is None or index >= len(operator.rule.parsed.outputs):
            return None
        return output_placements(operator.rule, self._strategy(operator), index, self.sizes).get(AXIS)

    def _producer(self, name: str) -> str | None:
        return self.modules.get(name)
