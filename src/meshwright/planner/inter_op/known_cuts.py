"""Cuts into stages that are already known, because other layouts have stages with the same seconds."""

from collections.abc import Callable, Sequence
from math import inf

from meshwright.ir.layout import Layout
from meshwright.planner.inter_op.rounds import fill_of, passes
from meshwright.planner.inter_op.stage_prices import AssignedStage
from meshwright.planner.inter_op.works import LayerWorks

Cut = tuple[AssignedStage, ...] | None


class KnownCuts:
    """Keeps the cuts of layouts whose cut does not depend on memory. Layouts that differ only in ZeRO or in what they
    recompute share the works of their layers, and so their cut. Works of layers are never dropped by a search, so their
    ids stay theirs."""

    def __init__(self) -> None:
        self._known: dict[object, Cut] = {}

    def cut(
        self, layout: Layout, variants: Sequence[LayerWorks], limit_bytes: float, compute: Callable[[], Cut]
    ) -> Cut:  # fmt: skip
        """The best cut of a layout, whose stages have one of the ``variants``. ``compute`` finds it if it is not known.
        With several chunks per rank, memory is only checked later."""
        if limit_bytes < inf and layout.chunks == 1:
            return compute()
        works = tuple((id(each.works), each.mesh) for each in variants)
        shape = layout.pp, layout.chunks, layout.microbatches, layout.num_ranks
        key = works, shape, fill_of(layout), passes(layout)
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]
