"""Checks the GPUs of a run before its first step, and finds the change of a plan that makes room on a full GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from meshwright.api.machine import known_cluster
from meshwright.api.plans import Rules, cost_of
from meshwright.comm.groups import from_every_rank
from meshwright.comm.transport.base import first_line
from meshwright.errors import DeviceMemoryError, MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout
from meshwright.ir.plan import Plan
from meshwright.ir.units import size
from meshwright.lower.plans import PlanLowering
from meshwright.planner.compare import changes_that_fit
from meshwright.planner.foretell import foretell
from meshwright.runtime.device import processor, properties
from meshwright.runtime.device_check import check_alike, check_float8, check_float64
from meshwright.runtime.device_errors import lacks_memory, named_error
from meshwright.runtime.optimizer import OptimizerFactory


def check_gpus(
    device: torch.device, graph: Graph, layout: Layout, cluster: Cluster | str | None, num_ranks: int
) -> None:
    """Refuse GPUs that differ although the plan takes them for equal, a step in float64 that would crawl, and products
    in float8 on GPUs that have none. All ranks must call it.

    Raises:
        ClusterError: the GPUs differ. LaunchError: the step is in a dtype for which the GPU is not made.
    """
    if device.type != "cuda":
        return
    own = processor(device)
    check_float64(graph, own, properties(device).processors, num_ranks)
    check_float8(layout, own)
    known = known_cluster(cluster, device, num_ranks) if cluster is not None else None
    described = bool(layout.stage_sizes) or (known is not None and not known.homogeneous)
    check_alike(from_every_rank(str(own)), described=described)


@contextmanager
def making_trainer(device: torch.device) -> Iterator[None]:
    """Raise a DeviceMemoryError if parameters and their copies do not fit on the device, and name errors of CUDA and
    NCCL, as within a step."""
    where = f"{device}, before the first step"
    try:
        yield
    except MeshwrightError:
        raise
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            problem = f"the parameters do not fit ({first_line(error)})"
        elif asks := lacks_memory(str(error)):
            problem = f"beside the parameters there is no room for {asks}"
        elif (named := named_error(str(error), where)) is not None:
            raise named from error
        else:
            raise
        remedy = "use more ranks with tp, pp or zero=3, or plan='auto', which chooses a layout that fits"
        raise DeviceMemoryError(problem, where=where, remedy=remedy) from error


def smallest_change(
    graph: Graph, plan: Plan, cluster: Cluster | str | None, device: torch.device, optimizer: OptimizerFactory | None,
    clips: bool, rules: Rules | None, lacking_bytes: int,
) -> str:  # fmt: skip
    """The fastest of the single changes of a plan's layout with which a rank needs ``lacking_bytes`` less, as the user
    would write it. A text without a change if no single change is enough."""
    try:
        known, cost = known_cluster(cluster, device, plan.mesh.world_size), cost_of(optimizer, graph)
        now = foretell(PlanLowering(graph, rules), plan, known, optimizer=cost, clips=clips)
        lowering = partial(PlanLowering, rules=rules)
        limit = now.peak.peak_bytes - lacking_bytes
        if limit <= 0:
            return ""
        changes = changes_that_fit(
            graph, plan.layout, known, lowering, memory_bytes=limit, optimizer=cost, clips=clips
        )  # fmt: skip
    except MeshwrightError:  # of a plan that this cluster cannot cost: the error is then that of the full memory alone
        return ""
    if not changes:
        return f"no single change of the layout saves {size(lacking_bytes)}: use more ranks, or a smaller batch"
    best = changes[0]
    saved, slower = now.peak.peak_bytes - best.peak_bytes, best.step_s / now.played.step_s
    return f"{best.text} saves {size(saved)} (step time x{slower:.2f}, predicted)"
