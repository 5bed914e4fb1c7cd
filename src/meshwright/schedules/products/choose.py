"""The grid of a product with the fewest words, by branch and bound over all grids; the named grids."""

from collections.abc import Iterator
from itertools import product as pairs

from meshwright.errors import LayoutError
from meshwright.schedules.products.grid import Dim, Grid, ProductPlan, mean_words, most_words
from meshwright.schedules.products.memory import fewest_panels, least_words

IDLE = 0.03
"""The largest share of ranks that may stay idle where that saves words (COSMA's choice)."""
OVERS: tuple[Dim, ...] = ("k", "n", "m")


def grids(m: int, k: int, n: int, num_ranks: int) -> Iterator[Grid]:
    """All grids of at most ``num_ranks`` ranks that give no axis more ranks than its dim has units."""
    for rows in range(1, min(m, num_ranks) + 1):
        for inner in range(1, min(k, num_ranks // rows) + 1):
            for columns in range(1, min(n, num_ranks // (rows * inner)) + 1):
                yield Grid(rows, inner, columns)


def choose_grid(
    m: int, k: int, n: int, num_ranks: int, memory_words: float | None = None, *,
    gradients: bool = False, idle: float = IDLE,
) -> ProductPlan:  # fmt: skip
    """The plan whose busiest rank receives the fewest words, and holds at most ``memory_words``, with as few panels as
    that allows. Of equal plans, that with the most ranks, then the first.

    ``gradients``: for the forward product and both backward products together, which run on one grid, so that what one
    leaves is what the next needs. ``idle``: the share of ranks that may stay idle, of those that some grid can use.

    The words of the busiest rank are at least their mean, which has a closed form: grids are tried in the order of
    their means, until the mean of the next is above the fewest words so far.

    Raises:
        LayoutError: an operand is empty, there is no rank, or no plan fits in the memory; the error names the least
            memory in which one fits.
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
    """The grids that leave at most the share ``idle`` of the ranks idle, of those that some grid can use."""
    found = list(grids(m, k, n, num_ranks))
    most = max(grid.num_ranks for grid in found)
    return [grid for grid in found if grid.num_ranks >= (1 - idle) * most]


def within(plan: ProductPlan, memory_words: float | None, *, gradients: bool) -> ProductPlan | None:
    """The plan with the fewest panels that keep it within the memory; None if no number of panels does."""
    if memory_words is None:
        return plan
    panels = fewest_panels(plan, memory_words, gradients=gradients)
    return ProductPlan(plan.m, plan.k, plan.n, plan.grid, plan.over, panels, plan.algorithms) if panels else None


def too_small(
    usable: list[Grid], m: int, k: int, n: int, memory_words: float | None, *, gradients: bool, item_bytes: int = 0
) -> LayoutError:
    """The error for a memory in which no plan fits, in bytes if the size of an element is given."""
    plans = [ProductPlan(m, k, n, grid, over) for grid, over in pairs(usable, OVERS)]
    least = min(least_words(plan, gradients=gradients) for plan in plans)
    each, unit = (item_bytes, "bytes") if item_bytes else (1, "words")
    return LayoutError(
        f"{(memory_words or 0) * each:,.0f} {unit} hold no plan of the product {m}x{k}x{n}",
        where="memory",
        remedy=f"the smallest that fits is {least * each:,} {unit} a rank; or give more ranks",
    )


def check(m: int, k: int, n: int, num_ranks: int) -> None:
    """Refuse empty operands, and no ranks."""
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
    """The grid that a name means for so many ranks. SUMMA: the two nearly equal sides whose product is the number of
    ranks. 2.5D: the same with as many layers c as leave the sides at least c. 3D: the most equal three sides, with
    the most layers of them.

    Raises:
        LayoutError: there is no such name.
    """
    if name == "1d-row":
        return Grid(num_ranks, 1, 1)
    if name == "1d-column":
        return Grid(1, 1, num_ranks)
    if name == "1d-inner":
        return Grid(1, num_ranks, 1)
    every = [
        Grid(rows, inner, num_ranks // (rows * inner))
        for rows in _divisors(num_ranks)
        for inner in _divisors(num_ranks // rows)
    ]
    if name == "summa":
        return min((grid for grid in every if grid.k == 1), key=_spread)
    if name == "2.5d":
        layered = [grid for grid in every if 1 < grid.k <= min(grid.m, grid.n)]
        return min(
            layered or [grid for grid in every if grid.k == 1],
            key=lambda grid: (abs(grid.m - grid.n), -grid.k, -grid.m),
        )
    if name == "3d":
        return min(
            every, key=lambda grid: (max(grid.sizes.values()) - min(grid.sizes.values()), -grid.k, *_spread(grid))
        )
    raise LayoutError(f"there is no grid {name!r}", where="grid", remedy=f"one of {', '.join(NAMED)}, or sizes")


def _spread(grid: Grid) -> tuple[int, int, int]:
    return abs(grid.m - grid.n), grid.k, -grid.m


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
