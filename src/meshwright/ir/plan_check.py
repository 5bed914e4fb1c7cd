"""Checks that a plan fits a graph: stages, strategies, stored parameters, gradients, gathers and buckets."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from math import prod

from meshwright.errors import PlanError, Problem, refuse
from meshwright.ir.codec import codec_of
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.layout import TIME
from meshwright.ir.mesh import members
from meshwright.ir.own_samples import owned_problems
from meshwright.ir.placement import (
    Flat,
    Partial,
    Placement,
    Placements,
    Shard,
    describe,
    flat_axis,
    is_linear,
    misfit,
    nested,
    output_placements,
)
from meshwright.ir.plan import Bucket, Plan, Strategy, starred
from meshwright.ir.rule import Rule
from meshwright.ir.schedule import ActionKind
from meshwright.ir.stages import cut


def check_fits(plan: Plan, graph: Graph, where: str = "plan") -> None:
    """Check that a plan fits a graph.

    Raises:
        PlanError: the plan was made for another model, names an unknown axis or factor, splits a factor that cannot
            be split, or treats a tensor that is no partial sum as a partial sum.
    """
    refuse(PlanError, _problems(plan, graph), where)


def _problems(plan: Plan, graph: Graph) -> Iterator[Problem]:
    if plan.precision != graph.precision:
        planned, captured = (dtype or "the model's own dtypes" for dtype in (plan.precision, graph.precision))
        problem = f"the plan computes in {planned}, the step was captured in {captured}"
        yield "precision", problem, "capture the step in the plan's precision, or plan again"
    if plan.graph_fingerprint != graph.fingerprint:
        problem = (
            f"the plan was made for {plan.model} (fingerprint {plan.graph_fingerprint}), "
            f"this is {graph.model} (fingerprint {graph.fingerprint})"
        )
        yield "", problem, "plan this model again (meshwright plan), or pass the model that the plan belongs to"
    held = plan.pipeline.num_stages
    if len(plan.stages) != held:
        problem = f"there are {len(plan.stages)} stages, but the mesh holds {held}"
        yield "stages", problem, "there is one stage for every coordinate of pp, times chunks"
    if plan.consistency != plan.layout.consistency:
        problem = f"it is {plan.consistency!r}, but the layout has {plan.layout.consistency!r}"
        yield "consistency", problem, "give the same rule in both places"
    yield from _storage_problems(plan, graph)
    yield from _gather_problems(plan, graph)
    yield from _receiver_problems(plan)
    divided = cut(graph, plan.firsts)
    known_names = {name for operator in graph.operators for name in (operator.name, starred(operator.name))}
    for index, stage in enumerate(plan.stages):
        names = {op.name for op in graph.operators if divided.stage_of.get(op.name, index) == index}
        names |= {starred(name) for name in names}
        for key, named in (("strategies", stage.strategies), ("operator_algorithms", stage.operator_algorithms)):
            for name in [name for name in named if name not in names]:
                where = f"in stage {index} " if name in known_names else ""
                yield key, f"there is {where}no operator {name!r}".replace("  ", " "), "remove the line"
    strategies = plan.strategies(graph, divided)
    sizes = {op.name: plan.sizes(divided.stage_of.get(op.name, 0)) for op in graph.operators}
    for operator in graph.operators:
        yield from _strategy_problems(operator, strategies[operator.name], sizes[operator.name])
        yield from owned_problems(graph, operator, strategies, sizes[operator.name])
    placements: dict[str, Placements] = {}
    producers = graph.producers()
    for operator in graph.operators:
        strategy, rule = strategies[operator.name], operator.rule
        reduced = divided.reduced_inputs(operator, producers)
        if operator.prologue or operator.name in divided.stage_of:  # else not run: it sums gradients of stages
            yield from _caret_problems(operator, strategy, placements, reduced)
        for index, output in enumerate(operator.outputs):
            placements[output] = output_placements(rule, strategy, index, sizes[operator.name]) if rule else {}
    yield from _bucket_problems(plan, graph, placements)


def _strategy_problems(operator: Operator, strategy: Strategy, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Problems of a strategy: axes or factors that do not exist, and factors that cannot be split."""
    place, rule = f"strategies[{operator.name!r}]", operator.rule
    for axis, choice in strategy.items():
        if axis not in sizes:
            yield place, f"unknown axis {axis!r}", f"axes are {', '.join(sizes)}"
        if is_linear(choice):
            continue
        if rule is None or choice not in rule.sizes:
            known = ", ".join(rule.sizes) if rule else "none"
            yield place, f"unknown factor {choice!r}", f"its factors are: {known}"
        elif not rule.splittable(choice):
            problem = f"factor {choice!r} of {rule.pattern!r} cannot be split"
            yield place, problem, "choose another factor, or leave the axis out"
    if rule is not None and (uncut := misfit(rule, strategy, sizes)) is not None:
        yield place, *_uncut(rule, strategy, *uncut)


