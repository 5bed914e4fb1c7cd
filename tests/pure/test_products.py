"""Grids for matrix products: words in closed form and counted, bounds, the chosen grid beside brute force, memory."""

import itertools
import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.schedules.collectives.check import check
from meshwright.schedules.products import rounds as rounds_module
from meshwright.schedules.products.bounds import cosma_bound, lower_bound
from meshwright.schedules.products.choose import IDLE, NAMED, OVERS, choose_grid, grids, named_grid
from meshwright.schedules.products.grid import (
    DIMS,
    Grid,
    ProductPlan,
    following,
    mean_words,
    most_words,
    part,
    words_received,
)
from meshwright.schedules.products.memory import fewest_panels, least_words, peak_words
from meshwright.schedules.products.rounds import backward, count_words, forward
from tests.tries import tries

SIZES = st.integers(1, 40)


# --- parts -----------------------------------------------------------------------------------------------------------


@given(SIZES, SIZES, SIZES, st.integers(1, 16), st.data())
@tries(25)
def test_every_element_is_stored_once(m: int, k: int, n: int, num_ranks: int, data: st.DataObject) -> None:
    plan = drawn_plan(m, k, n, num_ranks, data)
    for operand, (rows, columns) in DIMS.items():
        stored = [(row, column) for rank in range(num_ranks) for row, column in elements(plan, operand, rank)]
        assert sorted(stored) == list(itertools.product(range(plan.sizes[rows]), range(plan.sizes[columns])))


def test_c_of_a_product_is_a_of_the_following() -> None:
    for over in OVERS:
        first = ProductPlan(23, 17, 19, Grid(2, 3, 2, "nkm"), over)
        second = following(first, 11)
        assert (second.m, second.k, second.n, str(second.grid)) == (23, 19, 11, "2x2x3")
        for rank in range(12):
            assert part(first, "c", rank) == part(second, "a", rank)


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", range(1, 17))
def test_counted_words_are_the_closed_form_on_every_grid(num_ranks: int) -> None:
    """Ragged sizes, panels over each dim; forward, and forward with both gradients."""
    draw = random.Random(num_ranks)
    for grid in grids(16, 16, 16, num_ranks):
        if grid.num_ranks != num_ranks:
            continue
        m, k, n = (draw.randrange(16, 40) for _ in range(3))
        for over in OVERS:
            for panels in (1, 3):
                order = "".join(draw.sample("mkn", 3))
                plan = ProductPlan(m, k, n, Grid(grid.m, grid.k, grid.n, order), over, 1)
                plan = ProductPlan(m, k, n, plan.grid, over, min(panels, plan.largest(over)))
                ranks = range(num_ranks)
                there = count_words(plan, forward(plan))
                back = count_words(plan, backward(plan))
                assert there == [words_received(plan, rank) for rank in ranks]
                both = [words_received(plan, rank, gradients=True) for rank in ranks]
                assert [a + b for a, b in zip(there, back, strict=True)] == both
                assert sum(there) == pytest.approx(num_ranks * mean_words(m, k, n, grid))
                assert sum(both) == pytest.approx(num_ranks * mean_words(m, k, n, grid, gradients=True))


@pytest.mark.parametrize("algorithm", ["star", "partitioned", "ring"])
def test_collectives_end_with_every_part_where_it_belongs(algorithm: str) -> None:
    plan = ProductPlan(13, 11, 7, Grid(2, 3, 2), "k", 2, {"m": algorithm, "k": algorithm, "n": algorithm})
    for operation, operand, panel in rounds_module.collectives_of(plan, (*forward(plan), *backward(plan))):
        for rank in range(12):
            check(rounds_module.steps_of(plan, operation, operand, panel, plan.grid.coordinates(rank)))


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "words"),
    [((4096, 4096, 4096), 64, 2_359_296), ((1024, 256, 64), 64, 6_912), ((4096, 16, 256), 16, 3_840)],
)
def test_published_volumes(sizes: tuple[int, int, int], num_ranks: int, words: int) -> None:
    """arXiv 2205.13407: these grids attain the bound, in each of its three cases."""
    for m, k, n in itertools.permutations(sizes):
        plan = choose_grid(m, k, n, num_ranks)
        assert most_words(plan) == words
        assert lower_bound(m, k, n, num_ranks) == pytest.approx(words)
    assert sorted(choose_grid(4096, 4096, 4096, 64).grid.sizes.values()) == [4, 4, 4]
    assert str(choose_grid(1024, 256, 64, 64).grid) == "16x4x1"


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 200), st.integers(1, 16))
@tries(50)
def test_no_grid_receives_less_than_the_bound(m: int, k: int, n: int, num_ranks: int) -> None:
    for grid in grids(m, k, n, num_ranks):
        divides = m % grid.m == 0 and k % grid.k == 0 and n % grid.n == 0
        if grid.num_ranks == num_ranks and divides:  # else the bound's equal division of work does not hold
            assert most_words(ProductPlan(m, k, n, grid)) >= lower_bound(m, k, n, num_ranks) - 1e-6


