"""Layout to plan by explicit rule: batch on dp; heads, hidden features and the vocabulary on tp."""

import fnmatch
from collections import defaultdict
from collections.abc import Iterable
from math import prod

from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.mesh import Mesh
from meshwright.ir.placement import Shard
from meshwright.ir.plan import Layout, Note, Plan, Stage, Strategy, starred
from meshwright.planner.derive import gradient_buckets, grouped, parameter_storage, pass_partials
from meshwright.planner.notes import module_notes

MIN_VOCABULARY = 1024
"""Without a cluster, a vocabulary below this is replicated."""

_CONTRACTIONS = ("aten.mm.", "aten.bmm.", "aten.mv.", "meshwright.attention.")
_CONVOLUTIONS = ("aten.convolution.", "aten.convolution_backward.")


def plan_layout(
    graph: Graph, layout: Layout, *, world_size: int, cluster: Cluster | None = None, base: Plan | None = None
) -> Plan:
    """The plan of ``layout`` for ``graph`` on ``world_size`` ranks.

    ``base`` is a plan of the same model for another batch shape or for training: its storage is kept, and
    operators that it names keep their strategy.

    Raises:
        LayoutError: the layout does not fit the ranks, the batch, the heads, or names unknown modules in ``pin``.
    """
    layout = layout.resolved(world_size)
    return _Planner(graph, layout, layout.mesh(), cluster, base).plan()


def adapt_plan(plan: Plan, graph: Graph) -> Plan:
    """``plan`` for another capture of the same model: a ragged last batch, or an evaluation.

    Raises:
        LayoutError: the new batch does not divide over dp.
    """
    return _Planner(graph, plan.layout, plan.mesh, None, plan).plan()


