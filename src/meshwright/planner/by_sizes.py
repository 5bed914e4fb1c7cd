"""The quick answer to a search for a captured model: the best layout by the model's sizes, as a layout of its graph.

A search by sizes (``planner.search``) and a search of a captured model (``planner.auto``) choose among the same
options. The first takes about a second for any model and any cluster, the second costs the programs that run.
``docs/predictor.md`` says how well the two agree.
"""

from typing import cast

import msgspec

from meshwright.cost.setup import Precision, Setup
from meshwright.errors import ClusterError, LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout import Layout, ZeroStage
from meshwright.ir.layout_text import layout_text
from meshwright.ir.part import part_of
from meshwright.ir.transformer import Transformer
from meshwright.planner.search import SetupOption, search


class QuickAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The best layout by a model's sizes, with the predicted seconds of a step, and the bytes of the tensors of a rank
    at its peak."""

    layout: Layout
    step_s: float
    peak_bytes: float

    @property
    def text(self) -> str:
        """The answer as one line."""
        costs = f"{self.step_s * 1e3:.3g} ms a step, {self.peak_bytes / 2**30:.3g} GiB a rank"
        return f"quick answer, by the model's sizes: {layout_text(self.layout)}: about {costs}"


def quick_answer(
    model: Transformer,
    cluster: Cluster,
    devices: int,
    *,
    batch_size: int,
    precision: Precision,
    memory_bytes: float | None = None,
) -> QuickAnswer | None:
    """The fastest layout of ``model`` by its sizes, on ``devices`` ranks of ``cluster``, for a step of ``batch_size``
    sequences. If devices differ, all count as the slowest. None if the cluster has no such part, no layout divides the
    model and the batch, or none fits in memory (``memory_bytes``; None: the memory of a device)."""
    try:
        part = part_of(cluster, range(devices))
        part = part if part.num_devices == devices else part.resized(devices)
        result = search(
            model, part, global_batch=batch_size, precision=precision, memory_bytes=memory_bytes, grids="none"
        )
    except (ClusterError, LayoutError):
        return None
    return next(filter(None, map(_answer, result.options)), None)


def _answer(option: SetupOption) -> QuickAnswer | None:
    layout = layout_of(option.setup)
    if layout is None:
        return None
    return QuickAnswer(layout=layout, step_s=option.step_s, peak_bytes=option.memory.allocated_bytes)


def layout_of(setup: Setup) -> Layout | None:
    """The layout of a captured model with the options of a setup. None if the ranks of dp are not beside each other
    (``inner``), which no layout says.

    Sequence parallelism is left out: between products, the integer program splits the sequence over ``tp`` where this
    is faster."""
    if setup.inner == "pp" and setup.pp > 1 and setup.dp > 1:
        return None
    return Layout(
        dp=setup.dp // setup.depth,
        tp=(setup.grid[0], setup.grid[1], setup.grid[2]) if setup.grid else setup.tp,
        pp=setup.pp,
        cp=setup.cp,
        ep=setup.ep,
        microbatches=setup.microbatches,
        schedule=setup.schedule,
        chunks=setup.chunks,
        recompute=setup.recompute,
        zero=cast(ZeroStage, setup.zero),
        codec=setup.codec,
    )
