"""Find the best plan of a captured model (``plan="auto"``)."""

from collections.abc import Callable
from contextlib import suppress

import msgspec

from meshwright.cost.occupancy import room_of
from meshwright.cost.optimizer import ADAMW, OptimizerCost
from meshwright.errors import LayoutError
from meshwright.garbage import nothing_collected
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Float8Scaling, Layout
from meshwright.ir.layout_text import layout_text
from meshwright.ir.part import part_of
from meshwright.ir.plan import Plan
from meshwright.ir.program import Lower
from meshwright.planner.candidates import Only
from meshwright.planner.checks import check_precision
from meshwright.planner.codecs import AUTO, UNNAMED
from meshwright.planner.float8 import check_float8
from meshwright.planner.inter_op.option import REFUSALS
from meshwright.planner.layout_search import Search
from meshwright.planner.time_limit import TimeLimit


@nothing_collected()
def plan_auto(
    graph: Graph,
    world_size: int,
    cluster: Cluster,
    lowering: Callable[[Graph], Lower],
    *,
    memory_bytes: float | None = None,
    optimizer: OptimizerCost = ADAMW,
    clips: bool = False,
    only: Only = "both",
    offload: bool = False,
    codec: str = "",
    float8: Float8Scaling = "",
    clock: TimeLimit | None = None,
    guess: Layout | None = None,
) -> Plan:
    """Find the fastest plan that fits in memory.

    The search varies dp, cp, ep, tp, pp, micro-batches, schedule, chunks, the cut into stages, the recomputation of
    each stage, ZeRO, sequence parallelism, and the ranks, dp and tp of each stage (on up to eight ranks, all of them).
    If the fastest layout has a large tp, the search also tries grids of these ranks. For models with convolutions, the
    search also varies mixed axes, which may split any factor of an operator.

    Layouts are estimated in the order of their lower bounds until six of them have shorter estimates than the lower
    bounds of all others. When the turn of an estimated layout comes, its cut is improved (``inter_op.recut``). All
    layouts within ``ALIKE`` of the fastest layout count as equally fast, and the planner takes the simplest of them.
    The chosen layout is planned, lowered and simulated for the whole model. So the prediction belongs to the program
    that runs. The schedule ``gpipe`` is tried only where stages may be unequal, because ``1f1b`` takes as long with
    less memory where they are equal. The search keeps ``batch_statistics`` global, because other values would change
    the results of training. The plan lists the next-best layouts, each with the reason why it was not chosen (see
    ``Plan.explain``). ``only`` restricts the search to divided operators (``intra``) or to stages of one rank each
    (``inter``). With ``codec="auto"``, each layout is compared with the best codecs for its gradients, so that data
    parallelism may win on a slow network. ``float8`` allows matrix products in float8 in all layouts
    (``Layout.float8``).

    ``lowering`` makes the lowering of a graph; costs are computed from its programs. The other arguments are the same
    as in ``mw.plan``. When the time limit ``clock`` is over, the planner stops to estimate layouts and makes the plan
    of the best layout so far. ``guess`` is a layout that a stopped search considers too, such as the
    quick answer by sizes. A search that runs to its end does not depend on it.

    Raises:
        LayoutError: ``codec`` names a codec; ``float8`` is given for GPUs without float8; no layout that fits was found
            in time; the devices do not support the step's precision; no layout divides the batch; or no layout fits in
            memory (the message names the layout that needs the least memory, and changes that would help)."""
    check_precision(None, graph, cluster)
    if codec not in UNNAMED:
        raise LayoutError(
            f"codec={codec!r} for a search", where="codec",
            remedy=f"a search compares all codecs: write codec={AUTO!r}, or give a layout together with the codec",
        )  # fmt: skip
    check_float8(Layout(float8=float8), part_of(cluster, range(world_size)).device)
    clock = clock or TimeLimit()
    limit = memory_bytes or room_of(cluster, range(world_size))
    search = Search(
        graph, world_size, cluster, lowering, optimizer, clips, limit, only,
        offload=offload and cluster.device.kind != "cpu",  # on a CPU, device memory and host memory are the same
        clock=clock, memory_bytes=memory_bytes, codec=codec, float8=float8,
    )  # fmt: skip
    try:
        search.run()
        if search.stopped and guess is not None:
            _consider(search, guess)
        if not search.options and search.stopped:
            raise LayoutError(
                f"no layout that fits was found in {clock.spent}: {search.weighed} of {search.count} were considered",
                where="seconds",
                remedy="give more time, or a layout, such as Layout(dp=..., tp=..., zero=3)",
            )
        return search.best()
    finally:
        search.prices.close()


def _consider(search: Search, layout: Layout) -> None:
    """Estimate a layout, and count it as found if it fits."""
    search.clock.say(f"{layout_text(layout)}, the quick answer")
    with suppress(*REFUSALS):
        option = search.pipelines.option(msgspec.structs.replace(layout, recompute="none"), (layout.recompute,))
        if search.lighter.fits(option):
            search.options.append(option)
