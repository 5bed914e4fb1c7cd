"""Choose the algorithms of convolutions, and how many samples they compute at a time, within a limit on workspace.

Every convolution of a rank has choices: each algorithm that supports it (``ir/convolution.py``), on 1, 2, 4, ...
samples and on all samples. A choice has a time in seconds, and a workspace. ``planner/workspace.py`` divides the
samples among the choices. The times come from a table of measurements; without a table, they follow from FLOPs and
bytes. PyTorch's own algorithm on all samples at once is kept if it fits, unless a measured time is shorter by more than
the noise of the measurement. (If all operators share a budget, the times alone decide.)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import hypot
from types import MappingProxyType
from typing import NamedTuple

from meshwright.cost.kernels import Rates
from meshwright.cost.node_costs import NodeCosts
from meshwright.cost.scratch import scratch_bytes
from meshwright.errors import LayoutError, MeshwrightError
from meshwright.ir import units
from meshwright.ir.algorithm_times import AlgorithmTimes
from meshwright.ir.cluster import Cluster
from meshwright.ir.convolution import algorithms_of, piece_work
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.kernel import ConvolutionSizes
from meshwright.ir.layout import TIME, Layout
from meshwright.ir.mesh import Mesh
from meshwright.ir.operator_algorithm import NATIVE, piece_sizes, text_of
from meshwright.ir.plan import Note, Strategy, starred
from meshwright.ir.program import Lower, OperatorProgram
from meshwright.planner.attentions import choose_attention
from meshwright.planner.float8 import choose_float8
from meshwright.planner.interiors import interiors
from meshwright.planner.intra_op.costs import ClusterCosts
from meshwright.planner.intra_op.prices import Prices
from meshwright.planner.notes import merged
from meshwright.planner.workspace import Division, KernelChoice, divided, pareto, share

NO_LIMIT = 2**62
LEAST_GAIN = 0.05
"""Another algorithm must be faster than PyTorch's own by this fraction of its time, and by twice the standard deviation
of the two measurements."""


class ConvolutionChoices(NamedTuple):
    """The choices of one convolution. ``native`` is PyTorch's own algorithm on all samples. ``deviations`` maps a
    choice to the standard deviation of its measured time, as a fraction; empty: times follow from FLOPs and bytes."""

    every: tuple[KernelChoice, ...]
    native: KernelChoice
    deviations: Mapping[KernelChoice, float]

    @property
    def measured(self) -> bool:
        """Whether the times come from a table."""
        return bool(self.deviations)

    def gain(self, pieces: Iterable[KernelChoice]) -> float:
        """The fraction by which ``pieces`` must be faster than ``native`` to replace it."""
        if not self.measured:
            return 1.0
        noise = max(self.deviations[piece] for piece in pieces)
        return max(LEAST_GAIN, 2 * hypot(self.deviations[self.native], noise))


@dataclass(frozen=True)
class ChosenAlgorithms:
    """The decisions of a plan about its convolutions, attention and products in float8. ``interiors`` are the starred
    names of convolutions that compute their interior rows first. ``texts`` maps an operator to its algorithm. Operators
    with PyTorch's own algorithm are left out. ``notes`` are for ``Plan.explain``."""

    interiors: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def choose_on_rank(
    graph: Graph, mesh: Mesh, axes: Mapping[str, int], strategies: Mapping[str, Strategy], cluster: Cluster | None,
    lower: Lower | None, layout: Layout, times: AlgorithmTimes | None = None, rank_of: Mapping[str, int] | None = None,
) -> ChosenAlgorithms:  # fmt: skip
    """Decide how a rank computes its parts of convolutions, attention and matrix products under the strategies on
    ``axes``. Nothing is decided if the cluster or the lowering is unknown. ``rank_of`` maps operators to pipeline ranks
    (default: all operators are on one rank).

    Raises:
        LayoutError: as ``choose``.
    """
    if cluster is None or lower is None:
        return ChosenAlgorithms()
    known = {name: {a: c for a, c in strategy.items() if a != TIME} for name, strategy in strategies.items()}
    prices = Prices(graph, axes, ClusterCosts(mesh, axes, cluster), lower, layout.microbatches)
    hides = cluster.device.kind != "cpu"  # CPU cores also move the rows
    inside = interiors(graph, prices, known, hides)

    def program(operator: Operator) -> OperatorProgram:
        return prices.program(operator, known[operator.name], starred(operator.name) in inside)

    rates = NodeCosts(mesh, cluster).rates
    chosen = choose(graph.operators, program, layout, rates, times, rank_of or {})
    lines = choose_attention(graph.operators, known, program, rates)
    lines |= choose_float8(graph, known, program, rates, prices.costs, layout)
    texts = {**chosen.texts, **{name: text for name, (text, _) in lines.items()}}
    return ChosenAlgorithms(inside, texts, (*chosen.notes, *merged(lines)))


def sizes_of(program: OperatorProgram) -> ConvolutionSizes | None:
    """The sizes of a convolution's part on a rank. If there are several calls, as for the borders of a part, the
    largest call counts. None if the operator is not a convolution."""
    kernels = [kernel for node in program.nodes for kernel in node.kernels if kernel.convolution is not None]
    return max(kernels, key=lambda kernel: kernel.flops).convolution if kernels else None


