"""Say why a layout was not chosen: it is slower, needs too much memory, or is less simple; or why no layout fits."""

import math

from meshwright.errors import LayoutError
from meshwright.ir.graph import Graph
from meshwright.ir.layout import RECOMPUTE, Layout
from meshwright.ir.plan import Alternative
from meshwright.planner.inter_op.option import Option
from meshwright.planner.inter_op.pipelines import ALIKE


def complexity(layout: Layout) -> tuple[int, ...]:
    """Sort key that puts simpler layouts first, to choose among equally fast layouts."""
    sizes = (layout.dp, *layout.grid, layout.pp, layout.cp, layout.ep, *layout.mixed)
    axes = sum(size > 1 for size in sizes) + layout.sequence_parallel + (layout.context == "ring")
    axes += bool(layout.stage_sizes)
    return (
        axes,
        bool(layout.mixed),
        layout.chunks,
        layout.microbatches,
        layout.zero + (layout.offload != "none"),
        RECOMPUTE.index(layout.recompute),
    )


def alternative(loser: Option, winner: Option, *, searched: bool = True) -> Alternative:
    """The ``Alternative`` for a layout that was not chosen. Its reason names the part of the step that takes the most
    extra time. ``searched``: the winner is the result of a search."""
    lost, won = loser.predicted, winner.predicted
    parts = {
        "computing": lost.compute_s - won.compute_s,
        "communication": lost.communication_s - won.communication_s,
        "waiting for other stages": lost.waiting_s - won.waiting_s,
    }
    what, more = max(parts.items(), key=lambda item: item[1])
    slower = loser.step_s / winner.step_s - 1
    if abs(slower) <= ALIKE:
        simpler = complexity(loser.layout) > complexity(winner.layout)
        why = f"{slower:+.1%}, which is within the accuracy of predictions" + (", and less simple" if simpler else "")
    elif slower < 0:
        why = f"{-slower:.1%} faster" + ("" if searched else ": the plan was not searched for (--layout.plan auto)")
    else:
        why = f"{slower:.1%} slower" + (f": {more * 1e3:.3g} ms more of {what}" if more > 0 else "")
    return Alternative(layout=loser.name, step_s=loser.step_s, peak_memory_bytes=loser.peak_bytes, why=why)


def needs_memory(option: Option, limit: float, smallest: Option | None = None) -> Alternative:
    """The ``Alternative`` for a layout that does not fit in ``limit`` bytes. ``smallest`` is its variant with ZeRO and
    recomputation that needs the least memory."""
    why = f"needs {_gib(option.peak_bytes)} GiB at {option.memory.action or 'its peak'}, of {_gib(limit)}"
    if smallest is not None and smallest.peak_bytes < option.peak_bytes:
        why += f"; with ZeRO and recomputation at least {_gib(smallest.peak_bytes)}"
    return Alternative(layout=option.name, step_s=option.step_s, peak_memory_bytes=option.peak_bytes, why=why)


def nothing_fits(
    graph: Graph, too_large: list[Option], refused: list[str], world_size: int, limit: float
) -> LayoutError:
    """The error that no layout fits. It names the smallest layout and the changes that would help. If no layout divides
    the model, it gives the reasons."""
    if not too_large:
        divides = graph.batch_size % world_size == 0
        return LayoutError(
            f"no layout of {world_size} ranks fits the model and its batch of {graph.batch_size}: {refused[0]}"
            if refused
            else f"no layout of {world_size} ranks divides a global batch of {graph.batch_size}",
            where="plan",
            remedy="use other numbers of ranks" + ("" if divides else f", or a global batch that {world_size} divides"),
        )
    least = min(too_large, key=lambda option: option.peak_bytes)
    changes = [f"give every rank {_gib(least.peak_bytes)} GiB for tensors"]
    if fewer := smaller_batch(graph.batch_size, least, limit):
        changes.append(f"use a global batch of {fewer}")
    else:
        changes.append(f"use more ranks: {_gib(least.memory.held_bytes)} GiB are held the whole step")
    return LayoutError(
        f"no layout fits in {_gib(limit)} GiB for the tensors of a rank; the smallest, {least.name}, needs "
        f"{_gib(least.peak_bytes)} GiB a rank",
        where="memory",
        remedy=", or ".join(changes),
    )


def smaller_batch(batch_size: int, option: Option, limit: float) -> int:
    """The largest smaller batch with which the option's layout would fit in ``limit`` bytes; 0 if there is none. The
    memory of a micro-batch is assumed to be proportional to its number of samples."""
    parts = option.layout.data_ranks * option.layout.microbatches
    samples, memory = batch_size // parts, option.memory
    shrinking = memory.saved_bytes + memory.workspace_bytes
    fewer = math.floor((limit - memory.held_bytes) * samples / shrinking) if shrinking else 0
    return fewer * parts if 1 <= fewer < samples else 0


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g}"
