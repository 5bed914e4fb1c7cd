"""Measures the times of convolution algorithms on this machine, and keeps them in the table that plans read."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from meshwright.api.planned_runs import captured, cluster_of, layout_of
from meshwright.api.times import load_times, times_file
from meshwright.errors import ClusterError, LaunchError
from meshwright.ir import files
from meshwright.ir.algorithm_times import AlgorithmTimes
from meshwright.ir.kernel import ConvolutionSizes
from meshwright.ir.program import Program
from meshwright.ir.run import Run
from meshwright.lower.plans import PlanLowering
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.runtime import algorithm_times
from meshwright.schedules.replicas import of_replica


def measure_convolutions(
    run: Run,
    ranks: int = 0,
    advance: Callable[[str], None] = lambda what: None,
    *,
    threads: int = 1,
    path: str | os.PathLike[str] | None = None,
) -> AlgorithmTimes:
    """Measure the algorithms of all convolutions of a run, at the sizes that a rank computes under the run's layout.
    Return these times, and add them to the table at ``path`` (default: this user's cache, where plans look for it).

    Raises:
        ClusterError: the table was measured on another machine, or with another number of threads.
        LaunchError: the table cannot be written.
    """
    target = Path(path) if path is not None else times_file(threads)
    known = load_times(target) if target.exists() else None
    if known is not None and known.threads != threads:
        raise ClusterError(
            f"it was measured with {known.threads} threads, not {threads}", where=str(target),
            remedy="choose another path: tables are of one number of threads",
        )  # fmt: skip
    graph, _, world_size = captured(run, ranks)
    layout, world_size = of_replica(layout_of(run), world_size)
    layout = msgspec.structs.replace(layout, workspace_bytes=0, workspace_over="operator")
    cluster, lower = cluster_of(run, torch.device("cpu"), world_size), PlanLowering(graph)
    made = plan_layout(graph, layout, world_size=world_size, cluster=cluster, ask=Ask(lower=lower, explains=False))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = algorithm_times.measure(convolutions_of(lower(made)), advance)
    finally:
        torch.set_num_threads(before)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.save(known.joined(found) if known is not None else found, target)
    except OSError as error:
        raise LaunchError(
            f"the table cannot be written: {error.strerror}", where=str(target), remedy="choose another path"
        ) from None
    return found


def convolutions_of(programs: tuple[Program, ...]) -> list[ConvolutionSizes]:
    """The different sizes of all convolutions that programs run with PyTorch's own algorithm."""
    kernels = (
        kernel for program in programs for phase in program.phases for node in phase.nodes for kernel in node.kernels
    )
    return list(dict.fromkeys(kernel.convolution for kernel in kernels if kernel.convolution is not None))