def choices_of(sizes: ConvolutionSizes, rates: Rates, times: AlgorithmTimes | None) -> ConvolutionChoices:
    """The choices for a convolution on the device of ``rates``."""
    timings = times.of(sizes) if times is not None else ()
    deviations: dict[KernelChoice, float] = {}
    if timings:
        kernels = [
            KernelChoice(timing.algorithm, timing.sizes.samples, timing.seconds, timing.workspace_bytes)
            for timing in timings
        ]
        deviations = dict(zip(kernels, (timing.deviation for timing in timings), strict=True))
    else:
        kernels = [
            _closed_form(sizes, name, samples, rates)
            for samples in piece_sizes(sizes.samples)
            for name in algorithms_of(sizes)
        ]
    native = next(choice for choice in kernels if choice.name == NATIVE and choice.samples == sizes.samples)
    return ConvolutionChoices(tuple(kernels), native, deviations)


def _closed_form(sizes: ConvolutionSizes, name: str, samples: int, rates: Rates) -> KernelChoice:
    work = piece_work(sizes._replace(samples=samples), name, samples == sizes.samples)
    seconds = sum(rates.cost(kernel).seconds for kernel in work.kernels)
    on_cpu = rates.device.kind == "cpu"
    return KernelChoice(name, samples, seconds, max(scratch_bytes(kernel, on_cpu) for kernel in work.kernels))


def choose(
    operators: Iterable[Operator], program: Callable[[Operator], OperatorProgram], layout: Layout, rates: Rates,
    times: AlgorithmTimes | None = None, rank_of: Mapping[str, int] = MappingProxyType({}),
) -> ChosenAlgorithms:  # fmt: skip
    """Choose the algorithms of all convolutions among the operators. ``program`` returns an operator's program on a
    rank. If the layout has no limit, only measured times can justify an algorithm other than PyTorch's own. A budget
    for the network holds for each pipeline rank; ``rank_of`` maps operators to pipeline ranks.

    Raises:
        LayoutError: no choice fits within the limit (the error names the operator and the smallest sufficient limit);
            or a limit is given for a device other than a CPU, where the library's workspace is unknown.
    """
    limit = layout.workspace_bytes
    if limit and rates.device.kind != "cpu":
        raise LayoutError(
            f"workspace_bytes={limit} on {rates.device.name}: the workspace of its library's algorithms is not known",
            where="layout", remedy="leave workspace_bytes out, or plan for a CPU",
        )  # fmt: skip
    if not limit and times is None:
        return ChosenAlgorithms()
    known: dict[ConvolutionSizes, ConvolutionChoices] = {}
    choices_by_name: dict[str, ConvolutionChoices] = {}
    for operator in operators:
        sizes = sizes_of(program(operator)) if operator.target.startswith("aten.convolution") else None
        if sizes is not None and sizes.samples:
            known[sizes] = known.get(sizes) or choices_of(sizes, rates, times)
            choices_by_name[operator.name] = known[sizes]
    if limit and layout.workspace_over == "network":
        taken: dict[str, Division] = {}
        for rank in sorted({rank_of.get(name, 0) for name in choices_by_name}):
            own = {name: choices for name, choices in choices_by_name.items() if rank_of.get(name, 0) == rank}
            taken |= share({name: _each(name, choices, limit) for name, choices in own.items()}, limit)
    else:
        taken = {name: _fastest(name, choices, limit or NO_LIMIT) for name, choices in choices_by_name.items()}
    texts = {name: _text(division) for name, division in taken.items()}
    shown = {name for name, text in texts.items() if limit or text != NATIVE}
    others = {name: text for name, text in texts.items() if text != NATIVE}
    return ChosenAlgorithms(texts=others, notes=_notes(taken, choices_by_name, shown))


def _fastest(name: str, choices: ConvolutionChoices, limit: int) -> Division:
    native = choices.native
    try:
        best = divided(choices.every, native.samples, limit)
    except MeshwrightError as error:
        raise error.within(name) from None
    if native.workspace_bytes <= limit and best.seconds > native.seconds * (1 - choices.gain(best.pieces)):
        return Division((native,), native.seconds, native.workspace_bytes)
    return best


def _each(name: str, choices: ConvolutionChoices, total: int) -> tuple[Division, ...]:
    try:
        return pareto(choices.every, choices.native.samples, total)
    except MeshwrightError as error:
        raise error.within(name) from None


def _text(division: Division) -> str:
    return text_of((piece.name, piece.samples) for piece in division.pieces)


def _notes(
    taken: Mapping[str, Division], choices_by_name: Mapping[str, ConvolutionChoices], shown: set[str]
) -> tuple[Note, ...]:
    """A note for each convolution: its algorithms and their numbers of samples, workspace and seconds."""
    lines = {}
    for name, division in taken.items():
        if name not in shown:
            continue
        choices, text = choices_by_name[name], _text(division)
        how = "measured" if choices.measured else "by FLOPs and bytes"
        reason = f"{units.size(division.workspace_bytes)} of workspace, {units.seconds(division.seconds)} {how}"
        if text != NATIVE:
            native = choices.native
            reason += f"; native {units.size(native.workspace_bytes)}, {units.seconds(native.seconds)}"
        lines[name] = text, reason
    return merged(lines)