# --- the chosen grid -------------------------------------------------------------------------------------------------


def by_brute_force(
    m: int, k: int, n: int, num_ranks: int, memory_words: float | None, *, gradients: bool
) -> tuple[int, int] | None:
    """The fewest words of the busiest rank, and the most ranks of such a grid, over all grids, dims of panels and
    numbers of panels, counting the words of every rank."""
    candidates: list[tuple[int, int]] = []
    every = [
        Grid(sizes[0], sizes[1], sizes[2])
        for sizes in itertools.product(range(1, num_ranks + 1), repeat=3)
        if math.prod(sizes) <= num_ranks and sizes[0] <= m and sizes[1] <= k and sizes[2] <= n
    ]
    most = max(grid.num_ranks for grid in every)
    for grid in every:
        if grid.num_ranks < (1 - IDLE) * most:
            continue
        for over in OVERS:
            plan = ProductPlan(m, k, n, grid, over)
            fits = memory_words is None or any(
                peak_words(ProductPlan(m, k, n, grid, over, panels), gradients=gradients) <= memory_words
                for panels in range(1, plan.largest(over) + 1)
            )
            if fits:
                candidates.append((max(words_received(plan, rank, gradients=gradients) for rank in range(num_ranks)),
                                   -grid.num_ranks))  # fmt: skip
    return min(candidates, default=None)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60), st.integers(1, 12), st.booleans(), st.floats(0, 1.5))
@tries(40)
def test_chosen_grid_equals_brute_force(
    m: int,
    k: int,
    n: int,
    num_ranks: int,
    gradients: bool,
    room: float,
) -> None:
    """``python -m benchmarks.products --only words`` compares 10,000."""
    memory = None if room > 1 else room * (m * k + k * n + m * n)
    expected = by_brute_force(m, k, n, num_ranks, memory, gradients=gradients)
    if expected is None:
        with pytest.raises(LayoutError, match="hold no plan"):
            choose_grid(m, k, n, num_ranks, memory, gradients=gradients)
        return
    plan = choose_grid(m, k, n, num_ranks, memory, gradients=gradients)
    assert (most_words(plan, gradients=gradients), -plan.grid.num_ranks) == expected
    assert memory is None or peak_words(plan, gradients=gradients) <= memory


def test_one_idle_rank_of_65_saves_a_third() -> None:
    """COSMA: 64 of 65 ranks touch 36 % fewer words for squares, and do 1.5 % more work."""
    idle, all_ranks = choose_grid(4096, 4096, 4096, 65), choose_grid(4096, 4096, 4096, 65, idle=0.0)
    assert (idle.grid.num_ranks, all_ranks.grid.num_ranks) == (64, 65)
    assert str(all_ranks.grid) in ("1x5x13", "1x13x5", "5x1x13", "5x13x1", "13x1x5", "13x5x1")
    touched = [most_words(plan) + 3 * 4096**2 / plan.grid.num_ranks for plan in (idle, all_ranks)]
    assert 1 - touched[0] / touched[1] == pytest.approx(0.36, abs=0.01)


