"""Grids of tensor-parallel ranks for a model that is described by its sizes: those that communicate least."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.cost.collective import Group, Network
from meshwright.ir.cluster import Cluster
from meshwright.ir.transformer import Transformer
from meshwright.planner.candidates import divisors

MOST_GRIDS = 16
"""Number of grids of which a search estimates all setups. They are those with the least exposed communication."""
ELEMENT_BYTES = 2
STATE_BYTES = 16
"""Bytes of a parameter that a rank holds in any case: with its gradient, a float32 copy and Adam's two moments."""
SEQUENCES = 32
"""Largest number of sequences of a micro-batch with which grids are compared."""


class RankGrid(NamedTuple):
    """Ranks that split input features (``x``), output features (``y``) and depth (``z``), and ``dp`` copies."""

    x: int
    y: int
    z: int
    dp: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of the grid without dp."""
        return self.x, self.y, self.z


def promising_grids(model: Transformer, cluster: Cluster, global_batch: int, *, every: bool) -> list[RankGrid]:
    """The ``MOST_GRIDS`` grids of all devices of ``cluster`` whose layers wait least for communication. ``every``: also
    grids that a search knows by other names, tp in a box with ZeRO over all or none of the dp ranks.

    As in AxoNN, only the collectives of products decide. Those of the depth overlap products of other layers, in the
    fraction of the time in which the software overlaps communication."""
    if model.experts:
        return []
    network, box = Network(cluster), cluster.levels[0].fan_out if cluster.levels else 1
    limit, states = cluster.device.memory_bytes, STATE_BYTES * model.parameters
    found = [
        grid
        for grid in _grids(model, cluster.num_devices, global_batch)
        if states <= limit * grid.x * grid.y * grid.z
        and (every or grid.x > 1 or grid.y > box or grid.z not in (1, grid.z * grid.dp))
    ]
    return sorted(found, key=lambda grid: waiting_s(model, cluster, network, grid, global_batch))[:MOST_GRIDS]


def _grids(model: Transformer, devices: int, global_batch: int) -> Iterator[RankGrid]:
    for x in divisors(math.gcd(model.hidden, devices)):
        for y in divisors(math.gcd(math.gcd(model.heads, model.ffn), devices // x)):
            data = devices // (x * y)
            if devices % (x * y) == 0 and global_batch % data == 0:
                yield from (RankGrid(x, y, z, data // z) for z in divisors(data) if x * y * z > 1)


def waiting_s(model: Transformer, cluster: Cluster, network: Network, grid: RankGrid, global_batch: int) -> float:
    """Seconds of a step in which a rank waits for the collectives of its products (see ``cost.grid``)."""
    x, y, z, dp = grid
    samples = global_batch // (z * dp)
    sequences = max(size for size in divisors(samples) if size <= SEQUENCES)
    tokens, microbatches = sequences * model.sequence * ELEMENT_BYTES, samples // sequences
    inner = 2 * (model.query_width + model.key_width + model.mlp_matrices * model.ffn / 2)
    rows = network.collective_s("all_reduce", tokens * inner / 4 / y, Group(x))
    columns = network.collective_s("all_reduce", tokens * model.hidden / x, Group(y, x))
    weights = ELEMENT_BYTES * model.parameters / model.layers
    depth, replicas = Group(z, x * y), Group(dp, x * y * z)
    depth_s = 3 * network.collective_s("all_gather", weights / (x * y), depth)
    flops_per_s = cluster.num_devices * cluster.device.peak("bfloat16")
    computed_s = model.step_flops(global_batch) / flops_per_s / model.layers / microbatches
    hidden = cluster.software.hidden
    exposed_s = max((1 - hidden) * depth_s, depth_s - hidden * computed_s)
    once_s = network.collective_s("all_reduce", weights / (x * y * z), replicas)
    return model.layers * (microbatches * (4 * (rows + columns) + exposed_s) + once_s)
