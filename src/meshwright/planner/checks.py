"""Check requests to the planner: precision, operators without a rule, and operators that need data of several
micro-batches."""

from collections.abc import Iterator

from meshwright.errors import LayoutError, Problem, RuleError, refuse
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.layout import TIME, Layout
from meshwright.ir.opaque import TARGETS
from meshwright.ir.part import pools_of
from meshwright.ir.placement import REPLICATE, Partial, Placement, input_placements, output_placements
from meshwright.ir.plan import Strategy
from meshwright.ir.precision import Precision

_BATCH_NORM = "batch_norm"


def check_precision(asked: Precision | None, graph: Graph, cluster: Cluster | None) -> None:
    """Check that a requested precision is the precision of the captured step, and that the devices support the step's
    precision. CPUs support every precision, but some only slowly.

    Raises:
        LayoutError: the layout asks for another precision, or the devices do not support the step's precision.
    """
    refuse(LayoutError, _precision_problems(asked, graph, cluster))


def batch_problems(graph: Graph, layout: Layout, runs_forward: bool) -> Iterator[Problem]:
    """Problems of a batch that does not divide over data-parallel ranks and micro-batches. ``runs_forward``: the graph
    is an evaluation, which runs undivided if it has too few samples."""
    size, parts = graph.batch_size, layout.data_ranks * layout.microbatches
    whole = layout.microbatches == 1  # parts of ranks may be unequal, micro-batches may not
    ranks = f"dp={layout.dp}" + (f" x tz={layout.depth}" if layout.depth > 1 else "")
    if runs_forward:
        return
    if whole and size < parts:
        remedy = f"use a batch of {parts} or more, or drop the last batch"
        yield "batch", f"a global batch of {size} is too small for {ranks}", remedy
    if not whole and size % parts:
        lower = size // parts * parts
        fits = f"{lower} or {lower + parts}" if lower else str(parts)
        over = f"{layout.microbatches} micro-batches" + (f" on {ranks}" if layout.data_ranks > 1 else "")
        remedy = f"use a batch of {fits}, or drop the ragged last batch"
        yield "batch", f"a global batch of {size} does not divide over {over}", remedy


def _precision_problems(asked: Precision | None, graph: Graph, cluster: Cluster | None) -> Iterator[Problem]:
    if asked is not None and asked != graph.precision:
        captured = graph.precision or "the model's own dtypes"
        problem = f"precision={asked!r}, but the step was captured in {captured}"
        yield "layout", problem, f"capture it with precision={asked!r}: its casts are operators of the step"
    if graph.precision is None or cluster is None:
        return
    devices = [cluster.device_of(ranks.start) for ranks in pools_of(cluster)]
    for device in {device.name: device for device in devices}.values():
        known = [name for name in ("float32", "bfloat16", "float16") if name in device.peak_flops_per_s]
        if device.kind != "cpu" and graph.precision not in known:
            problem = f"precision={graph.precision!r}, which {device.name} does not compute in"
            yield f"layout on {cluster.name}", problem, f"use {' or '.join(known)}"


def check_strict(graph: Graph) -> None:
    """Check that every operator has a rule.

    Raises:
        RuleError: operators lack rules. The message names the first operator without a rule, its module and source
            line. It also says how many other ATen or custom operators lack rules.
    """
    missing = [operator for operator in graph.operators if operator.rule is None]
    if missing:
        first = missing[0]
        others = len({operator.target for operator in missing}) - 1
        more = f" (and {others} other operators)" if others else ""
        raise RuleError(
            f"{first.target} cannot be split: {first.reason}{more}",
            where=f"module {first.module or '(model)'}, {first.source or 'source line unknown'}",
            remedy="pass a rule for it (rules=, see docs/how-to/add-an-operator-rule.md), or plan without strict",
        )


def check_microbatches(graph: Graph, strategies: dict[str, Strategy], sizes: dict[str, int], layout: Layout) -> None:
    """Check that every operator can compute each micro-batch without data of other micro-batches.

    Raises:
        LayoutError: an operator would have to wait for other micro-batches. The message names the first such operator.
    """
    placements: dict[str, Placement] = {}
    for operator in graph.operators:
        rule, strategy = operator.rule, strategies[operator.name]
        statistics = rule is not None and strategy.get(TIME) in rule.decompositions
        if statistics and not (_BATCH_NORM in operator.target and layout.batch_statistics != "global"):
            raise _refused(operator, sizes[TIME], "its statistics are over the whole batch")
        for position, name in enumerate(operator.inputs):
            have = placements.get(name, REPLICATE)
            wanted = input_placements(rule, strategy, position, sizes) if rule is not None else {}
            want = wanted.get(TIME, REPLICATE)
            if operator.prologue or have in (want, REPLICATE):
                continue
            if rule is None:
                what = f"{operator.reason}, and {name!r} differs between micro-batches"
            elif isinstance(have, Partial):
                what = f"it needs the whole {have.op} {name!r}, of which every micro-batch makes a term"
            else:
                what = f"it needs all of {name!r}, of which every micro-batch makes a part"
            raise _refused(operator, sizes[TIME], what)
        for index, output in enumerate(operator.outputs):
            by_axis = output_placements(rule, strategy, index, sizes) if rule is not None else {}
            if TIME in by_axis:
                placements[output] = by_axis[TIME]


def _refused(operator: Operator, count: int, what: str) -> LayoutError:
    if _BATCH_NORM in operator.target:
        remedy = (
            "set batch_statistics='microbatch': each micro-batch then has its own statistics (which is another "
            "computation), or microbatches=1"
        )
    elif operator.target in TARGETS:
        remedy = "use microbatches=1, or make the region compute each sample by itself: docs/how-to/opaque-regions.md"
    elif operator.rule is None:
        remedy = (
            "use microbatches=1, or pass a rule (rules=) in which a letter of its inputs and outputs is the batch: "
            "docs/how-to/add-an-operator-rule.md"
        )
    else:
        remedy = "use microbatches=1, or let samples meet only in a loss that is a sum or mean over them"
    return LayoutError(
        f"the step cannot be divided into {count} micro-batches: {what}",
        where=f"{operator.name}, {operator.source}" if operator.source else operator.name,
        remedy=remedy,
    )
