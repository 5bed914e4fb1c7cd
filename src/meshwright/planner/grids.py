"""Choose the grids of tensor-parallel ranks that communicate least, for a model that is described by its sizes."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.cost.collective import Group, Network
from meshwright.cost.grid import linear_parts
from meshwright.cost.setup import DTYPES, Precision
from meshwright.cost.step import KnownCosts
from meshwright.ir.cluster import Cluster
from meshwright.ir.transformer import Transformer
from meshwright.planner.candidates import divisors

MOST_GRIDS = 16
"""The number of grids for which a search estimates all setups. These are the grids whose ranks wait least for
communication."""
ELEMENT_BYTES = 2
STATE_BYTES = 16
"""Bytes per parameter that a rank holds in any case: the parameter, its gradient, a float32 copy, and Adam's two
moments."""
SEQUENCES = 32
"""The largest number of sequences in a micro-batch when grids are compared."""


class RankGrid(NamedTuple):
    """Ranks that split input features (``x``), output features (``y``) and depth (``z``), in ``dp`` copies."""

    x: int
    y: int
    z: int
    dp: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of the grid without dp."""
        return self.x, self.y, self.z


def promising_grids(
    model: Transformer, cluster: Cluster, global_batch: int, known: KnownCosts, precision: Precision, *, every: bool
) -> list[RankGrid]:
    """The ``MOST_GRIDS`` grids over all devices of ``cluster`` whose layers wait least for communication. ``every``:
    include grids that a search also reaches in another form: tp in a box, with ZeRO over all or none of the dp ranks.

    As in AxoNN, only the collectives of products count. Collectives over the depth overlap with products of other
    layers, for the fraction of time in which the software overlaps communication."""
    if model.experts:
        return []
    box, peak = cluster.box_size, known.rates.peak("matmul", DTYPES[precision])
    limit, states = cluster.device.memory_bytes, STATE_BYTES * model.parameters
    candidates = [
        grid
        for grid in _grids(model, cluster.num_devices, global_batch)
        if states <= limit * grid.x * grid.y * grid.z
        and (every or grid.x > 1 or grid.y > box or grid.z not in (1, grid.z * grid.dp))
    ]

    def key(grid: RankGrid) -> float:
        return waiting_s(model, cluster, known.network, grid, global_batch, peak)

    return sorted(candidates, key=key)[:MOST_GRIDS]


def _grids(model: Transformer, devices: int, global_batch: int) -> Iterator[RankGrid]:
    for x in divisors(math.gcd(model.hidden, devices)):
        for y in divisors(math.gcd(math.gcd(model.heads, model.ffn), devices // x)):
            data = devices // (x * y)
            if devices % (x * y) == 0 and global_batch % data == 0:
                yield from (RankGrid(x, y, z, data // z) for z in divisors(data) if x * y * z > 1)


def waiting_s(
    model: Transformer, cluster: Cluster, network: Network, grid: RankGrid, global_batch: int, peak: float
) -> float:
    """The seconds of a step in which a rank waits for the collectives of its products (``cost/grid.py``). ``peak``: the
    FLOP/s of a device in products."""
    x, y, z, dp = grid
    samples = global_batch // (z * dp)
    sequences = max(size for size in divisors(samples) if size <= SEQUENCES)
    tokens, microbatches = sequences * model.sequence * z * dp, samples // sequences
    over_x, over_y, sums_s = Group(x), Group(y, x), 0.0
    for inputs, outputs, is_second in products_of(model):
        sizes, groups = ((y, x, z), (over_y, over_x)) if is_second else ((x, y, z), (over_x, over_y))
        parts = linear_parts(tokens, inputs, outputs, sizes, dp)
        for elements, group in zip((parts.output, parts.input), groups, strict=True):
            sums_s += network.collective_s("all_reduce", ELEMENT_BYTES * elements, group)
    weights = ELEMENT_BYTES * model.parameters / model.layers
    depth, replicas = Group(z, x * y), Group(dp, x * y * z)
    depth_s = 3 * network.collective_s("all_gather", weights / (x * y), depth)
    flops_per_s = cluster.num_devices * peak
    computed_s = model.step_flops(global_batch) / flops_per_s / model.layers / microbatches
    hidden = cluster.software.hidden
    exposed_s = max((1 - hidden) * depth_s, depth_s - hidden * computed_s)
    once_s = network.collective_s("all_reduce", weights / (x * y * z), replicas)
    return model.layers * (microbatches * (sums_s + exposed_s) + once_s)


def products_of(model: Transformer) -> Iterator[tuple[int, int, bool]]:
    """The products of a layer with its weights: input features, output features, and whether the product is the second
    of a pair, for which the grid is transposed."""
    yield model.hidden, model.query_width + 2 * model.key_width, False
    yield model.query_width, model.hidden, True
    yield model.hidden, (model.mlp_matrices - 1) * model.ffn, False
    yield model.ffn, model.hidden, True