def _caret_problems(
    operator: Operator, strategy: Strategy, placements: Mapping[str, Placements], reduced: Collection[str]
) -> Iterator[Problem]:
    """Problems of an operator whose strategy has carets (``^``) although its operands are no partial sums.

    ``placements`` maps each tensor that earlier operators make to its placements. Tensors in ``reduced`` come from
    another stage, which has already reduced them."""
    place, rule = f"strategies[{operator.name!r}]", operator.rule
    for axis, choice in strategy.items():
        if not is_linear(choice):
            continue
        operands = zip(rule.parsed.inputs if rule else (), operator.inputs, strict=False)
        group = [name for operand, name in operands if operand.linear == len(choice)]
        if not group:
            pattern = rule.pattern if rule else "(no rule)"
            yield place, f"{choice!r} on {axis!r}, but no operand of {pattern!r} is marked so", "leave the axis out"
        # Over time, whole tensors may be used too: a whole tensor divided by the number of micro-batches is Partial.
        for name in group if axis != TIME else ():
            if placements.get(name, {}).get(axis) != Partial("sum") or name in reduced:
                other = " here: it comes from another stage" if name in reduced else ""
                problem = f"{choice!r} passes a partial sum over {axis!r} on, but {name!r} is none{other}"
                yield place, problem, f"leave the axis out, or split the operator that makes {name!r}"


def _uncut(rule: Rule, strategy: Strategy, letter: str, parts: int) -> tuple[str, str]:
    """The text of the problem that a factor cannot be cut into ``parts`` parts, and the text of the remedy."""
    if letter in rule.joint:
        problem = f"factor {letter!r} is exchanged in a ring or all-to-all along one axis, and is cut over several"
        return problem, "leave it out on all axes but one"
    alike = [axis for axis, choice in strategy.items() if not is_linear(choice) and letter in rule.members(choice)]
    axes = f"axis {alike[0]!r} has" if len(alike) == 1 else f"axes {', '.join(map(repr, alike))} have"
    few = "no rank can have nothing of it: split another factor"
    uneven = "here it must divide evenly: split another factor, or choose sizes that divide"
    size = rule.sizes[letter]
    return f"factor {letter!r} has size {size}, {axes} {parts}", few if size < parts else uneven


def _storage_problems(plan: Plan, graph: Graph) -> Iterator[Problem]:
    """Problems of stored parameters: unknown names and axes, and placements that a parameter cannot have."""
    stored = [(index, *item) for index, stage in enumerate(plan.stages) for item in stage.storage.items()]
    for index, name, placements in stored:
        sizes = plan.submesh(index).sizes
        place = f"storage[{name!r}]"
        if any(stage.storage.get(name, placements) != placements for stage in plan.stages):
            yield place, "stages that share it store it in different ways", "store a tied parameter alike in all stages"
        if name not in graph.parameters:
            yield place, f"there is no parameter {name!r}", "remove the line"
        dims = graph.tensors[name].shape
        for axis, placement in placements.items():
            if axis not in sizes:
                yield place, f"unknown axis {axis!r}", f"axes are {', '.join(sizes)}"
            if isinstance(placement, Partial):
                yield place, "a parameter cannot be Partial", "make it shard or replicate"
            if isinstance(placement, Flat) and flat_axis(placements) != axis:
                yield place, "it is flat over two axes", "leave one of them out"
            if not isinstance(placement, Shard):
                continue
            alike = [mesh_axis for mesh_axis in placements if _factor(placements[mesh_axis]) == _factor(placement)]
            parts = prod(sizes.get(mesh_axis, 1) for mesh_axis in alike)
            length = dims[placement.dim] if 0 <= placement.dim < len(dims) else 0
            units, rest = divmod(length, placement.outer * placement.unit)
            if rest or units < parts:
                problem = f"{placement} over {parts} ranks does not fit shape {list(dims)}"
                yield place, problem, "choose a dim, an outer and a unit that make as many units or more of it"
        cuts = [(axis, shard) for axis, shard in placements.items() if isinstance(shard, Shard)]
        for (axis, first), (other, second) in combinations(sorted(cuts, key=lambda cut: cut[1].outer), 2):
            if first.dim == second.dim and not nested(first, sizes[axis], second, dims[first.dim]):
                both = f"{first} over {axis!r} and {second} over {other!r}"
                problem = f"{both} do not cut dim {first.dim} of {list(dims)} at factors of one size"
                yield place, problem, "cut another dim, or leave one axis out"


def _factor(placement: Placement) -> tuple[int, int] | None:
    return (placement.dim, placement.outer) if isinstance(placement, Shard) else None


