"""Finds the grid of a product with the fewest words (elements), by branch and bound over all grids; defines the named
grids."""

from collections.abc import Iterator
from itertools import product as pairs

from meshwright.errors import LayoutError
from meshwright.schedules.products.grid import Dim, Grid, ProductPlan, mean_words, most_words
from meshwright.schedules.products.memory import fewest_panels, least_words

IDLE = 0.03
"""The largest fraction of ranks that may stay idle if this saves words (COSMA's value)."""
OVERS: tuple[Dim, ...] = ("k", "n", "m")


def grids(m: int, k: int, n: int, num_ranks: int) -> Iterator[Grid]:
    """All grids of at most ``num_ranks`` ranks in which no axis has more ranks than its dim has units."""
    for rows in range(1, min(m, num_ranks) + 1):
        for inner in range(1, min(k, num_ranks // rows) + 1):
            for columns in range(1, min(n, num_ranks // (rows * inner)) + 1):
                yield Grid(rows, inner, columns)


def choose_grid(
    m: int, k: int, n: int, num_ranks: int, memory_words: float | None = None, *,
    gradients: bool = False, idle: float = IDLE,
) -> ProductPlan:  # fmt: skip
    """The plan whose busiest rank receives the fewest words and holds at most ``memory_words`` words, with as few
    panels as possible. If several plans are equal, the plan with the most ranks, or else the first.

    ``gradients``: count the forward product and both backward products together. They run on the same grid, so that the
    results of one product are the operands that the next needs. ``idle``: the fraction of ranks that may stay idle,
    relative to the largest usable grid.

    The words of the busiest rank are at least the mean over all ranks, which has a closed form. So grids are tried in
    the order of their means, until the next mean exceeds the fewest words so far.

    Raises:
        LayoutError: an operand is empty, there is no rank, or no plan fits in the memory; the error names the smallest
            memory in which a plan fits.
    """
    check(m, k, n, num_ranks)
    usable = usable_grids(m, k, n, num_ranks, idle)
    means = [mean_words(m, k, n, grid, gradients=gradients) for grid in usable]
    ordered = sorted(
        (mean, -grid.num_ranks, index) for index, (mean, grid) in enumerate(zip(means, usable, strict=True))
    )
    best: tuple[int, int, int, int] | None = None
    chosen: ProductPlan | None = None
    for mean, ranks, index in ordered:
        if best is not None and mean > best[0]:
            break
        for place, over in enumerate(OVERS):
            plan = within(ProductPlan(m, k, n, usable[index], over), memory_words, gradients=gradients)
            if plan is None:
                continue
            key = most_words(plan, gradients=gradients), ranks, index, place
            if best is None or key < best:
                best, chosen = key, plan
    if chosen is None:
        raise too_small(usable, m, k, n, memory_words, gradients=gradients)
    return chosen


def usable_grids(m: int, k: int, n: int, num_ranks: int, idle: float) -> list[Grid]:
    """The grids that leave at most the fraction ``idle`` of the ranks idle, relative to the largest usable grid."""
    usable = list(grids(m, k, n, num_ranks))
    most = max(grid.num_ranks for grid in usable)
    return [grid for grid in usable if grid.num_ranks >= (1 - idle) * most]


def within(plan: ProductPlan, memory_words: float | None, *, gradients: bool) -> ProductPlan | None:
    """The plan with the fewest panels that stays within the memory; None if no number of panels suffices."""
    if memory_words is None:
        return plan
    panels = fewest_panels(plan, memory_words, gradients=gradients)
    return ProductPlan(plan.m, plan.k, plan.n, plan.grid, plan.over, panels, plan.algorithms) if panels else None


def too_small(
    usable: list[Grid], m: int, k: int, n: int, memory_words: float | None, *, gradients: bool, item_bytes: int = 0
) -> LayoutError:
    """The error for a memory in which no plan fits. It names bytes if the size of an element is given."""
    plans = [ProductPlan(m, k, n, grid, over) for grid, over in pairs(usable, OVERS)]
    least = min(least_words(plan, gradients=gradients) for plan in plans)
    each, unit = (item_bytes, "bytes") if item_bytes else (1, "words")
    return LayoutError(
        f"{(memory_words or 0) * each:,.0f} {unit} hold no plan of the product {m}x{k}x{n}",
        where="memory",
        remedy=f"the smallest that fits is {least * each:,} {unit} a rank; or give more ranks",
    )


def check(m: int, k: int, n: int, num_ranks: int) -> None:
    """Raise a LayoutError if an operand is empty or there are no ranks."""
    if min(m, k, n) < 1:
        raise LayoutError(
            f"a product of {m}x{k} and {k}x{n}", where="operands", remedy="every dim needs 1 or more units"
        )
    if num_ranks < 1:
        raise LayoutError(f"a product on {num_ranks} ranks", where="ranks", remedy="give 1 or more")


# --- grids with a name -----------------------------------------------------------------------------------------------

NAMED = ("1d-row", "1d-column", "1d-inner", "summa", "2.5d", "3d")
"""1D grids divide the rows of C, the columns of C, or the inner dim."""


def named_grid(name: str, num_ranks: int) -> Grid:
    """The grid that a name describes for this number of ranks. SUMMA: two nearly equal sides whose product is the
    number of ranks. 2.5D: c layers of such a grid, with the largest c that leaves sides of at least c. 3D: three sides
    that are as equal as possible; if several grids are equally good, the grid with the most layers.

    Raises:
        LayoutError: there is no such name.
    """
    if name == "1d-row":
        return Grid(num_ranks, 1, 1)
    if name == "1d-column":
        return Grid(1, 1, num_ranks)
    if name == "1d-inner":
        return Grid(1, num_ranks, 1)
    candidates = [
        Grid(rows, inner, num_ranks // (rows * inner))
        for rows in _divisors(num_ranks)
        for inner in _divisors(num_ranks // rows)
    ]
    if name == "summa":
        return min((grid for grid in candidates if grid.k == 1), key=_spread)
    if name == "2.5d":
        layered = [grid for grid in candidates if 1 < grid.k <= min(grid.m, grid.n)]
        return min(
            layered or [grid for grid in candidates if grid.k == 1],
            key=lambda grid: (abs(grid.m - grid.n), -grid.k, -grid.m),
        )
    if name == "3d":
        return min(
            candidates, key=lambda grid: (max(grid.sizes.values()) - min(grid.sizes.values()), -grid.k, *_spread(grid))
        )
    raise LayoutError(f"there is no grid {name!r}", where="grid", remedy=f"one of {', '.join(NAMED)}, or sizes")


def _spread(grid: Grid) -> tuple[int, int, int]:
    return abs(grid.m - grid.n), grid.k, -grid.m


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
