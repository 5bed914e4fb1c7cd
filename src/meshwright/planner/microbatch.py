"""Whether a step can be worked through in micro-batches: nothing may communicate over time."""

from meshwright.errors import LayoutError
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.layout import TIME, Layout
from meshwright.ir.placement import REPLICATE, Partial, Placement, input_placements, output_placements
from meshwright.ir.plan import Strategy

_BATCH_NORM = "batch_norm"


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