def test_named_grids() -> None:
    assert {name: str(named_grid(name, 16)) for name in NAMED} == {
        "1d-row": "16x1x1", "1d-column": "1x1x16", "1d-inner": "1x16x1", "summa": "4x1x4", "2.5d": "4x2x2",
        "3d": "2x4x2",
    }  # fmt: skip
    assert (str(named_grid("summa", 12)), str(named_grid("2.5d", 64))) == ("4x1x3", "4x4x4")
    assert (str(named_grid("3d", 64)), str(named_grid("3d", 4))) == ("4x4x4", "2x2x1")
    assert str(named_grid("3d", 8)) == str(named_grid("2.5d", 8)) == "2x2x2"


# --- memory ----------------------------------------------------------------------------------------------------------


@given(SIZES, SIZES, SIZES, st.integers(1, 12), st.booleans(), st.data())
@tries(50)
def test_fewest_panels_are_those_of_a_search(
    m: int,
    k: int,
    n: int,
    num_ranks: int,
    gradients: bool,
    data: st.DataObject,
) -> None:
    plan = drawn_plan(m, k, n, num_ranks, data)
    every = range(1, plan.largest(plan.over) + 1)
    peaks = {count: peak_words(with_panels(plan, count), gradients=gradients) for count in every}
    limit = data.draw(st.integers(0, max(peaks.values())))
    expected = next((count for count in every if peaks[count] <= limit), 0)
    assert fewest_panels(plan, limit, gradients=gradients) == expected
    assert least_words(plan, gradients=gradients) == min(peaks.values())


def test_a_memory_that_nothing_fits_names_the_smallest_that_does() -> None:
    with pytest.raises(LayoutError, match="100 words hold no plan") as caught:
        choose_grid(64, 64, 64, 4, 100)
    least = int(re.findall(r"([\d,]+) words a rank", caught.value.remedy)[0].replace(",", ""))
    assert choose_grid(64, 64, 64, 4, least).panels > 1
    with pytest.raises(LayoutError):
        choose_grid(64, 64, 64, 4, least - 1)


def test_bound_of_cosma() -> None:
    """Its first branch counts while S is at most (mnk / P)^(2/3); both branches meet there."""
    volume = 4096**3 / 64
    corner = volume ** (2 / 3)
    assert cosma_bound(4096, 4096, 4096, 64, corner) == pytest.approx(3 * corner)
    assert cosma_bound(4096, 4096, 4096, 64, 4 * corner) == pytest.approx(3 * corner)
    assert cosma_bound(4096, 4096, 4096, 64, corner / 4) == pytest.approx(min(4 * volume / corner**0.5, 3 * corner))
    # The cube's side is a third of what the memory holds: panels of A and B share the rest.


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grid(0, 1, 1), "axis m has size 0"),
        (lambda: Grid(1, 1, 1, "mk"), "'mk' is not an order"),
        (lambda: ProductPlan(0, 4, 4, Grid(1, 1, 1)), "m is 0, so that operands are empty"),
        (lambda: ProductPlan(4, 3, 4, Grid(1, 4, 1)), "k = 3 cannot have 4 parts"),
        (lambda: ProductPlan(4, 4, 4, Grid(1, 4, 1), "k", 2), "2 panels over k, of which a block has 1"),
        (lambda: choose_grid(4, 0, 4, 2), "a product of 4x0 and 0x4"),
        (lambda: choose_grid(4, 4, 4, 0), "a product on 0 ranks"),
        (lambda: named_grid("4d", 4), "there is no grid '4d'"),
    ],
)
def test_bad_input_is_named(make: object, words: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(words)):
        make()  # type: ignore[operator]


def drawn_plan(m: int, k: int, n: int, num_ranks: int, data: st.DataObject) -> ProductPlan:
    grid = data.draw(st.sampled_from(list(grids(m, k, n, num_ranks))))
    return ProductPlan(m, k, n, grid, data.draw(st.sampled_from(OVERS)))


def with_panels(plan: ProductPlan, panels: int) -> ProductPlan:
    return ProductPlan(plan.m, plan.k, plan.n, plan.grid, plan.over, panels)


def elements(plan: ProductPlan, operand: str, rank: int) -> list[tuple[int, int]]:
    rows, columns = part(plan, operand, rank)  # type: ignore[arg-type]
    return list(itertools.product(range(*rows), range(*columns)))
