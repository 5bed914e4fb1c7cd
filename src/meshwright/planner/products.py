"""Plan a matrix product on a grid: choose the grid, order of axes, panels and algorithms with the least predicted
time."""

from collections.abc import Iterator
from itertools import product as pairs

import msgspec

from meshwright.cost.collective import Group, Network
from meshwright.cost.product import LocalProducts, algorithm_s, product_s
from meshwright.schedules.collectives.hierarchy import equal_boxes, written
from meshwright.schedules.products.choose import OVERS, check, grids, too_small, within
from meshwright.schedules.products.grid import AXIS, DIMS, Dim, Grid, ProductPlan

ORDERS = ("mkn", "mnk", "kmn", "knm", "nmk", "nkm")
PANELS = (1, 2, 4, 8, 16)


def plan_product(
    m: int, k: int, n: int, num_ranks: int, network: Network, local: LocalProducts, *,
    item_bytes: int = 4, memory_words: float | None = None, gradients: bool = False, only: tuple[Grid, ...] = (),
) -> ProductPlan:  # fmt: skip
    """The plan with the least predicted time on at most ``num_ranks`` ranks, each of which holds at most
    ``memory_words`` words (elements).

    All combinations are tried: all grids, also grids that leave ranks idle; all orders of the axes over the levels of
    the cluster; panels over each dim; and two kinds of algorithms: the fastest alone, or algorithms with one round,
    which products can hide. If several plans are equal, the first is taken.

    Args:
        gradients: count the time of the forward product and both backward products.
        only: try only these grids.

    Raises:
        LayoutError: an operand is empty, there is no rank, or no plan fits in the memory; the error names the smallest
            memory in which a plan fits.
    """
    check(m, k, n, num_ranks)
    candidates = list(only or grids(m, k, n, num_ranks))
    best: tuple[float, int] | None = None
    chosen: ProductPlan | None = None
    for grid in candidates:
        blocks = (-(-m // grid.m), -(-k // grid.k), -(-n // grid.n))
        if best is not None and _least_s(local, grid, blocks, gradients=gradients) >= best[0]:
            continue
        for plan in _variants(ProductPlan(m, k, n, grid), network, item_bytes, memory_words, gradients=gradients):
            seconds = product_s(plan, network, local, item_bytes, gradients=gradients)
            if best is None or (seconds, -grid.num_ranks) < best:
                best, chosen = (seconds, -grid.num_ranks), plan
    if chosen is None:
        raise too_small(candidates, m, k, n, memory_words, gradients=gradients, item_bytes=item_bytes)
    return chosen


def _least_s(local: LocalProducts, grid: Grid, blocks: tuple[int, int, int], *, gradients: bool) -> float:
    """A lower bound on the time of all plans with a grid: the products alone, with a single panel."""
    return local.multiply_s(*blocks, grid.num_ranks) * (3 if gradients else 1)


def _variants(
    plan: ProductPlan, network: Network, item_bytes: int, memory_words: float | None, *, gradients: bool
) -> Iterator[ProductPlan]:
    """Yield the plans with one grid that fit in the memory."""
    seen = set()
    for order in ORDERS:
        grid = msgspec.structs.replace(plan.grid, order=order)
        strides = tuple(grid.stride(axis) for axis, size in grid.sizes.items() if size > 1)
        if strides in seen:
            continue
        seen.add(strides)
        fastest = _algorithms(msgspec.structs.replace(plan, grid=grid), network, item_bytes)
        for over, algorithms in pairs(OVERS, (fastest, {}) if fastest else ({},)):  # {}: one round
            fewest = within(
                ProductPlan(plan.m, plan.k, plan.n, grid, over, 1, algorithms), memory_words, gradients=gradients
            )
            if fewest is None:
                continue
            yield fewest
            moving = [operand for operand in DIMS if operand != fewest.stationary]
            if all(fewest.sharing(operand) == 1 for operand in moving):
                continue  # no operand is exchanged in panels
            for panels in PANELS:
                if fewest.panels < panels <= fewest.largest(over):
                    yield msgspec.structs.replace(fewest, panels=panels)


def _algorithms(plan: ProductPlan, network: Network, item_bytes: int) -> dict[Dim, str]:
    """The fastest algorithm for each axis: in one round, around a ring, or along the levels of the cluster."""
    found: dict[Dim, str] = {}
    for operand, axis in AXIS.items():
        group = Group(plan.sharing(operand), plan.grid.stride(axis))
        if group.size == 1:
            continue
        operation = "reduce_scatter" if operand == "c" else "all_gather"
        rows, columns = DIMS[operand]
        num_bytes = plan.largest(rows) * plan.largest(columns) * item_bytes
        fan_outs = network.fan_outs(group)
        names = ["star", "ring"] if group.size > 2 else ["star"]
        if len(fan_outs) > 1:
            names += [written("star", across, equal_boxes(fan_outs)) for across in ("star", "ring")]
        best = min(names, key=lambda name: algorithm_s(network, operation, name, num_bytes, group))
        if best != "star":
            found[axis] = best
    return found
