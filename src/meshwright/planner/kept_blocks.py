"""Keep the activations of as many blocks as fit, where a stage of the best plan computes all of its blocks again.

A kind of recomputation holds for a whole stage. The memory that it leaves free often has room for the activations of
some blocks (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 5).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from meshwright.ir.graph import Graph
from meshwright.ir.plan import Note, Plan
from meshwright.ir.recomputation import Recomputation
from meshwright.ir.stages import Cut, cut
from meshwright.planner import derive
from meshwright.planner.foretell import Foretold

MOST_TRIED = 5
"""Number of plans that are simulated at most, beside those that keep nothing and everything."""


def recomputed_units(plan: Plan, graph: Graph) -> list[tuple[str, ...]]:
    """The blocks, or the single operators, that each stage computes again, in the order of forward."""
    divided, modules = cut(graph, plan.firsts), {op.name: op.module for op in graph.operators}
    return [_units(plan, graph, divided, modules, index) for index in range(len(plan.stages))]


def _units(plan: Plan, graph: Graph, divided: Cut, modules: dict[str, str], index: int) -> tuple[str, ...]:
    again = Recomputation(plan.stages[index].recompute, modules)
    names = [
        operator.name
        for operator in derive.stage_operators(graph, divided, index)
        if operator.name not in divided.late and not operator.prologue and again.holds(operator.name)
    ]
    return tuple(dict.fromkeys(again.block(name) if again.whole_block(name) else name for name in names))


def keep_what_fits(
    plan: Plan, before: Foretold, graph: Graph, memory_bytes: float | None, foretell: Callable[[Plan], Foretold],
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Plan, Foretold]:  # fmt: skip
    """The plan with fewer blocks computed again, if that fits and is faster; else the plan itself. ``before`` is its
    simulated step, and ``foretell`` simulates another plan. ``memory_bytes`` is the limit of a rank; None: the room of
    its device. The search ends early when ``is_over`` says so.

    The memory of a rank grows by about the same bytes with each block that it keeps, so the search begins with the
    number that follows from the memory with all and with none. It goes on until one more block does not fit. The last
    blocks of a stage are kept: backward frees them before it computes the others again."""
    units = recomputed_units(plan, graph)
    if not any(units) or is_over():
        return plan, before
    limits = [memory_bytes or room for room in before.room_bytes]
    stages_of = [plan.pipeline.stages_of(rank) for rank in range(len(limits))]
    most = [sum(len(units[stage]) for stage in stages) for stages in stages_of]
    everything = foretell(_keeping(plan, units, [len(names) for names in units]))
    kept = [
        _share(number, limit, least.peak_bytes, largest.peak_bytes)
        for number, limit, least, largest in zip(most, limits, before.memory, everything.memory, strict=True)
    ]
    best, best_kept, full = (plan, before), [0] * len(kept), [False] * len(kept)
    for _ in range(MOST_TRIED):
        if kept == best_kept:
            kept = [number + (not stop and number < end) for number, stop, end in zip(kept, full, most, strict=True)]
        if kept == best_kept or is_over():
            break
        each = [0] * len(units)
        for number, stages in zip(kept, stages_of, strict=True):
            for stage, own in zip(stages, _divided(number, [len(units[stage]) for stage in stages]), strict=True):
                each[stage] = own
        other = _keeping(plan, units, each)
        foretold = everything if kept == most else foretell(other)
        over = [memory.peak_bytes > limit for memory, limit in zip(foretold.memory, limits, strict=True)]
        if any(over):
            full = [stop or too_many for stop, too_many in zip(full, over, strict=True)]
            kept = [max(0, number - too_many) for number, too_many in zip(kept, over, strict=True)]
        else:
            best, best_kept = (other, foretold), kept
    return best if best[1].played.step_s < before.played.step_s else (plan, before)


def _share(number: int, limit: float, least: float, largest: float) -> int:
    """How many of ``number`` blocks may be kept if the memory is ``least`` with none of them, and ``largest`` with
    all."""
    if largest <= limit:
        return number
    return max(0, min(number, int(number * (limit - least) / (largest - least)))) if largest > least else 0


def _divided(number: int, sizes: Sequence[int]) -> list[int]:
    """``number`` divided over stages with these numbers of blocks, in proportion."""
    bounds, before, total = [0], 0, max(1, sum(sizes))
    for size in sizes:
        before += size
        bounds.append(number * before // total)
    return [end - begin for begin, end in pairwise(bounds)]


def _keeping(plan: Plan, units: Sequence[tuple[str, ...]], kept: Sequence[int]) -> Plan:
    """The plan in which each stage keeps the last ``kept`` of its units."""
    stages = tuple(
        msgspec.structs.replace(stage, recompute=names[: len(names) - number] if number else stage.recompute)
        for stage, names, number in zip(plan.stages, units, kept, strict=True)
    )
    again, count = sum(map(len, units)) - sum(kept), sum(map(len, units))
    note = Note(module="(blocks)", split=f"recompute {again} of {count}", reason="the others fit in memory")
    return msgspec.structs.replace(plan, stages=stages, notes=(note, *plan.notes))
