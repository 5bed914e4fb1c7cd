"""How many stages may follow a stage, so that its micro-batches in flight fit in memory."""

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.layout import Layout
from meshwright.planner.buckets import BUCKET_BYTES
from meshwright.planner.inter_op.piece_codecs import is_reduction
from meshwright.planner.inter_op.works import LayerWorks

UNLIMITED = 10**6
"""A number of micro-batches that no schedule has."""


def most_after(numbers: Sequence[int], layout: Layout, works: LayerWorks, limit_bytes: float) -> NDArray[np.int64]:
    """[i, j]: the largest number of stages that may follow a stage of layers i to j within the memory limit; -1: the
    stage itself does not fit. ``numbers`` has, for each layer, the index of the equal layer that is priced."""
    num_stages, count = layout.pp * layout.chunks, len(numbers)
    if limit_bytes == inf or layout.chunks > 1:  # ``peak_memory`` checks the memory of several chunks
        return np.full((count, count), num_stages, dtype=np.int64)
    facts = [works.facts[number] for number in numbers]
    stages = [works.works[number] for number in numbers]
    prologue, inputs = (
        np.array(sizes, dtype=float)
        for sizes in zip(*((fact.held.prologue_bytes, fact.held.inputs_bytes) for fact in facts), strict=True)
    )
    own = np.array([fact.held.total_bytes for fact in facts], dtype=float) - prologue - inputs
    saved = np.array([stage.saved_bytes for stage in stages], dtype=float) * works.heap_factor
    workspace = np.array([stage.workspace_bytes for stage in stages], dtype=float) * works.heap_factor
    trained = np.array([fact.trained_bytes for fact in facts], dtype=float) * works.heap_factor
    late = np.tri(count, k=-1, dtype=bool)  # the stage would end before it begins

    def of_stages(each: NDArray[np.float64]) -> NDArray[np.float64]:
        """[i, j]: the value of layer j, in stages that begin with layer i."""
        return np.where(late, 0.0, each)

    ahead = sum(np.maximum.accumulate(of_stages(each), axis=1) for each in (prologue, inputs))
    # 1: ``peak_memory`` rounds to whole bytes
    room = limit_bytes + 1 - np.cumsum(of_stages(own), axis=1) - ahead
    kept = np.cumsum(of_stages(saved), axis=1)
    if layout.microbatches == 1:  # gradients live until the end of the step, and are not counted as held bytes
        pieces = (piece for stage in works.works for kind in stage.pieces.values() for piece in (*kind, *stage.after))
        bucket = BUCKET_BYTES * works.heap_factor if any(map(is_reduction, pieces)) else 0.0
        peaks, peak = np.zeros((count, count)), np.zeros(count)
        for last in range(count):
            peak = np.where(late[:, last], 0.0, trained[last] + np.maximum(peak, kept[:, last] + workspace[last]))
            peaks[:, last] = peak
        return np.where(late, 0, np.where(room < peaks + bucket, -1, num_stages))
    room -= np.maximum.accumulate(of_stages(workspace), axis=1)
    alive = np.where(kept > 0, np.floor(room / np.maximum(kept, 1.0)), UNLIMITED)
    in_flight = layout.in_flight or 2 * num_stages
    on_all_ranks = {
        "gpipe": layout.microbatches,
        "zb-h1": num_stages,
        "zb-h2": 2 * num_stages - 1,
        "message-driven": in_flight,
    }
    if most_alive := on_all_ranks.get(layout.schedule):
        after = np.where(alive >= min(most_alive, layout.microbatches), num_stages, -1)
    else:
        after = np.where(alive >= layout.microbatches, num_stages, alive - 1)
    return np.where(late, 0, np.where(room < 0, -1, after)).astype(np.int64)
