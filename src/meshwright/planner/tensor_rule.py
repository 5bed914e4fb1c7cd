"""The explicit rule of tensor parallelism: it splits heads, hidden features, and vocabularies where that saves time."""

from collections.abc import Iterable

from meshwright.ir.cluster import Cluster
from meshwright.ir.placement import misfit
from meshwright.planner.factors import FactorChoices, dividing_heads
from meshwright.planner.notes import ModuleNotes

MIN_VOCABULARY = 1024
"""If no cluster is given, a vocabulary of fewer entries is replicated."""

_CONTRACTIONS = ("aten.mm.", "aten.bmm.", "aten.mv.", "meshwright.attention.", "meshwright.experts.")
_CONVOLUTIONS = ("aten.convolution.", "aten.convolution_backward.")


class TensorRule:
    """Chooses the factors that a tensor-parallel axis splits, and notes each module's choice and its reason."""

    def __init__(self, factors: FactorChoices, notes: ModuleNotes, cluster: Cluster | None) -> None:
        self.factors, self.notes, self.cluster = factors, notes, cluster
        self.graph, self.sizes, self.strategies = factors.graph, factors.sizes, factors.strategies

    def split(self, axis: str) -> None:
        """Split factor classes over ``axis``: by columns in one matrix product, then by rows in a later product.

        The first product makes the factor class, the later product sums over it, and no operator between them needs it
        whole. Attention heads are split first, then hidden features in order, then vocabularies for which a split saves
        time.
        """
        chosen: dict[str, str] = {}
        heads, hidden, vocabulary = self._candidates()
        head_classes: list[tuple[str, str]] = []
        for dim, module in heads.items():
            # split key and value heads if the axis divides them, else the query heads that share each of them
            sizes = [self.graph.factor_classes[name].size for name in dim]
            head_classes.append((dim[dividing_heads(sizes, axis, self.sizes[axis], module)], "attention heads"))
        for name, what in [*head_classes, *((name, "hidden features") for name in hidden)]:
            if self._takes(name, axis, chosen):
                chosen[name] = f"{what}: column then row, one all-reduce forward and one backward"
        for name in vocabulary:
            size, parts = self.graph.factor_classes[name].size, self.sizes[axis]
            if size < parts:
                self._note_replicated(name, axis, f"vocabulary: {size} is too small for {parts} ranks")
                continue
            if not self._takes(name, axis, chosen, decompose=True):
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
                letter = next((factor for factor, other in operator.classes.items() if other == name), None)
                if letter is not None and self.factors.fits(operator, letter, axis):
                    self.strategies[operator.name][axis] = letter
                    if not operator.backward:
                        self.notes[operator.module].setdefault(axis, (f"{letter}@{axis}", chosen[name]))
                    break
        self._note_whole(axis)

    def _candidates(self) -> tuple[dict[tuple[str, ...], str], list[str], list[str]]:
        """The factor classes that may be split: attention heads, hidden features, vocabularies. Heads are given as a
        map from the factor classes of a head dim to the first module with this dim."""
        heads: dict[tuple[str, ...], str] = {}
        produced: dict[str, None] = {}
        reduced: dict[str, None] = {}
        vocabulary: dict[str, None] = {}
        weights = {name for tensor in self.graph.parameters for dim in self.graph.tensors[tensor].dims for name in dim}
        for operator in self.graph.operators:
            if operator.backward or operator.rule is None:
                continue
            if operator.target.startswith("meshwright.attention."):
                dim = operator.rule.parsed.outputs[0].dims[1]
                heads.setdefault(tuple(operator.classes[factor.name] for factor in dim if factor.name), operator.module)
            if operator.target.startswith(_CONTRACTIONS):
                for letter, name in operator.classes.items():
                    if name in weights and not self.factors.is_batch(name):
                        (reduced if operator.rule.reduced(letter, 0) else produced).setdefault(name)
            if operator.target.startswith("meshwright.experts."):  # it makes and reduces its features internally
                features = operator.rule.parsed.inputs[4].dims[2]
                inside = dict.fromkeys(operator.classes[factor.name] for factor in features if factor.name)
                produced |= inside
                reduced |= inside
            if "softmax" in operator.target:
                vocabulary.update({operator.classes[letter]: None for letter in operator.rule.decompositions})
        head_factors = {name for dim in heads for name in dim}
        hidden = [name for name in produced if name in reduced and name not in head_factors]
        return heads, hidden, [name for name in vocabulary if name in produced]

    def _takes(self, name: str, axis: str, chosen: Iterable[str], decompose: bool = False) -> bool:
        """Whether all operators can split the factor class ``name`` together with the classes already chosen."""
        taken = {*chosen}
        conflicts = any(
            name in operator.classes.values() and taken & set(operator.classes.values())
            for operator in self.graph.operators
            if operator.target.startswith(_CONTRACTIONS)
        )
        return name not in taken and not conflicts and self._splits_everywhere(name, axis, decompose)

    def _splits_everywhere(self, name: str, axis: str, decompose: bool) -> bool:
        """Whether every operator whose tensors have the factor class ``name`` can split it. Splits that need a
        decomposition are allowed only with ``decompose``."""
        if self.graph.factor_classes[name].size < self.sizes[axis]:
            return False
        for operator in self.graph.operators:
            met = any(name in dim for tensor in operator.inputs for dim in self.graph.tensors[tensor].dims)
            letter = next((factor for factor, other in operator.classes.items() if other == name), None)
            if letter is None:
                if met:
                    return False
                continue
            if operator.target.startswith(_CONVOLUTIONS):
                return False
            rule = operator.rule
            if rule is None or not rule.splittable(letter) or (letter in rule.decompositions and not decompose):
                return False
            if misfit(rule, {axis: letter}, self.sizes) is not None:
                return False
        return True

    def _vocabulary_pays(self, name: str, axis: str) -> tuple[bool, str]:
        """Whether a split of the vocabulary saves more compute time than its two all-reduces cost, and the reason as
        text.

        With V entries and t ranks, the split saves 6 V (1 - 1/t) FLOPs for each element of the hidden states. Its two
        all-reduces of the hidden states send 4 (t-1)/t times the bytes of the element. Without a cluster, the split
        pays for vocabularies of at least ``MIN_VOCABULARY`` entries.
        """
        size, parts = self.graph.factor_classes[name].size, self.sizes[axis]
        if self.cluster is None or not self.cluster.levels:
            return size >= MIN_VOCABULARY, f"{size} {'>=' if size >= MIN_VOCABULARY else '<'} {MIN_VOCABULARY}"
        operator = next(op for op in self.graph.operators if name in op.classes.values() and op.outputs)
        dtype = next(self.graph.tensors[t].dtype for t in operator.inputs if "float" in self.graph.tensors[t].dtype)
        peaks, output = self.cluster.device.peak_flops_per_s, self.graph.tensors[operator.outputs[0]]
        flops_per_s = peaks.get(dtype) or max(peaks.values())
        item = output.num_bytes / max(1, output.num_elements)
        saved = 6 * size * (1 - 1 / parts) / flops_per_s
        spent = 2 * 2 * (parts - 1) / parts * item * self.cluster.levels[0].beta_s_per_byte
        products, traffic = f"{saved * 1e9:.2g} ns of products", f"{spent * 1e9:.2g} ns of traffic"
        return saved > spent, f"saves {products}, costs {traffic} an element"

    def _note_replicated(self, name: str, axis: str, reason: str) -> None:
        for operator in self.graph.operators:
            product = operator.target.startswith(_CONTRACTIONS) and not operator.backward
            if product and name in operator.classes.values():
                self.notes[operator.module].setdefault(axis, ("replicated", reason))

    def _note_whole(self, axis: str) -> None:
        """Note why modules with weights are not split."""
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
            self.notes[operator.module][axis] = "replicated", reason
