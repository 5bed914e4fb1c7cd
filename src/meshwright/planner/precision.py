"""Whether a step can be computed in the precision that is asked for: as captured, and on the cluster's devices."""

from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.precision import Precision


def check_precision(asked: Precision | None, graph: Graph, cluster: Cluster | None) -> None:
    """That a layout asks for the precision that the step was captured in, or for none, and that the cluster has it.
    CPUs compute in any, some of them slowly.

    Raises:
        LayoutError: it is another one, or the devices lack it.
    """
    if asked is not None and asked != graph.precision:
        captured = graph.precision or "the model's own dtypes"
        raise LayoutError(
            f"precision={asked!r}, but the step was captured in {captured}",
            where="layout",
            remedy=f"capture it with precision={asked!r}: its casts are operators of the step",
        )
    if graph.precision is None or cluster is None or cluster.device.kind == "cpu":
        return
    known = [name for name in ("float32", "bfloat16", "float16") if name in cluster.device.peak_flops_per_s]
    if graph.precision not in known:
        raise LayoutError(
            f"precision={graph.precision!r}, which {cluster.device.name} does not compute in",
            where=f"layout on {cluster.name}",
            remedy=f"use {' or '.join(known)}",
        )
