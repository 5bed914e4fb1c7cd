"""The plan: mesh, strategy of every operator, storage, buckets. People read, diff, edit and rerun its file."""

import hashlib
import re
from typing import ClassVar, Literal

import msgspec

from meshwright.ir.amendment import NOT_RUN, Amendment
from meshwright.ir.graph import Graph
from meshwright.ir.layout import TIME, Layout
from meshwright.ir.mesh import Mesh
from meshwright.ir.placement import Flat, Placement
from meshwright.ir.precision import Precision
from meshwright.ir.resharding import Link
from meshwright.ir.stages import cut

_INDEX = re.compile(r"(?<=\.)\d+(?=[.:]|$)|^\d+(?=[.:])")

Strategy = dict[str, str]
"""Maps a mesh axis to the factor that is split over it, or to carets if a Partial passes through."""


class Bucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Gradients (by parameter) that one collective reduces over ``axis`` (or joined axes), or parameters stored Flat
    over ``axis`` that one collective gathers. Gradients of parameters stored Flat are reduce-scattered. The sums are
    then summed over the axes ``across``. ``num_bytes`` is the size of the whole bucket on one rank."""

    axis: str
    parameters: tuple[str, ...]
    num_bytes: int
    algorithm: str = "native"
    across: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name of the collective: its first and last parameter."""
        names = self.parameters
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The split of a module and the reason for it, for ``explain``."""

    module: str
    split: str
    reason: str


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The predicted step time and peak memory for which the plan was chosen."""

    step_s: float
    peak_memory_bytes: int


