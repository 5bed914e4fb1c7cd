"""The bytes of a run's copies of the state, before anything is allocated (docs/decisions/0062, 0066).

    state of a part     its parameters and buffers, and what the optimizer keeps for them
    kept in memory      SLOTS x the state, on each of at most HOSTS hosts
    staged for saves    the state once

Of ranks that hold an equal part, one copies it. So the sums over all ranks do not depend on the layout of a stage.
Residuals of codecs do not count.
"""

from collections.abc import Mapping

from meshwright.cost.optimizer import OptimizerCost
from meshwright.ir.copies import HOSTS, SLOTS, StateCopies
from meshwright.ir.graph import Graph
from meshwright.ir.plan import Plan
from meshwright.ir.stages import cut


def state_bytes(graph: Graph, optimizer: OptimizerCost) -> Mapping[str, int]:
    """Maps each parameter and buffer to the bytes of its state."""
    trained = {gradient.parameter for gradient in graph.gradients if gradient.gradient is not None}
    return {
        name: graph.tensors[name].num_bytes * (1 + optimizer.states * (name in trained))
        for name in (*graph.parameters, *graph.buffers)
    }


def copies_of(graph: Graph, plan: Plan, optimizer: OptimizerCost, num_hosts: int = 1) -> tuple[StateCopies, ...]:
    """The copies of a rank of each pipeline stage, whose ranks have equal shares. A tensor of several stages counts on
    the first of them."""
    owners = cut(graph, plan.firsts).pipeline_owners(plan.pipeline)
    shares = [0] * plan.mesh.num_stages
    for name, num_bytes in state_bytes(graph, optimizer).items():
        shares[owners[name][0]] += num_bytes
    return tuple(
        _copies(num_bytes / len(plan.mesh.stage_ranks(stage)), plan.mesh.world_size, num_hosts)
        for stage, num_bytes in enumerate(shares)
    )


def mean_copies(graph: Graph, optimizer: OptimizerCost, num_ranks: int, num_hosts: int = 1) -> StateCopies:
    """The copies of a rank, as a mean over ``num_ranks`` ranks under any layout."""
    return _copies(sum(state_bytes(graph, optimizer).values()) / num_ranks, num_ranks, num_hosts)


def _copies(share: float, num_ranks: int, num_hosts: int) -> StateCopies:
    """The copies of a rank's share of the state. A rank that runs alone has no launcher to keep copies."""
    kept = SLOTS * min(HOSTS, num_hosts) * share if num_ranks > 1 else 0.0
    return StateCopies(kept_bytes=round(kept), staged_bytes=round(share))