def _gather_problems(plan: Plan, graph: Graph) -> Iterator[Problem]:
    """Problems of gathers, released parameters and gradients of a plan.

    Gathered and released parameters must be stored Flat. Gradients must be placed like the stored parameters."""
    seen: set[str] = set()
    for index, bucket in enumerate(plan.gathers):
        place = f"gathers[{index}]"
        for name in bucket.parameters:
            if not isinstance(plan.storage(name).get(bucket.axis), Flat):
                yield place, f"{name!r} is not flat over {bucket.axis!r}", "take it out of the bucket"
            if name in seen:
                yield place, f"{name!r} is gathered already", "take it out of one"
            seen.add(name)
        if len({graph.tensors[name].dtype for name in bucket.parameters}) > 1:
            yield place, "its parameters have several dtypes", "make a bucket for each"
    for number, stage in enumerate(plan.stages):
        for name in stage.released:
            if not flat_axis(stage.storage.get(name, {})):
                yield f"stages[{number}].released", f"{name!r} is not stored flat", "take it out"
        for name, placements in stage.gradients.items():
            if placements != stage.storage.get(name):
                problem = f"the gradient of {name!r} is summed up otherwise than the parameter is stored"
                yield f"stages[{number}].gradients", problem, "take it out, or give it the parameter's storage"


def _receiver_problems(plan: Plan) -> Iterator[Problem]:
    """Problems of the ranks that receive together: they must be all ranks of the stage, in groups."""
    for number, stage in enumerate(plan.stages):
        ranks, place = plan.submesh(number).world_size, f"stages[{number}].receivers"
        for kind, sizes in stage.receivers.items():
            if kind not in (ActionKind.RECV_F, ActionKind.RECV_B):
                yield place, f"{kind} receives nothing", "name RECV_F or RECV_B"
            if min(sizes, default=0) < 1 or sum(sizes) != ranks:
                problem = f"groups of {' + '.join(map(str, sizes)) or 'no'} ranks receive, the stage has {ranks}"
                yield place, problem, f"give sizes of 1 or more that sum up to {ranks}"


def _coding_problems(bucket: Bucket, axes: Sequence[str], place: str) -> Iterator[Problem]:
    """Problems of a bucket's codings.

    Raises:
        PlanError: a text names no codec."""
    for coding in bucket.codings:
        codec = codec_of(coding.codec)
        if coding.axis not in axes:
            yield place, f"a codec over {coding.axis!r}, which it does not cross", f"its axes are {', '.join(axes)}"
        if codec.exchange == "factors":
            yield place, "factors are no codec of a bucket", "give the layout codec='factors'"
        if coding.algorithm == "native" and codec.exchange != "sums":
            problem = f"{coding.codec} over {coding.axis!r} by torch.distributed's own collectives"
            yield place, problem, "name an algorithm of Meshwright, such as ring"


def _bucket_problems(plan: Plan, graph: Graph, placements: dict[str, Placements]) -> Iterator[Problem]:
    """Problems of gradients in buckets.

    Each gradient must be Partial over the bucket's axes. On other axes, it must have the placements of its stored
    parameter."""
    gradients = {entry.parameter: entry.gradient for entry in graph.gradients}
    terms = cut(graph, plan.firsts).terms
    seen: set[str] = set()
    for index, bucket in enumerate(plan.buckets):
        place = f"buckets[{index}]"
        yield from _coding_problems(bucket, (bucket.axis, *bucket.across), place)
        if any(isinstance(plan.storage(name).get(bucket.axis), Flat) for name in bucket.parameters):
            for coding in bucket.codings:
                if coding.axis == bucket.axis and codec_of(coding.codec).needs_whole_sum:
                    problem = f"{coding.codec} over {coding.axis!r}: its sums are whole, and ranks keep parts of them"
                    yield place, problem, "use another codec, or do not store the parameters flat over this axis"
        for parameter in bucket.parameters:
            if len(terms.get(parameter, ())) > 1:
                problem = f"several stages have terms of the gradient of {parameter!r}"
                yield place, problem, "take it out of the bucket"
        split = {
            tuple(axis for axis, placement in plan.storage(name).items() if isinstance(placement, Shard))
            for name in bucket.parameters
        }
        if bucket.codings and len(split) > 1:
            problem = "its gradients are coded, but not split over the same axes: equal gradients would become unequal"
            yield place, problem, "make a bucket for each kind of split"
        flat = {isinstance(plan.storage(name).get(bucket.axis), Flat) for name in bucket.parameters}
        if len(flat) > 1:
            yield place, f"some of its parameters are flat over {bucket.axis!r}, and some are not", "make two of it"
        for parameter in bucket.parameters:
            gradient = gradients.get(parameter) or parameter
            if gradient in seen:
                yield place, f"the gradient of {parameter!r} is in a bucket already", "take it out of one"
            seen.add(gradient)
            storage = plan.storage(parameter)
            wanted: Placements = {axis: shard for axis, shard in storage.items() if isinstance(shard, Shard)}
            wanted |= dict.fromkeys((*members(bucket.axis), *bucket.across), Partial("sum"))
            have = {axis: placement for axis, placement in placements.get(gradient, {}).items() if axis != TIME}
            if have != wanted:
                problem = f"the gradient of {parameter!r} is {describe(have)}, and not {describe(wanted)}"
                yield place, problem, "take it out of the bucket"
