"""Checks before planning: another precision, samples that meet in a micro-batch, operators without a rule."""

from meshwright.errors import LayoutError, RuleError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.layout import TIME, Layout
from meshwright.ir.placement import REPLICATE, Partial, Placement, input_placements, output_placements
from meshwright.ir.plan import Strategy
from meshwright.ir.precision import Precision

_BATCH_NORM = "batch_norm"


def check_precision(asked: Precision | None, graph: Graph, cluster: Cluster | None) -> None:
    """That a layout asks for the precision that the step was captured in, or for none, and that the cluster has it.
    CPUs compute in any, some of them slowly.

    Raises:
        LayoutError: it is another one, or the devices lack it.
    """
    if asked is not None and asked != graph.precision:
        captured = graph.precision or "the model's own dtypes"
        raise LayoutError(
            f"precision={asked!r}, but the step was captured in {captured}",
            where="layout",
            remedy=f"capture it with precision={asked!r}: its casts are operators of the step",
        )
    if graph.precision is None or cluster is None or cluster.device.kind == "cpu":
        return
    known = [name for name in ("float32", "bfloat16", "float16") if name in cluster.device.peak_flops_per_s]
    if graph.precision not in known:
        raise LayoutError(
            f"precision={graph.precision!r}, which {cluster.device.name} does not compute in",
            where=f"layout on {cluster.name}",
            remedy=f"use {' or '.join(known)}",
        )


def check_strict(graph: Graph) -> None:
    """That every operator has a rule.

    Raises:
        RuleError: one has none; names the first, its module and source line, and how many others there are.
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
    """That every operator finds what it needs within its micro-batch.

    Raises:
        LayoutError: names the first operator that would have to wait for other micro-batches.
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
            made = output_placements(rule, strategy, index, sizes) if rule is not None else {}
            if TIME in made:
                placements[output] = made[TIME]


def _refused(operator: Operator, count: int, what: str) -> LayoutError:
    if _BATCH_NORM in operator.target:
        remedy = (
            "set batch_statistics='microbatch': each micro-batch then has its own statistics (which is another "
            "computation), or microbatches=1"
        )
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
