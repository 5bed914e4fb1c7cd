"""If a stage of the best plan recomputes all of its blocks, keep the activations of as many blocks as fit.

The search chooses one kind of recomputation for a whole stage. The memory that stays free often has room for the
activations of some blocks (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
section 5).
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
"""The largest number of plans that are simulated, in addition to the plans that keep no blocks and all blocks."""


def recomputed_units(plan: Plan, graph: Graph) -> list[tuple[str, ...]]:
    """The blocks, or single operators, that each stage recomputes, in the order of forward."""
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
    """Return the plan with fewer recomputed blocks and its simulated step, if it fits and is faster. Otherwise return
    the given plan. ``before`` is the simulated step of ``plan``, and ``foretell`` simulates another plan.
    ``memory_bytes`` is the limit of a rank; None: the memory for live tensors on its device. The search ends early when
    ``is_over`` returns true.

    Each kept block adds about the same memory to a rank. So the search begins with the number of blocks that follows
    from the memory with all blocks and with none. It goes on until one more block does not fit. A stage keeps its last
    blocks, because backward frees them before it recomputes the others."""
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
    """The number of blocks, of ``number``, that may be kept if the memory is ``least`` without them and ``largest``
    with all of them."""
    if largest <= limit:
        return number
    return max(0, min(number, int(number * (limit - least) / (largest - least)))) if largest > least else 0


def _divided(number: int, sizes: Sequence[int]) -> list[int]:
    """``number`` divided over stages in proportion to their numbers of blocks."""
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
