"""ZeRO: which parameters ranks that share the batch store in parts, and what follows for a stage."""

from collections.abc import Mapping

from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout
from meshwright.ir.placement import Flat, Placement, Placements, flat_axis
from meshwright.ir.plan import Stage


def zero_storage(
    graph: Graph, storage: dict[str, dict[str, Placement]], axis: str, stage: int
) -> dict[str, dict[str, Placement]]:
    """Storage under ZeRO: what nothing else cuts over the axis is Flat there. What is not trained has no gradient and
    no optimizer state, so that only stage 3 cuts it."""
    trained = {entry.parameter for entry in graph.gradients if entry.gradient is not None}
    return {
        name: {**found, axis: Flat()} if axis not in found and (stage == 3 or name in trained) else found
        for name, found in storage.items()
    }


def in_parts(
    graph: Graph, layout: Layout, storage: Mapping[str, Placements], base: Stage | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of a stage's parameters that are stored Flat, those whose gradients are reduced in every micro-batch, and those
    that are gathered for every use; as in ``base``, where there is one.
    """
    flat = [name for name, placements in storage.items() if flat_axis(placements)]
    if base is not None:
        return tuple(name for name in flat if name in base.gradients), tuple(
            name for name in flat if name in base.released
        )
    trained = {entry.parameter for entry in graph.gradients if entry.gradient is not None}
    reduced = tuple(name for name in flat if name in trained) if layout.zero >= 2 else ()
    return reduced, tuple(flat) if layout.zero == 3 else ()
