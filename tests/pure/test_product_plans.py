"""Plans of products by predicted time: the least over all plans, idle ranks where they are cheaper, memory, overlap."""

import itertools
import re

import msgspec
import pytest

from meshwright.catalog import load_cluster
from meshwright.cost.collective import Group, Network
from meshwright.cost.product import LocalProducts, hides, product_s
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.level import Level
from meshwright.planner.products import ORDERS, PANELS, plan_product
from meshwright.schedules.products.choose import OVERS, grids
from meshwright.schedules.products.grid import Grid, ProductPlan
from meshwright.schedules.products.memory import peak_words

FAST = LocalProducts(lambda m, k, n, ranks: 2 * m * k * n / 50e9)


def boxes(alpha_s: float = 1e-5, gbit: float = 1.0) -> Network:
    """Two boxes of two cores, joined by links of some Gbit/s."""
    levels = (
        Level(name="box", fan_out=2, alpha_s=alpha_s, beta_s_per_byte=2e-10),
        Level(name="network", fan_out=2, alpha_s=2 * alpha_s, beta_s_per_byte=8e-9 / gbit),
    )
    return Network(msgspec.structs.replace(load_cluster("cpu-local"), num_devices=4, levels=levels, open_ended=False))


@pytest.mark.parametrize("sizes", [(256, 256, 256), (64, 4096, 64), (1024, 16, 1024), (4096, 64, 64), (17, 301, 23)])
@pytest.mark.parametrize("gradients", [False, True])
def test_plan_is_the_fastest_of_all(sizes: tuple[int, int, int], gradients: bool) -> None:
    network = boxes()
    chosen = plan_product(*sizes, 4, network, FAST, gradients=gradients)
    times = []
    for grid, order, over, panels in itertools.product(grids(*sizes, 4), ORDERS, OVERS, PANELS):
        plan = ProductPlan(*sizes, Grid(grid.m, grid.k, grid.n, order), over)
        if panels <= plan.largest(over):
            for algorithms in (chosen.algorithms, {}):
                plan = msgspec.structs.replace(plan, panels=panels, algorithms=algorithms)
                times.append(product_s(plan, network, FAST, 4, gradients=gradients))
    assert product_s(chosen, network, FAST, 4, gradients=gradients) <= min(times) * (1 + 1e-12)


def test_ranks_stay_idle_where_their_messages_cost_more_than_their_work() -> None:
    assert plan_product(64, 64, 64, 4, boxes(alpha_s=1e-3), FAST).grid.num_ranks == 1
    assert plan_product(2048, 2048, 2048, 4, boxes(), FAST).grid.num_ranks == 4


def test_a_long_inner_dim_is_divided_and_boxes_are_crossed_once() -> None:
    """Only C, which is small, is exchanged; a square product crosses the boxes along one axis."""
    assert plan_product(64, 65536, 64, 4, boxes(), FAST).grid.k == 4
    plan = plan_product(1024, 1024, 1024, 4, boxes(), FAST)
    crossing = [axis for axis, size in plan.grid.sizes.items() if size > 1 and plan.grid.stride(axis) == 2]
    assert len(crossing) == 1


def test_a_product_hides_messages_of_one_round_that_cross_boxes() -> None:
    network = boxes()
    assert hides(network, Group(2, 2), "star")
    assert not hides(network, Group(2, 1), "star"), "cores copy"
    assert not hides(network, Group(4, 1), "ring"), "later rounds wait"
    plan = ProductPlan(1024, 1024, 1024, Grid(2, 1, 2))
    local = LocalProducts(lambda m, k, n, ranks: 1e-5 * k)
    whole, panels = (product_s(msgspec.structs.replace(plan, panels=count), network, local, 4) for count in (1, 8))
    assert panels < whole
    shown = product_s(msgspec.structs.replace(plan, panels=8), network, local._replace(overlap=0.0), 4)
    assert shown > whole, "nothing is hidden, and messages are more"


def test_rounds_cost_time() -> None:
    plan = ProductPlan(256, 256, 256, Grid(2, 1, 2), "k", 8)
    slower = FAST._replace(round_s=1e-3)
    later = product_s(plan, boxes(), slower, 4) - product_s(plan, boxes(), FAST, 4)
    assert later == pytest.approx(7e-3)


def test_memory_is_kept_and_the_smallest_is_named() -> None:
    full = plan_product(512, 512, 512, 4, boxes(), FAST)
    limit = 0.7 * peak_words(full)
    plan = plan_product(512, 512, 512, 4, boxes(), FAST, memory_words=limit)
    assert peak_words(plan) <= limit
    with pytest.raises(LayoutError, match="hold no plan of the product 512x512x512") as caught:
        plan_product(512, 512, 512, 4, boxes(), FAST, memory_words=1000)
    smallest = re.search(r"the smallest that fits is ([\d,]+) bytes", caught.value.remedy)
    assert smallest is not None
    words = int(smallest[1].replace(",", "")) // 4
    assert peak_words(plan_product(512, 512, 512, 4, boxes(), FAST, memory_words=words)) <= words
    with pytest.raises(LayoutError):
        plan_product(512, 512, 512, 4, boxes(), FAST, memory_words=words - 1)


def test_only_some_grids() -> None:
    assert plan_product(64, 64, 64, 4, boxes(), FAST, only=(Grid(4, 1, 1),)).grid.m == 4


def test_cluster_of_one_device() -> None:
    cluster: Cluster = msgspec.structs.replace(load_cluster("cpu-local"), num_devices=1, levels=())
    plan = plan_product(64, 64, 64, 1, Network(cluster), FAST)
    assert product_s(plan, Network(cluster), FAST, 4) == pytest.approx(FAST.multiply_s(64, 64, 64, 1))


def test_a_grid_that_leaves_ranks_idle_has_their_cores() -> None:
    """If four ranks share two cores, two ranks multiply twice as fast as four."""
    shared = LocalProducts(lambda m, k, n, ranks: 2 * m * k * n / 50e9 * max(1.0, ranks / 2))
    for grid, alone in ((Grid(2, 1, 1), 256**3 / 50e9), (Grid(2, 1, 2), 256**3 / 50e9)):
        plan = ProductPlan(256, 256, 256, grid)
        moved = product_s(plan, boxes(), LocalProducts(lambda m, k, n, ranks: 0.0), 4)
        assert product_s(plan, boxes(), shared, 4) - moved == pytest.approx(alone)
