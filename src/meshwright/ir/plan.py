"""The plan: its mesh, the strategies of operators, the stored placements of parameters, and the buckets."""

import hashlib
import re
from functools import lru_cache
from typing import ClassVar, Literal

import msgspec

from meshwright.ir.amendment import NOT_RUN, Amendment
from meshwright.ir.graph import Graph
from meshwright.ir.interval import Interval
from meshwright.ir.layout import TIME, Layout
from meshwright.ir.mesh import Mesh
from meshwright.ir.operator_algorithm import FLOAT8, NATIVE, PIECES
from meshwright.ir.pipeline import Pipeline
from meshwright.ir.placement import Flat, Placement
from meshwright.ir.precision import Precision
from meshwright.ir.resharding import AxisLink
from meshwright.ir.schedule import ActionKind
from meshwright.ir.stages import Cut, cut

_INDEX = re.compile(r"(?<=\.)\d+(?=[.:]|$)|^\d+(?=[.:])")

Strategy = dict[str, str]
"""Maps a mesh axis to the factor that is split over it, or to carets (``^``: inputs and outputs are partial sums)."""


REDUCTION = "gradients of "
"""The labels of reductions of gradients begin with these words."""


class Coding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A codec (``ir/codec.py``) for the traffic over an axis, and the algorithm of the collective that carries it."""

    axis: str
    codec: str
    algorithm: str


class Bucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tensors that one collective over ``axis`` (or joined axes) carries together.

    The collective either reduces the gradients of ``parameters``, or gathers ``parameters`` that are stored Flat.
    Gradients of Flat parameters are reduce-scattered, other gradients are all-reduced. Reduced gradients are then
    summed over the axes ``across``. ``num_bytes`` is the size of the whole bucket on one rank. ``codings`` maps some
    axes to the coding of the traffic over them."""

    axis: str
    parameters: tuple[str, ...]
    num_bytes: int
    algorithm: str = "native"
    across: tuple[str, ...] = ()
    codings: tuple[Coding, ...] = ()

    def coding(self, axis: str) -> Coding | None:
        """The coding of the traffic over an axis; None if elements are sent unchanged."""
        return next((coding for coding in self.codings if coding.axis == axis), None)

    @property
    def label(self) -> str:
        """The label of the collective: the names of its first and last parameter."""
        names = self.parameters
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    @property
    def reduction(self) -> str:
        """The label of the reduction of the bucket's gradients."""
        return REDUCTION + self.label


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The split of a module and the reason for it, as ``Plan.explain`` shows them."""

    module: str
    split: str
    reason: str


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The predicted step time and peak memory for which the plan was chosen. ``interval_s`` holds 80 % of the times of
    such steps (None: it was not requested)."""

    step_s: float
    peak_memory_bytes: int
    interval_s: Interval | None = None


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A layout that the planner considered and did not choose, and the reason."""

    layout: str
    step_s: float
    peak_memory_bytes: int
    why: str


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A stage of the graph, and how its operators and parameters are split.

    ``strategies`` maps the name of an operator to its strategy. For operators of repeated blocks, the name may have
    ``*`` in place of the block's index. Operators without an entry run replicated. ``first`` is the stage's first
    forward operator (empty for the first stage). ``recompute`` names operators whose results backward computes again,
    or whole blocks (``blocks.3``; ``blocks.*`` means all blocks of this kind). ``algorithms`` and ``links`` are as in
    ``Plan``, for the submesh of this stage, if the submeshes of stages differ. ``operator_algorithms`` maps an operator
    (``*`` is allowed in its name) to the text of its algorithm (``ir/operator_algorithm.py``, ``ir/attention.py``).
    PyTorch's usual algorithm computes all other operators.

    ``storage`` maps a parameter to the placements of the parameter and its optimizer state between steps.
    ``gradients`` maps a parameter to the placements of its gradient, if the gradient is reduced in every micro-batch.
    All other gradients are reduced once a step. ``released`` names parameters that are freed after each use, so that
    they are gathered for every use in forward and again for backward. Other Flat parameters are gathered at their first
    use and freed after their last.

    ``receivers`` says which ranks receive together what crosses from the previous stage (``RECV_F``) or the next stage
    (``RECV_B``). It has the sizes of groups of neighbouring ranks of the stage. Ranks of one group that need the same
    elements receive each element once, and gather (``schedules/reshard.py``). Without an entry, the group is all ranks
    of the stage if stages have submeshes of their own, and otherwise each rank by itself."""

    strategies: dict[str, Strategy]
    storage: dict[str, dict[str, Placement]]
    gradients: dict[str, dict[str, Placement]] = {}
    released: tuple[str, ...] = ()
    first: str = ""
    recompute: tuple[str, ...] = ()
    algorithms: dict[str, str] = {}
    links: dict[str, AxisLink] = {}
    operator_algorithms: dict[str, str] = {}
    receivers: dict[ActionKind, tuple[int, ...]] = {}

    def strategy(self, operator: str) -> Strategy:
        """The strategy of an operator; empty if the operator runs replicated."""
        strategy = self.strategies.get(operator)
        return strategy if strategy is not None else self.strategies.get(starred(operator), {})

    def operator_algorithm(self, operator: str) -> str:
        """The text of an operator's algorithm; empty if PyTorch chooses the algorithm."""
        algorithms = self.operator_algorithms
        text = algorithms.get(operator) or algorithms.get(starred(operator), "") if algorithms else ""
        return text if text != NATIVE else ""

    @property
    def in_float8(self) -> bool:
        """Whether matrix products of the stage are in float8."""
        return any(text.startswith(FLOAT8) for text in self.operator_algorithms.values())

    @property
    def in_pieces(self) -> bool:
        """Whether matrix products of the stage run in pieces."""
        return any(text.startswith(PIECES) for text in self.operator_algorithms.values())


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All decisions about how the ranks run a training step.

    ``algorithms`` maps an axis, or joined axes (``dp+tp``), to the algorithm of its collectives. ``links`` maps an
    axis, or joined axes, to the link whose times decide which resharding is cheapest. ``interiors`` names operators
    that compute the interior of their output while the halo rows of neighbouring ranks travel. These operators compute
    the borders of the output afterwards. In repeated blocks, the names have ``*`` for the block's index. ``amendments``
    are changes to the plan during a run. ``border_codec`` is the codec of
    floating-point tensors, except scalars, that cross between stages. ``prefetch``: parameters are gathered this number
    of buckets before their use. ``graphs``: a device launches each phase of a stage as one graph of kernels, captured
    once (CUDA graphs). The plan describes one replica. The rule
    ``consistency`` joins ``layout.replicas`` such replicas (``ir/consistency.py``)."""

    VERSION: ClassVar[int] = 3
    version: int = 3
    model: str
    graph_fingerprint: str
    batch_size: int
    cluster: str
    mesh: Mesh
    stages: tuple[Stage, ...]
    layout: Layout
    microbatches: int = 1
    schedule: str = "none"
    chunks: int = 1
    precision: Precision | None = None
    offload: Literal["none", "optimizer"] = "none"
    buckets: tuple[Bucket, ...] = ()
    gathers: tuple[Bucket, ...] = ()
    algorithms: dict[str, str] = {}
    links: dict[str, AxisLink] = {}
    interiors: tuple[str, ...] = ()
    border_codec: str = ""
    prefetch: int = 1
    graphs: bool = False
    consistency: str = "sync"
    amendments: tuple[Amendment, ...] = ()
    notes: tuple[Note, ...] = ()
    prediction: Prediction | None = None
    alternatives: tuple[Alternative, ...] = ()

    @property
    def stage(self) -> Stage:
        """The only stage of a plan without a pipeline."""
        return self.stages[0]

    @property
    def firsts(self) -> tuple[str, ...]:
        """The first forward operator of every stage except the first stage. The graph is cut before each of them."""
        return tuple(stage.first for stage in self.stages[1:])

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline ranks and their stages."""
        return Pipeline(self.mesh.num_stages, self.schedule, self.chunks)

    def submesh(self, stage: int) -> Mesh:
        """The mesh of the ranks that hold a stage."""
        return self.mesh.submesh(self.pipeline.rank_of(stage))

    def algorithms_of(self, stage: int) -> dict[str, str]:
        """The algorithms of the collectives of a stage, by axis."""
        return self.stages[stage].algorithms if self.uneven else self.algorithms

    def links_of(self, stage: int) -> dict[str, AxisLink]:
        """The links that decide which resharding is cheapest in a stage, by axis."""
        return self.stages[stage].links if self.uneven else self.links

    def sizes(self, stage: int) -> dict[str, int]:
        """The size of each axis that may split a stage's factors: the axes of its submesh, and ``time``."""
        return self.submesh(stage).sizes | ({TIME: self.microbatches} if self.microbatches > 1 else {})

    @property
    def uneven(self) -> bool:
        """Whether each stage has a submesh of its own, as with ``Layout.stage_sizes``."""
        return bool(self.mesh.stages)

    def storage(self, parameter: str) -> dict[str, Placement]:
        """The placements of a parameter between steps, in the stage that holds the parameter."""
        return next((stage.storage[parameter] for stage in self.stages if parameter in stage.storage), {})

    def strategies(self, graph: Graph, divided: Cut | None = None) -> dict[str, Strategy]:
        """Maps every operator to its strategy in the stage that holds it. ``divided`` is the graph, cut into the plan's
        stages; it is cut here if it is not given.

        Raises:
            PlanError: the graph cannot be cut before the stages' first operators.
        """
        held = (divided or cut(graph, self.firsts)).stage_of if len(self.stages) > 1 else {}
        return {op.name: self.stages[held.get(op.name, 0)].strategy(op.name) for op in graph.operators}

    def computes_interior_first(self, operator: str) -> bool:
        """Whether an operator computes the interior of its output while its halos travel."""
        return operator in self.interiors or starred(operator) in self.interiors

    @property
    def digest(self) -> str:
        """A hash of the plan, as 16 hexadecimal digits. It ignores the fields prediction, alternatives and notes."""
        fields = msgspec.to_builtins(self, str_keys=True)
        for key in (*NOT_RUN, *(() if self.amendments else ("amendments",))):
            fields.pop(key, None)
        return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:16]

    def explain(self) -> str:
        """The plan as text: a table of modules, splits and reasons, followed by stages, collectives and costs."""
        ranks = "1 rank" if self.mesh.world_size == 1 else f"{self.mesh.world_size} ranks"
        lines = [f"{self.model} on {self.cluster}: {self.mesh}, {ranks}, global batch {self.batch_size}"]
        rows = [("module", "split", "why"), *((note.module, note.split, note.reason) for note in self.notes)]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines += [f"  {module:<{widths[0]}}  {split:<{widths[1]}}  {reason}".rstrip() for module, split, reason in rows]
        lines += self._end_of_data_parallelism()
        if self.microbatches > 1:
            each = self.batch_size // self.microbatches
            lines.append(f"  {self.microbatches} micro-batches of {each}, gradients are accumulated")
        if len(self.stages) > 1:
            lines.append(f"  {len(self.stages)} stages, schedule {self.schedule}; they begin at:")
            lines += [
                f"    stage {index} (pp rank {self.pipeline.rank_of(index)})  {stage.first or 'the first operator'}"
                for index, stage in enumerate(self.stages)
            ]
        again = dict.fromkeys(name for stage in self.stages for name in stage.recompute)
        if again:
            lines.append(f"  computed again in backward: {', '.join(again)}")
        if self.interiors:
            lines.append(f"  computed while halos travel: the interior of {', '.join(self.interiors)}")
        lines += _communicated(self)
        if self.layout.replicas > 1:
            lines.append(f"  {self.layout.replicas} replicas like this, joined by {self.consistency}")
        lines += [f"  amended: {amendment}" for amendment in self.amendments]
        if self.prediction is not None:
            lines.append(f"  predicted: {_costs(self.prediction)}")
        if self.alternatives:
            lines.append("  considered, and not chosen:")
            width = max(len(option.layout) for option in self.alternatives)
            lines += [f"    {option.layout:<{width}}  {_costs(option)}, {option.why}" for option in self.alternatives]
        return "\n".join(lines)

    def _end_of_data_parallelism(self) -> list[str]:
        """A line for ``explain`` if the batch does not divide over all ranks."""
        ranks, batch = self.mesh.world_size, self.batch_size
        if batch % ranks == 0 or self.uneven:
            return []
        most = max(divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0 and batch % divisor == 0)
        samples = "1 sample" if batch == 1 else f"{batch} samples"
        verb = "does" if batch == 1 else "do"
        return [f"  data parallelism ends at dp={most}: {samples} {verb} not divide over {ranks} ranks"]