class _Planner:
    def __init__(self, graph: Graph, layout: Layout, mesh: Mesh, cluster: Cluster | None, base: Plan | None) -> None:
        self.graph, self.layout, self.mesh, self.cluster, self.base = graph, layout, mesh, cluster, base
        self.sizes = {axis.name: axis.size for axis in mesh.axes if axis.size > 1}
        self.strategies: dict[str, Strategy] = {operator.name: {} for operator in graph.operators}
        self.notes: dict[str, dict[str, str]] = defaultdict(dict)
        self.axis_notes: list[Note] = []
        self.missed: set[str] = set()

    def plan(self) -> Plan:
        if "dp" in self.sizes:
            self._check_batch()
        if self.base is not None:
            self._inherit(self.base)
        self._pin()
        if "dp" in self.sizes:
            self._split_batch("dp")
        if "tp" in self.sizes and (self.base is None or not self.base.stage.strategies):
            self._split_tensors("tp")
        elif "tp" in self.sizes:
            self._follow_storage("tp")
        placements = pass_partials(self.graph, self.strategies, self.sizes)
        storage = self.base.stage.storage if self.base is not None else parameter_storage(self.graph, self.strategies)
        used = {
            name: {a: c for a, c in strategy.items() if a in self.sizes} for name, strategy in self.strategies.items()
        }
        algorithms = self._algorithms()
        return Plan(
            model=self.graph.model,
            graph_fingerprint=self.graph.fingerprint,
            batch_size=self.graph.batch_size,
            cluster=self.cluster.name if self.cluster is not None else self.base.cluster if self.base else "unknown",
            mesh=self.mesh,
            stages=(Stage(strategies=grouped(used), storage=storage),),
            layout=self.layout,
            buckets=gradient_buckets(self.graph, placements, storage, self.sizes, algorithms),
            algorithms=algorithms,
            notes=self.base.notes if self.base is not None else self._explained(),
        )

    def _algorithms(self) -> dict[str, str]:
        """Two CPU ranks of one box swap what they have in one round; elsewhere torch.distributed's own collectives."""
        if self.base is not None:
            return self.base.algorithms
        return {axis: "exchange" if self._swaps(axis) else "native" for axis in self.sizes}

    def _swaps(self, axis: str) -> bool:
        if self.sizes[axis] != 2 or self.cluster is None:
            return self.sizes[axis] == 2
        if self.cluster.device.kind != "cpu" or not self.cluster.levels:
            return False
        box = self.cluster.levels[-1]
        one_box = len(self.cluster.levels) == 1  # which may hold more ranks than devices
        return one_box or all(self.cluster.level_of(*ranks).name == box.name for ranks in self.mesh.groups(axis))

    # --- data parallel -------------------------------------------------------------------------------------------

    def _check_batch(self) -> None:
        dp, size = self.sizes["dp"], self.graph.batch_size
        evaluates = self.base is not None and not self.graph.gradients
        if size % dp and not evaluates:  # an evaluation of a ragged batch runs whole on every rank
            lower = size // dp * dp
            fits = f"{lower} or {lower + dp}" if lower else str(dp)
            raise LayoutError(
                f"a global batch of {size} does not divide over dp={dp}",
                where="batch",
                remedy=f"use a batch of {fits}, or drop the ragged last batch",
            )

    def _inherit(self, base: Plan) -> None:
        for operator in self.graph.operators:
            for axis, choice in base.stage.strategy(operator.name).items():
                if operator.rule is None or axis not in self.sizes:
                    continue
                if operator.rule.splittable(choice) and operator.rule.sizes[choice] % self.sizes[axis] == 0:
                    self.strategies[operator.name][axis] = choice

    def _split_batch(self, axis: str) -> None:
        """Every operator with a batch factor splits it."""
        missed: dict[str, str] = {}
        for operator in self.graph.operators:
            if axis in self.strategies[operator.name]:
                continue
            letters = [letter for letter, name in operator.classes.items() if self._is_batch(name)]
            chosen = next((letter for letter in letters if self._fits(operator, letter, axis)), None)
            if chosen is not None:
                self.strategies[operator.name][axis] = chosen
            elif letters and operator.rule is not None:
                taken = any(letter in self.strategies[operator.name].values() for letter in letters)
                why = "is split over another axis, and does not divide over both" if taken else "cannot be split"
                missed[operator.name] = f"the batch factor of {operator.rule.pattern!r} {why}"
            elif operator.rule is None and self._touches_batch(operator):
                missed[operator.name] = operator.reason
        self.missed |= missed.keys()
        for name, reason in missed.items():
            self.axis_notes.append(Note(module=starred(name), split=f"replicated on {axis}", reason=reason))

    def _is_batch(self, name: str) -> bool:
        return self.graph.factor_classes[name].role == "batch"

    def _touches_batch(self, operator: Operator) -> bool:
        return any(
            self._is_batch(name)
            for tensor in operator.inputs
            for dim in self.graph.tensors[tensor].dims
            for name in dim
        )

    def _fits(self, operator: Operator, letter: str, axis: str) -> bool:
        rule, strategy = operator.rule, self.strategies[operator.name]
        if rule is None or not rule.splittable(letter):
            return False
        others = prod(self.sizes[other] for other, choice in strategy.items() if choice == letter)
        return rule.sizes[letter] % (others * self.sizes[axis]) == 0

    # --- tensor parallel -----------------------------------------------------------------------------------------

    def _split_tensors(self, axis: str) -> None:
        """Column then row: a class that one matrix product makes and another reduces, between them nothing that
        would need it whole. Heads first; then hidden features in order; then the vocabulary where it pays."""
        chosen: dict[str, str] = {}
        heads, hidden, vocabulary = self._candidates()
        for name in heads:
            self._require_heads(name, axis)
            if self._splits_everywhere(name, axis) and not self._conflicts(name, chosen):
                chosen[name] = "attention heads: column then row, one all-reduce forward and one backward"
        for name in hidden:
            if name not in chosen and self._splits_everywhere(name, axis) and not self._conflicts(name, chosen):
                chosen[name] = "hidden features: column then row, one all-reduce forward and one backward"
        for name in vocabulary:
            size, parts = self.graph.factor_classes[name].size, self.sizes[axis]
            if size % parts:
                self._note_replicated(name, axis, f"vocabulary: {size} does not divide over {parts} ranks")
                continue
            if (
                name in chosen
                or not self._splits_everywhere(name, axis, decompose=True)
                or self._conflicts(name, chosen)
            ):
                continue
            pays, why = self._vocabulary_pays(name, axis)
            if pays:
                chosen[name] = f"vocabulary: {why}"
            else:
                self._note_replicated(name, axis, f"vocabulary: {why}")
        for operator in self.graph.operators:
            if axis in self.strategies[operator.name]:
                continue
            for name in chosen:
                letter = next((one for one, other in operator.classes.items() if other == name), None)
                if letter is not None and self._fits(operator, letter, axis):
                    self.strategies[operator.name][axis] = letter
                    if not operator.backward:
                        self.notes[operator.module].setdefault(axis, f"{letter}@{axis}\0{chosen[name]}")
                    break
        self._note_whole(axis)

    def _candidates(self) -> tuple[list[str], list[str], list[str]]:
        heads: dict[str, None] = {}
        made: dict[str, None] = {}
        reduced: dict[str, None] = {}
        vocabulary: dict[str, None] = {}
        parameters = set(self.graph.parameters)
        weights = {
            name
            for tensor in self.graph.tensors.values()
            if tensor.name in parameters
            for dim in tensor.dims
            for name in dim
        }
        for operator in self.graph.operators:
            if operator.backward or operator.rule is None:
                continue
            if operator.target.startswith("meshwright.attention."):
                dim = operator.rule.parsed.outputs[0].dims[1]
                heads.update({operator.classes[factor.name]: None for factor in dim if factor.name})
            if operator.target.startswith(_CONTRACTIONS):
                for letter, name in operator.classes.items():
                    if name in weights and not self._is_batch(name):
                        (reduced if operator.rule.reduced(letter, 0) else made).setdefault(name)
            if "softmax" in operator.target:
                vocabulary.update({operator.classes[letter]: None for letter in operator.rule.decompositions})
        hidden = [name for name in made if name in reduced and name not in heads]
        return list(heads), hidden, [name for name in vocabulary if name in made]

    def _splits_everywhere(self, name: str, axis: str, decompose: bool = False) -> bool:
        """Whether every operator that meets the class can split it (by decomposition, only if allowed)."""
        if self.graph.factor_classes[name].size % self.sizes[axis]:
            return False
        for operator in self.graph.operators:
            met = any(name in dim for tensor in operator.inputs for dim in self.graph.tensors[tensor].dims)
            letter = next((one for one, other in operator.classes.items() if other == name), None)
            if letter is None:
                if met:
                    return False
                continue
            if operator.target.startswith(_CONVOLUTIONS):
                return False
            rule = operator.rule
            if rule is None or not rule.splittable(letter) or (letter in rule.decompositions and not decompose):
                return False
        return True

    def _conflicts(self, name: str, chosen: Iterable[str]) -> bool:
        taken = set(chosen)
        return any(
            name in operator.classes.values() and taken & set(operator.classes.values())
            for operator in self.graph.operators
            if operator.target.startswith(_CONTRACTIONS)
        )

    def _require_heads(self, name: str, axis: str) -> None:
        size = self.graph.factor_classes[name].size
        if size % self.sizes[axis]:
            operator = next(one for one in self.graph.operators if name in one.classes.values())
            fits = [str(n) for n in range(1, size + 1) if size % n == 0]
            raise LayoutError(
                f"{size} attention heads do not divide over {axis}={self.sizes[axis]}",
                where=f"module {operator.module or '(model)'}",
                remedy=f"use {axis} of {', '.join(fits)}",
            )

    def _vocabulary_pays(self, name: str, axis: str) -> tuple[bool, str]:
        """Compute saved against two all-reduces of the hidden states, per element of these:
        6 V (1 - 1/t) flops against 2 · 2 (t-1)/t · bytes."""
        size, parts = self.graph.factor_classes[name].size, self.sizes[axis]
        if self.cluster is None or not self.cluster.levels:
            return size >= MIN_VOCABULARY, f"{size} {'>=' if size >= MIN_VOCABULARY else '<'} {MIN_VOCABULARY}"
        operator = next(one for one in self.graph.operators if name in one.classes.values() and one.outputs)
        dtype = next(self.graph.tensors[t].dtype for t in operator.inputs if "float" in self.graph.tensors[t].dtype)
        flops_per_s = self.cluster.device.peak_flops_per_s.get(dtype) or max(
            self.cluster.device.peak_flops_per_s.values()
        )
        item = self.graph.tensors[operator.outputs[0]].num_bytes / max(
            1, self.graph.tensors[operator.outputs[0]].num_elements
        )
        saved = 6 * size * (1 - 1 / parts) / flops_per_s
        spent = 2 * 2 * (parts - 1) / parts * item * self.cluster.levels[0].beta_s_per_byte
        return (
            saved > spent,
            f"saves {saved * 1e9:.2g} ns of products, costs {spent * 1e9:.2g} ns of traffic an element",
        )

    def _note_replicated(self, name: str, axis: str, reason: str) -> None:
        for operator in self.graph.operators:
            if (
                name in operator.classes.values()
                and operator.target.startswith(_CONTRACTIONS)
                and not operator.backward
            ):
                self.notes[operator.module].setdefault(axis, f"replicated\0{reason}")

    def _note_whole(self, axis: str) -> None:
        """Say why modules with weights are not split."""
        parameters = set(self.graph.parameters)
        for operator in self.graph.operators:
            if operator.backward or axis in self.strategies[operator.name] or not parameters & set(operator.inputs):
                continue
            if axis in self.notes[operator.module]:
                continue
            if operator.target.startswith(_CONVOLUTIONS):
                reason = f"convolutions are not split over {axis} by the explicit rule"
            elif operator.rule is None:
                reason = operator.reason
            else:
                reason = "no factor that one product makes and another reduces"
            self.notes[operator.module][axis] = f"replicated\0{reason}"

    # --- evaluation and other shapes -----------------------------------------------------------------------------

    def _follow_storage(self, axis: str) -> None:
        """Operators that the base plan does not name follow what their inputs are split by."""
        placed: dict[str, str | None] = {}
        for name, placements in (self.base.stage.storage if self.base else {}).items():
            shard = placements.get(axis)
            if isinstance(shard, Shard) and name in self.graph.tensors:
                placed[name] = self._class_at(name, shard)
        for operator in self.graph.operators:
            strategy = self.strategies[operator.name]
            if axis not in strategy:
                for tensor in operator.inputs:
                    source = placed.get(tensor)
                    letter = next((one for one, other in operator.classes.items() if other == source), None)
                    if letter is not None and self._fits(operator, letter, axis):
                        strategy[axis] = letter
                        break
            choice = strategy.get(axis)
            for output in operator.outputs:
                found = operator.classes.get(choice) if choice else None
                dims = [name for dim in self.graph.tensors[output].dims for name in dim]
                placed[output] = found if found in dims else None

    def _class_at(self, tensor: str, shard: Shard) -> str | None:
        outer = 1
        for name in self.graph.tensors[tensor].dims[shard.dim]:
            if outer == shard.outer:
                return name
            outer *= self.graph.factor_classes[name].size
        return None

    # --- pins ----------------------------------------------------------------------------------------------------

    def _pin(self) -> None:
        for glob, text in self.layout.pin.items():
            factor, at, axis = text.partition("@")
            where = f"layout: pin[{glob!r}]"
            if not at:
                raise LayoutError(f"{text!r} is not factor@axis", where=where, remedy="write for example 'batch@tp'")
            if axis not in self.mesh.names:
                raise LayoutError(
                    f"unknown axis {axis!r}", where=where, remedy=f"axes are {', '.join(self.mesh.names)}"
                )
            members = [one for one in self.graph.operators if fnmatch.fnmatch(one.module, glob)]
            if not members and self.base is not None:
                continue
            if not members:
                modules = sorted({one.module for one in self.graph.operators if one.module})
                raise LayoutError("matches no module", where=where, remedy=f"modules are: {', '.join(modules[:20])}")
            if axis not in self.sizes:
                continue
            hits = 0
            for operator in members:
                if axis in self.strategies[operator.name]:  # the base plan has settled it
                    continue
                for letter, name in operator.classes.items():
                    wanted = self._is_batch(name) if factor == "batch" else letter == factor
                    if wanted and self._fits(operator, letter, axis):
                        self.strategies[operator.name][axis] = letter
                        hits += 1
                        break
                else:
                    self.strategies[operator.name].setdefault(axis, "")
                self.notes[operator.module][axis] = f"{text}\0pinned"
            if not hits and factor != "none" and self.base is None:
                known = sorted({letter for one in members for letter in one.classes})
                raise LayoutError(
                    f"no operator there can split {factor!r} over {axis}={self.sizes[axis]}",
                    where=where,
                    remedy=f"factors are: batch, none, {', '.join(known)}",
                )

    def _explained(self) -> tuple[Note, ...]:
        data = "dp" in self.sizes
        return (*module_notes(self.graph, self.notes, self.missed, data), *dict.fromkeys(self.axis_notes))