class Alternative(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A layout that the planner considered and did not choose, and why."""

    layout: str
    step_s: float
    peak_memory_bytes: int
    why: str


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A stage of the graph and how it is split. ``strategies`` are by operator name, or by the name of a repeated
    block's operator with ``*`` for the index; operators without an entry run replicated. ``first`` is the stage's
    first forward operator (empty for the first stage). ``recompute`` names operators, or whole repeated blocks
    (``blocks.*``), whose results backward computes again. ``axes`` are its submesh's sizes, if stages differ.

    ``storage`` has the placements of parameters (and of their optimizer state) between steps. ``gradients`` has the
    placements of gradients that are reduced in every micro-batch and summed up like their stored parameters; all other
    gradients are reduced once a step. ``released`` parameters are whole only during use: they are gathered for each use
    in forward and again for backward. Other parameters are whole from their first use to their last."""

    strategies: dict[str, Strategy]
    storage: dict[str, dict[str, Placement]]
    gradients: dict[str, dict[str, Placement]] = {}
    released: tuple[str, ...] = ()
    first: str = ""
    recompute: tuple[str, ...] = ()
    axes: dict[str, int] = {}

    def strategy(self, operator: str) -> Strategy:
        """The strategy of an operator (empty: replicated)."""
        strategy = self.strategies.get(operator)
        return strategy if strategy is not None else self.strategies.get(starred(operator), {})


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that was decided about a training step. ``algorithms`` of collectives, and the ``links`` by which the
    cheapest resharding is found, are by axis, or by neighbouring axes that may communicate as one (``dp+tp``).
    ``interiors`` are operators (names; in repeated blocks starred names) that compute their interior while the rows of
    neighbours travel, and then their borders. ``amendments`` are the changes during the run."""

    VERSION: ClassVar[int] = 1
    version: int = 1
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
    links: dict[str, Link] = {}
    interiors: tuple[str, ...] = ()
    codec: str | None = None
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
        """The first forward operator of every stage but the first: the graph is cut before each of them."""
        return tuple(stage.first for stage in self.stages[1:])

    def submesh(self, stage: int) -> Mesh:
        """The mesh of the ranks that hold a stage."""
        axes = {name: size for name, size in self.mesh.sizes.items() if name != "pp"}
        return Mesh.of(**(axes | self.stages[stage].axes))

    def sizes(self, stage: int) -> dict[str, int]:
        """The sizes of all axes that may split a stage's factors: those of its submesh, and time."""
        return self.submesh(stage).sizes | ({TIME: self.microbatches} if self.microbatches > 1 else {})

    @property
    def uneven(self) -> bool:
        """Whether stages have different submeshes."""
        return any(stage.axes for stage in self.stages)

    def storage(self, parameter: str) -> dict[str, Placement]:
        """The stored placements of a parameter, from the stage that holds it."""
        return next((stage.storage[parameter] for stage in self.stages if parameter in stage.storage), {})

    def strategies(self, graph: Graph) -> dict[str, Strategy]:
        """The strategy of every operator, from the stage that holds it.

        Raises:
            PlanError: the graph cannot be cut before the stages' first operators.
        """
        held = cut(graph, self.firsts).stage_of if len(self.stages) > 1 else {}
        return {op.name: self.stages[held.get(op.name, 0)].strategy(op.name) for op in graph.operators}

    def computes_interior_first(self, operator: str) -> bool:
        """Whether an operator computes its interior while its halos travel."""
        return operator in self.interiors or starred(operator) in self.interiors

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify what runs: all fields but prediction, alternatives and notes."""
        said = msgspec.to_builtins(self, str_keys=True)
        for key in (*NOT_RUN, *(() if self.amendments else ("amendments",))):
            said.pop(key, None)
        return hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()[:16]

    def explain(self) -> str:
        """The plan as text for people: a table of modules, splits and reasons, then stages, collectives and costs."""
        head = " x ".join(f"{axis.name}={axis.size}" for axis in self.mesh.axes)
        ranks = "1 rank" if self.mesh.world_size == 1 else f"{self.mesh.world_size} ranks"
        lines = [f"{self.model} on {self.cluster}: {head}, {ranks}, global batch {self.batch_size}"]
        rows = [("module", "split", "why"), *((note.module, note.split, note.reason) for note in self.notes)]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines += [f"  {module:<{widths[0]}}  {split:<{widths[1]}}  {reason}".rstrip() for module, split, reason in rows]
        lines += self._end_of_data_parallelism()
        if self.microbatches > 1:
            each = self.batch_size // self.microbatches
            lines.append(f"  {self.microbatches} micro-batches of {each}, gradients are accumulated")
        if len(self.stages) > 1:
            lines.append(f"  {len(self.stages)} stages, schedule {self.schedule}; they begin at:")
            pipeline = self.mesh.size("pp")
            lines += [
                f"    stage {index} (pp rank {index % pipeline})  {stage.first or 'the first operator'}"
                for index, stage in enumerate(self.stages)
            ]
        again = dict.fromkeys(name for stage in self.stages for name in stage.recompute)
        if again:
            lines.append(f"  computed again in backward: {', '.join(again)}")
        if self.interiors:
            lines.append(f"  computed while halos travel: the interior of {', '.join(self.interiors)}")
        lines += _communicated(self)
        lines += [f"  amended: {amendment}" for amendment in self.amendments]
        if self.prediction is not None:
            lines.append(f"  predicted: {_costs(self.prediction)}")
        if self.alternatives:
            lines.append("  weighed, and not taken:")
            width = max(len(option.layout) for option in self.alternatives)
            lines += [f"    {option.layout:<{width}}  {_costs(option)}, {option.why}" for option in self.alternatives]
        return "\n".join(lines)

    def _end_of_data_parallelism(self) -> list[str]:
        """A line for ``explain`` if the batch does not divide over all ranks."""
        ranks, batch = self.mesh.world_size, self.batch_size
        if batch % ranks == 0:
            return []
        most = max(divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0 and batch % divisor == 0)
        samples = "1 sample" if batch == 1 else f"{batch} samples"
        verb = "does" if batch == 1 else "do"
        return [f"  data parallelism ends at dp={most}: {samples} {verb} not divide over {ranks} ranks"]


def starred(name: str) -> str:
    """A name with its block indices replaced: ``h.3.mlp:mm#0`` -> ``h.*.mlp:mm#0``."""
    return _INDEX.sub("*", name)


def _communicated(plan: Plan) -> list[str]:
    """Lines for ``explain`` about the buckets, by kind of collective and axis."""
    kinds: dict[tuple[str, str, str], list[Bucket]] = {}
    for bucket in plan.buckets:
        flat = isinstance(plan.storage(bucket.parameters[0]).get(bucket.axis), Flat)
        kind = "reduce-scatter" if flat else "all-reduce"
        over = " and ".join((bucket.axis, *bucket.across))
        kinds.setdefault((kind, over, "gradients"), []).append(bucket)
    for bucket in plan.gathers:
        kinds.setdefault(("all-gather", bucket.axis, "parameters"), []).append(bucket)
    lines = []
    for (kind, over, what), buckets in kinds.items():
        count = sum(len(bucket.parameters) for bucket in buckets)
        size = sum(bucket.num_bytes for bucket in buckets) / 2**20
        where = "1 bucket" if len(buckets) == 1 else f"{len(buckets)} buckets"
        lines.append(f"  {kind} over {over}: {count} {what}, {size:.2f} MiB in {where}")
    return lines


def _costs(prediction: Prediction | Alternative) -> str:
    return f"{prediction.step_s * 1e3:.4g} ms a step, {prediction.peak_memory_bytes / 2**30:.3g} GiB a rank"
