"""Products of matrices on grids of ranks. The plan of a product is chosen for this machine or for a cluster."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright.api.machine import known_cluster
from meshwright.comm.groups import from_rank_0
from meshwright.cost.collective import Network
from meshwright.cost.kernels import Rates
from meshwright.cost.product import LocalProducts
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.kernel import Product
from meshwright.planner.products import plan_product
from meshwright.runtime import launch
from meshwright.runtime.products import DTYPES, GridProduct
from meshwright.schedules.products.choose import named_grid
from meshwright.schedules.products.grid import Grid, ProductPlan


def grid_product(
    m: int,
    k: int,
    n: int,
    *,
    grid: Sequence[int] | str | None = None,
    dtype: torch.dtype = torch.float32,
    memory_bytes: float | None = None,
    gradients: bool = True,
    cluster: Cluster | str | None = None,
) -> GridProduct:
    """Prepare the product of an m x k by a k x n matrix on all ranks of the world. Every rank must call this function.
    Use the result's ``shard`` to make the operands of ``matmul``.

    Args:
        grid: the numbers of parts (p_m, p_k, p_n), whose product must be the number of ranks; or a name (``1d-row``,
            ``1d-column``, ``1d-inner``, ``summa``, ``2.5d``, ``3d``). None takes the grid with the least predicted
            time, which may leave ranks idle.
        memory_bytes: the most memory that a rank may use for operands and buffers.
        gradients: whether the gradients of A and B count too, in time and memory.
        cluster: a name or a description; default: this machine, as it was calibrated.

    Raises:
        LayoutError: an operand is empty, a grid does not fit the ranks or sizes, a dtype has no kernel, or no plan fits
            in the memory (the error names the smallest sufficient memory).
    """
    if dtype not in DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
        raise LayoutError(f"{dtype} has no kernel", where="dtype", remedy=f"give one of {names}")
    launch.start("cpu")
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    only: tuple[Grid, ...] = ()
    if grid is not None:
        if not isinstance(grid, str) and len(grid) != 3:
            raise LayoutError(f"grid {tuple(grid)}", where="grid", remedy="give three sizes: the parts of m, k and n")
        given = named_grid(grid, num_ranks) if isinstance(grid, str) else Grid(grid[0], grid[1], grid[2])
        if given.num_ranks != num_ranks:
            raise LayoutError(
                f"grid {given} has {given.num_ranks} ranks, and there are {num_ranks}",
                where="grid",
                remedy=f"give sizes whose product is {num_ranks}",
            )
        ProductPlan(m, k, n, given)  # refuses operands that are empty or have fewer units than parts
        only = (given,)
    item_bytes = dtype.itemsize

    def fastest_plan() -> ProductPlan:
        known = known_cluster(cluster, torch.device("cpu"), num_ranks)
        return plan_product(
            m, k, n, num_ranks, Network(known), multiplies(known, num_ranks, dtype), item_bytes=item_bytes,
            memory_words=None if memory_bytes is None else memory_bytes // item_bytes, gradients=gradients, only=only,
        )  # fmt: skip

    return GridProduct(from_rank_0(fastest_plan))


def multiplies(cluster: Cluster, num_ranks: int, dtype: torch.dtype) -> LocalProducts:
    """The speed of local products on the cluster's device, while some ranks of a box compute."""
    box, name = cluster.box_size, str(dtype).removeprefix("torch.")
    rates = [Rates(cluster.device.under(ranks=count + 1), cluster.software) for count in range(min(num_ranks, box))]

    def seconds(m: int, k: int, n: int, active: int) -> float:
        num_bytes = (m * k + k * n + m * n) * dtype.itemsize
        own = rates[min(active, len(rates)) - 1]
        return own.seconds("matmul", name, 2.0 * m * k * n, num_bytes, Product(m, n, k))

    return LocalProducts(seconds)
