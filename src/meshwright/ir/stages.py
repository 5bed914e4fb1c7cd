"""A graph cut into stages: the stage of every operator, and the tensors that cross from stage to stage.

The cuts are given by the first forward operator of every stage except the first stage. They decide everything else:

    forward operators   belong to a stage by their place in the order of the captured operators
    backward operators  belong to the stage of their forward operator, or to an earlier stage that made an operand
    crossing tensors    a value that a later stage reads is sent up from stage to stage; a gradient (or another value)
                        that the backward of an earlier stage reads is sent down
    tied weights        if several stages compute terms of a gradient, every stage keeps its own term during the
                        micro-batches, and the terms are added once a step
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

import msgspec

from meshwright.errors import PlanError
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.kind import kind_of
from meshwright.ir.layout import DATA_AXES, TIME
from meshwright.ir.pipeline import Pipeline
from meshwright.ir.placement import Placements, Shard, output_placements
from meshwright.ir.schedule import ActionKind

STEP, PROLOGUE, FORWARD, BACKWARD, REDUCE, FINISH = "step", "prologue", "forward", "backward", "reduce", "finish"
"""The names of phases. ``step``: before the step; ``forward``, ``backward``: in each micro-batch; the others: once per
step."""
INPUT, WEIGHT = "input", "weight"
"""The two parts of a split backward: gradients of the stage's inputs, and gradients of its parameters."""
PHASES = (PROLOGUE, FORWARD, BACKWARD, INPUT, WEIGHT, REDUCE, FINISH)
LATE = (BACKWARD, INPUT, WEIGHT)
CAPTURED = (PROLOGUE, FORWARD, *LATE)
"""The phases that a device can capture as graphs of kernels, in the order of a step. The others run once a step, and
begin or end collectives that other phases end or began."""
"""The phases that read values kept by ``forward``."""
ALTERNATIVES = {BACKWARD: LATE, INPUT: (INPUT, BACKWARD), WEIGHT: (WEIGHT, BACKWARD)}
"""Maps a backward phase to phases that never receive values from it, because backward runs either in one piece or in
two."""
PHASE_OF = {
    ActionKind.F: FORWARD, ActionKind.B: BACKWARD, ActionKind.I: INPUT, ActionKind.W: WEIGHT,
    ActionKind.REDUCE_GRAD: REDUCE,
}  # fmt: skip
"""Maps a kind of action to the phase that it runs. ``prologue`` and ``finish`` run once a step, without an action."""
_ADD, _CAST = "aten.add.Tensor", "aten._to_copy.default"


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A graph cut into ``num_stages`` stages.

    ``stage_of`` maps a forward or backward operator to its stage. Two kinds of operators have no entry: prologue
    operators run in every stage that reads their results; additions of gradients from several stages run in no stage.
    ``late`` names the operators of the backward pass. ``up[s]`` names the tensors that stage s sends to stage s + 1, in
    the order in which they are made. ``down[s]`` names the tensors that stage s + 1 sends to stage s. ``terms`` maps a
    parameter and a stage to the tensors whose sum is the stage's gradient of the parameter. ``owners`` maps a parameter
    or buffer to the stages that hold it. ``casts`` names the forward operators that only cast a parameter.
    """

    num_stages: int
    stage_of: dict[str, int]
    late: frozenset[str]
    up: tuple[tuple[str, ...], ...]
    down: tuple[tuple[str, ...], ...]
    terms: dict[str, dict[int, tuple[str, ...]]]
    owners: dict[str, tuple[int, ...]]
    casts: frozenset[str] = frozenset()

    def phase_of(self, operator: Operator) -> str:
        """The phase of an operator: ``PROLOGUE``, ``FORWARD`` or ``BACKWARD``."""
        return PROLOGUE if operator.prologue else BACKWARD if operator.name in self.late else FORWARD

    def phase_under(self, operator: Operator, released: Collection[str]) -> str:
        """The phase of an operator in a program with separate phases.

        Casts of parameters run in ``PROLOGUE``, unless the parameter is in ``released`` (freed after each use)."""
        if operator.name in self.casts and operator.inputs[0] not in released:
            return PROLOGUE
        return self.phase_of(operator)

    def pipeline_owners(self, pipeline: Pipeline) -> dict[str, tuple[int, ...]]:
        """Maps a parameter or buffer to the pipeline ranks that hold it."""
        return {name: tuple(sorted(set(map(pipeline.rank_of, stages)))) for name, stages in self.owners.items()}

    def operators(self, graph: Graph, stage: int, results: Iterable[str]) -> list[Operator]:
        """The prologue operators that a stage or the tensors ``results`` need, followed by the stage's operators."""
        operators = [op for op in graph.operators if self.stage_of.get(op.name) == stage]
        needed = {name for operator in operators for name in operator.inputs} | set(results)
        prologue: list[Operator] = []
        for operator in reversed(graph.operators):
            if operator.prologue and needed.intersection(operator.outputs):
                prologue.append(operator)
                needed.update(operator.inputs)
        return [*reversed(prologue), *(op for op in operators if not op.prologue)]

    def reduced_inputs(self, operator: Operator, producers: dict[str, Operator]) -> set[str]:
        """An operator's inputs that another stage makes. Partial sums among them are reduced before they are sent."""
        stage = self.stage_of.get(operator.name)
        makers = ((name, producers[name].name) for name in operator.inputs if name in producers)
        return {name for name, maker in makers if stage is not None and self.stage_of.get(maker, stage) != stage}

    def received(self, stage: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tensors that a stage receives from the previous stage (forward) and from the next stage (backward)."""
        return (
            self.up[stage - 1] if stage > 0 else (),
            self.down[stage] if stage < self.num_stages - 1 else (),
        )

    def sent(self, stage: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tensors that a stage sends to the next stage (forward) and to the previous stage (backward)."""
        return (
            self.up[stage] if stage < self.num_stages - 1 else (),
            self.down[stage - 1] if stage > 0 else (),
        )


def forward_operators(graph: Graph) -> list[Operator]:
    """The forward operators: operators that are not in the prologue and do not depend on a backward operator."""
    late = _late(graph)
    return [operator for operator in graph.operators if not operator.prologue and operator.name not in late]


def cut(graph: Graph, firsts: Sequence[str]) -> Cut:
    """Cut the graph before each of the operators ``firsts``, in their order.

    Raises:
        PlanError: a name is not a forward operator of the graph, or the names are out of order, or a forward value
            would have to be sent to an earlier stage, or a gradient to a later stage.
    """
    late = _late(graph)
    forward = [operator for operator in graph.operators if not operator.prologue and operator.name not in late]
    stage_of = _forward_stages([operator.name for operator in forward], firsts)
    last = len(firsts)
    producers = graph.producers()
    by_sequence = {op.sequence: stage_of[op.name] for op in forward if op.sequence >= 0}
    for operator in graph.operators:
        if operator.name not in late:
            continue
        makers = [producers[name].name for name in operator.inputs if name in producers]
        stages = [stage_of[name] for name in makers if name in late]
        stage_of[operator.name] = min([by_sequence.get(operator.sequence, last), *stages])
    terms = _terms(graph, producers, stage_of, late)
    up, down = _crossings(graph, producers, stage_of, late, last, terms)
    return Cut(
        num_stages=last + 1,
        stage_of=stage_of,
        late=frozenset(late),
        up=up,
        down=down,
        terms=terms,
        owners=_owners(graph, stage_of, terms),
        casts=frozenset(
            op.name
            for op in forward
            if op.target == _CAST
            and op.inputs[0] in graph.parameters
            and not any(op.outputs[0] in names for names in (*up, *down))
        ),
    )


def border(
    graph: Graph, name: str, maker: Operator, strategy: dict[str, str], sizes: dict[str, int], *, uneven: bool
) -> Placements:
    """The placements of a tensor while it is sent to another stage.

    They are the placements that the operator ``maker`` gives the tensor under ``strategy``, with Partials reduced. If
    stages have different submeshes (``uneven``), only the batch of the tensor is split, over dp."""
    placements = output_placements(maker.rule, strategy, maker.outputs.index(name), sizes) if maker.rule else {}
    over_time: Placements = {axis: placement for axis, placement in placements.items() if axis == TIME}
    if uneven:
        return batch_border(graph, name, sizes) | over_time
    return {axis: placement for axis, placement in placements.items() if isinstance(placement, Shard)} | over_time


def given_batch(graph: Graph, name: str, sizes: Mapping[str, int]) -> Placements:
    """The placements of an input of the step: its batch is split over dp (and dp_shard). Other axes replicate it."""
    axes = [axis for axis in DATA_AXES if axis in sizes]
    parts, tensor = prod(sizes[axis] for axis in axes), graph.tensors[name]
    for dim, classes in enumerate(tensor.dims) if parts > 1 else ():
        if classes and graph.factor_classes[classes[0]].role == "batch":
            size = graph.factor_classes[classes[0]].size
            if tensor.shape[dim] % parts == 0:
                return {axis: Shard(dim) for axis in axes}
            if size > parts and TIME not in sizes:
                return {axis: Shard(dim, unit=tensor.shape[dim] // size) for axis in axes}
    return {}


def batch_border(graph: Graph, name: str, sizes: dict[str, int]) -> Placements:
    """The placements of a tensor whose batch is split over dp; empty if it has no batch that dp divides."""
    tensor, parts = graph.tensors[name], sizes.get("dp", 1)
    for dim, classes in enumerate(tensor.dims):
        batch = bool(classes) and graph.factor_classes[classes[0]].role == "batch"
        if batch and parts > 1 and tensor.shape[dim] % (parts * sizes.get(TIME, 1)) == 0:
            return {"dp": Shard(dim)}
    return {}


def differing_buffers(graph: Graph, sums: Collection[str]) -> frozenset[str]:
    """The buffers whose new value differs between micro-batches.

    The new value depends on samples, on a random number, or on another of these buffers. A tensor that the prologue
    makes differs only if it has a batch dim. The buffers ``sums``, which are summed over micro-batches once a step, are
    left out."""
    batch = {name for name, factor in graph.factor_classes.items() if factor.role == "batch"}

    def samples(name: str) -> bool:
        return any(not batch.isdisjoint(classes) for classes in graph.tensors[name].dims)

    buffers: frozenset[str] = frozenset()
    while True:
        differing = {*filter(samples, graph.inputs), *buffers}
        for operator in graph.operators:
            if operator.prologue:
                differing.update(filter(samples, operator.outputs))
            elif kind_of(operator) == "random" or not differing.isdisjoint(operator.inputs):
                differing.update(operator.outputs)
        updates = graph.buffer_updates.items()
        now = frozenset(buffer for buffer, update in updates if update in differing and buffer not in sums)
        if now == buffers:
            return buffers
        buffers = now


def _late(graph: Graph) -> set[str]:
    """The operators of the backward pass: operators marked ``backward``, and all that depend on their results."""
    late: set[str] = set()
    outputs: set[str] = set()
    for operator in graph.operators:
        if not operator.prologue and (operator.backward or outputs.intersection(operator.inputs)):
            late.add(operator.name)
            outputs.update(operator.outputs)
    return late


def _forward_stages(forward: list[str], firsts: Sequence[str]) -> dict[str, int]:
    places = {name: index for index, name in enumerate(forward)}
    previous = 0
    for stage, name in enumerate(firsts, 1):
        if name not in places:
            raise PlanError(
                f"there is no forward operator {name!r}", where=f"stages[{stage}].first", remedy="name one of the graph"
            )
        if places[name] <= previous:
            raise PlanError(
                f"{name!r} does not come after the first operator of the stage before",
                where=f"stages[{stage}].first",
                remedy="name the stages' first operators in the order of the graph",
            )
        previous = places[name]
    begins = {places[name] for name in firsts}
    stage, result = 0, {}
    for index, name in enumerate(forward):
        stage += index in begins
        result[name] = stage
    return result


def _terms(
    graph: Graph, producers: dict[str, Operator], stage_of: dict[str, int], late: set[str]
) -> dict[str, dict[int, tuple[str, ...]]]:
    """Maps each parameter and stage to the terms of its gradient.

    If several stages make terms, the additions of the terms are removed from ``stage_of``."""
    consumers = graph.consumers()
    result: dict[str, dict[int, tuple[str, ...]]] = {}
    for entry in graph.gradients:
        if entry.gradient is None:
            continue
        additions: list[str] = []
        terms: dict[int, list[str]] = {}
        pending = [entry.gradient]
        while pending:
            name = pending.pop()
            maker = producers.get(name)
            if (
                maker is not None
                and maker.target == _ADD
                and maker.name in late
                and len(maker.inputs) == 2
                and len(consumers.get(name, ())) == (name != entry.gradient)
            ):
                additions.append(maker.name)
                pending.extend(reversed(maker.inputs))
            else:
                stage = stage_of[maker.name] if maker is not None and maker.name in stage_of else 0
                terms.setdefault(stage, []).append(name)
        if len(terms) > 1:
            for name in additions:
                del stage_of[name]
            result[entry.parameter] = {stage: tuple(names) for stage, names in sorted(terms.items())}
        else:
            maker = producers.get(entry.gradient)
            stage = stage_of[maker.name] if maker is not None and maker.name in stage_of else 0
            result[entry.parameter] = {stage: (entry.gradient,)}
    return result


def _crossings(
    graph: Graph,
    producers: dict[str, Operator],
    stage_of: dict[str, int],
    late: set[str],
    last: int,
    terms: dict[str, dict[int, tuple[str, ...]]],
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    up: list[dict[str, None]] = [{} for _ in range(last)]
    down: list[dict[str, None]] = [{} for _ in range(last)]

    def read(name: str, stage: int, where: str, backward: bool) -> None:
        maker = producers.get(name)
        if maker is None or maker.name not in stage_of:
            return
        source, gradient = stage_of[maker.name], maker.name in late
        if (stage > source and gradient) or (stage < source and not backward):
            raise PlanError(
                f"{name!r} of stage {source} is read in stage {stage}, {'a later' if gradient else 'an earlier'} one",
                where=where,
                remedy="cut the graph elsewhere",
            )
        for border in range(source, stage):
            up[border].setdefault(name)
        for border in range(stage, source):
            down[border].setdefault(name)

    for operator in graph.operators:
        if operator.name in stage_of:
            for name in operator.inputs:
                read(name, stage_of[operator.name], operator.name, operator.name in late)
    for name in (graph.loss, *graph.metrics.values()):
        read(name, last, "outputs", False)
    order = {output: index for index, op in enumerate(graph.operators) for output in op.outputs}
    return (
        tuple(tuple(sorted(names, key=order.__getitem__)) for names in up),
        tuple(tuple(sorted(names, key=order.__getitem__)) for names in down),
    )


def _owners(
    graph: Graph, stage_of: dict[str, int], terms: dict[str, dict[int, tuple[str, ...]]]
) -> dict[str, tuple[int, ...]]:
    result: dict[str, set[int]] = {name: set(terms.get(name, ())) for name in (*graph.parameters, *graph.buffers)}
    for operator in graph.operators:
        stage = stage_of.get(operator.name)
        for name in operator.inputs:
            if name in result and stage is not None:
                result[name].add(stage)
    producers = graph.producers()
    _hold_for_prologue(graph, stage_of, result)
    for buffer, update in graph.buffer_updates.items():
        maker = producers.get(update)
        if maker is not None and maker.name in stage_of:
            _hold(result, buffer, {stage_of[maker.name]}, where=maker.name)
    parameters = set(graph.parameters)
    copied = [(buffer, update) for buffer, update in graph.buffer_updates.items() if update in result]
    for _ in copied:  # a buffer must be in the same stage as the buffer whose value it takes
        for buffer, update in copied:
            if update in parameters:
                _hold(result, buffer, {min(result[buffer] or result[update] or {0})}, result[update])
            else:
                together = result[buffer] | result[update]
                _hold(result, buffer, together, result[update] or together)
                _hold(result, update, together)
    return {name: tuple(sorted(stages)) or (0,) for name, stages in result.items()}


def _hold_for_prologue(graph: Graph, stage_of: dict[str, int], owners: dict[str, set[int]]) -> None:
    """Add the stages whose prologue operators read a parameter or buffer to its ``owners``."""
    last, producers = max(stage_of.values(), default=0), graph.producers()
    needed: dict[str, set[int]] = {name: {last} for name in (graph.loss, *graph.metrics.values())}
    for buffer, update in graph.buffer_updates.items():
        if update in producers and producers[update].prologue:
            needed.setdefault(update, set()).update(owners[buffer] or {0})
    for operator in reversed(graph.operators):
        stages = {stage_of[operator.name]} if operator.name in stage_of else set()
        if operator.prologue:
            stages = set().union(*(needed.get(name, ()) for name in operator.outputs))
        for name in operator.inputs:
            needed.setdefault(name, set()).update(stages)
            if operator.prologue and name in owners:
                owners[name] |= stages


def _hold(
    owners: dict[str, set[int]], buffer: str, stages: set[int], known: set[int] | None = None, where: str = ""
) -> None:
    """Make the only stage in ``stages`` the owner of a buffer.

    Raises:
        PlanError: another stage holds the buffer, ``stages`` has several stages, or its stage is not in ``known``.
    """
    if owners[buffer] - stages or len(stages) > 1 or (known and stages - known):
        raise PlanError(
            f"buffer {buffer!r} is updated in stage {min(known or stages)} and read in another",
            where=where or f"buffer {buffer}",
            remedy="cut the graph elsewhere",
        )
    owners[buffer] = set(stages)