@lru_cache(maxsize=2**17)
def starred(name: str) -> str:
    """The name with ``*`` in place of block indices: ``h.3.mlp:mm#0`` becomes ``h.*.mlp:mm#0``."""
    return _INDEX.sub("*", name)


def _communicated(plan: Plan) -> list[str]:
    """Lines for ``explain`` about the buckets: one line for each kind of collective and axis."""
    kinds: dict[tuple[str, str, str, str], list[Bucket]] = {}
    for bucket in plan.buckets:
        flat = isinstance(plan.storage(bucket.parameters[0]).get(bucket.axis), Flat)
        kind = "reduce-scatter" if flat else "all-reduce"
        over = " and ".join((bucket.axis, *bucket.across))
        kinds.setdefault((kind, over, "gradients", _coded(bucket)), []).append(bucket)
    for bucket in plan.gathers:
        kinds.setdefault(("all-gather", bucket.axis, "parameters", _coded(bucket)), []).append(bucket)
    lines = []
    for (kind, over, what, how), buckets in kinds.items():
        count = sum(len(bucket.parameters) for bucket in buckets)
        size = sum(bucket.num_bytes for bucket in buckets) / 2**20
        where = "1 bucket" if len(buckets) == 1 else f"{len(buckets)} buckets"
        lines.append(f"  {kind} over {over}: {count} {what}, {size:.2f} MiB in {where}{how}")
    if len(plan.gathers) > 1 and plan.prefetch != 1:
        lines.append(f"  parameters are gathered {plan.prefetch or 'no'} bucket{'s' * (plan.prefetch > 1)} ahead")
    if plan.border_codec:
        lines.append(f"  between stages: coded with {plan.border_codec}")
    lines += _receiving(plan)
    if plan.graphs:
        lines.append("  a device launches each phase of a stage as one graph of kernels")
    return lines


def _receiving(plan: Plan) -> list[str]:
    """Lines for ``explain`` about the ranks that receive together."""
    lines = []
    for number, stage in enumerate(plan.stages):
        for kind, sizes in stage.receivers.items():
            near = number - 1 if kind is ActionKind.RECV_F else number + 1
            counts = " + ".join(map(str, sizes)) if len(set(sizes)) > 1 else f"{sizes[0]}"
            how = f"once per {counts} ranks, which gather" if max(sizes) > 1 else "by each rank for itself"
            lines.append(f"  from stage {near} to stage {number}: equal values are received {how}")
    return lines


def _coded(bucket: Bucket) -> str:
    return "".join(f", over {each.axis} coded with {each.codec} ({each.algorithm})" for each in bucket.codings)


def _costs(prediction: Prediction | Alternative) -> str:
    return f"{prediction.step_s * 1e3:.4g} ms a step, {prediction.peak_memory_bytes / 2**30:.3g} GiB a rank"
