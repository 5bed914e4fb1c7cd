"""Makes the plan of launched ranks if the planner may choose a consistency rule that joins replicas."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from meshwright.api.plans import Rules, capture, cost_of, plan
from meshwright.capture.opaque_capture import OpaqueChoice
from meshwright.capture.tracer import LossFunction
from meshwright.errors import LayoutError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Float8Scaling
from meshwright.ir.plan import Plan
from meshwright.ir.precision import Precision
from meshwright.runtime import launch
from meshwright.runtime.optimizer import OptimizerFactory
from meshwright.runtime.worlds import World

_FOUND, _FAILED = "+", "-"


def plan_before_start(wanted: Any, make: Callable[[], Plan]) -> Plan:
    """Let rank 0 make the plan, and return it on every launched rank. This happens before torch.distributed starts,
    because the plan decides which ranks form a process group.

    Raises:
        LayoutError: ``plan`` is not ``"auto"``, the launcher has started each replica separately, or the search on rank
            0 failed.
    """
    if wanted != "auto":
        raise LayoutError("a plan is given too", where="allow", remedy='allow rules only with plan="auto"')
    launched = launch.what_is_launched()
    if launched.meet:
        problem = "each replica was started as a job of its own, so that their number is known"
        raise LayoutError(problem, where="allow", remedy="start all ranks together, or give a Layout")
    if launched.size == 1:
        return make()
    store = launch.store_of_all()
    if launched.rank == 0:
        try:
            store.set("allowed", _FOUND + files.encode_json(plans := make()).decode())
        except MeshwrightError as error:
            store.set("allowed", _FAILED + str(error))
            raise
        return plans
    text = store.get("allowed").decode()
    if text.startswith(_FAILED):
        raise LayoutError(f"rank 0 has found no plan: {text[1:]}", where="allow", remedy="see the error there")
    return files.decode(text[1:].encode(), Plan, where="the plan of rank 0")


def search_allowed(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    allow: Sequence[str],
    *,
    optimizer: OptimizerFactory | None,
    clips: bool,
    precision: Precision | None,
    offload: bool,
    codec: str,
    float8: Float8Scaling,
    seconds: float | None,
    cluster: Cluster | str | None,
    rules: Rules | None,
    opaque: OpaqueChoice = "",
) -> Plan:
    """The plan of all launched ranks. It uses replicas under one of the rules in ``allow`` if that is faster."""

    def graph_of(count: int) -> Graph:
        part = World(num_replicas=count).part(batch)
        return capture(model, loss_fn, part, rules=rules, precision=precision, opaque=opaque)

    graph = graph_of(1)
    return plan(
        graph, cluster, devices=launch.what_is_launched().size, optimizer=cost_of(optimizer, graph), clips=clips,
        offload=offload, codec=codec, float8=float8, seconds=seconds, rules=rules, allow=allow, graph_of=graph_of,
    )  # fmt: skip
