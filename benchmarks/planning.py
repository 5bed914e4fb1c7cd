"""How long planning takes: Llama-3-8B's whole training step, captured on the meta device, over 64 and 512 devices.

Run as ``python -m benchmarks.planning`` (a part of ``make bench-planning``). ``capture`` is ``mw.capture``; ``solve``
is the program alone, from its decisions and prices to the strategies; ``all`` is both and all between, to strategies of
all operators and storage of all parameters. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import meshwright as mw
from benchmarks import report
from benchmarks.report import at_most, new_run
from benchmarks.search import SEQUENCE, llama
from meshwright.cost.program import step_work
from meshwright.ir.graph import Graph
from meshwright.ir.mesh import Mesh
from meshwright.ir.result import Comparison, Duration, Finding, Series, Settings
from meshwright.ir.statistics import median, ratio
from meshwright.lower.plans import PlanLowering
from meshwright.planner.intra_op.assign import assign
from meshwright.planner.intra_op.problem import Problem
from meshwright.planner.intra_op.solve import solve

COMMAND = "python -m benchmarks.planning"
ROUNDS = 5
LAYERS = 32
BATCH = 64
CLUSTER = "h100-dgx-ndr400x8"
MESHES = {"8x8": Mesh.of(dp=8, tp=8), "8x8x8": Mesh.of(dp=8, cp=8, tp=8)}
CAPTURE_A_LAYER_S, SOLVE_S, ALL_S, ALL_THREE_AXES_S, LOWER_S, GROWTH = 0.2, 3.0, 10.0, 30.0, 2.0, 1.2


def captured(layers: int) -> Graph:
    """A training step of Llama-3-8B with so many layers: sizes of the published configuration, random weights."""
    return llama(layers, 4096, 14336, 32, BATCH)


def timed(run: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each of several runs."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def judged(target: str, seconds: Sequence[float], limit_s: float, settings: str, gap: float | None = None) -> Duration:
    """The median against a limit."""
    estimate = median(seconds)
    proven = "" if gap is None else f"; proven within {gap:.2%} of the best"
    return Duration(
        target=target,
        verdict=at_most(estimate, limit_s),
        measured=f"{estimate.value:.2f} s (95 %: {estimate.low:.2f} to {estimate.high:.2f}){proven}",
        series=Series.of(list(seconds), steps=1, settings=settings, run=new_run()),
        limit_s=limit_s,
    )


def plans(graph: Graph, captures: Sequence[float], rounds: int) -> Iterator[Finding]:
    """The targets of 32 layers on both meshes."""
    for name, mesh in MESHES.items():
        cluster = mw.Cluster.load(CLUSTER, mesh.world_size)
        assigned = assign(graph, mesh, cluster, PlanLowering(graph))
        problem, gap = assigned.formulated.problem, assigned.solution.gap
        if name == "8x8":
            seconds = timed(lambda problem=problem: solve(problem), rounds)  # type: ignore[misc]
            yield judged(f"{LAYERS} layers on {name}: solve within {SOLVE_S:g} s", seconds, SOLVE_S, name, gap)
        planning = timed(lambda mesh=mesh, cluster=cluster: assign(graph, mesh, cluster, PlanLowering(graph)), rounds)  # type: ignore[misc]
        both = [capture_s + plan_s for capture_s, plan_s in zip(captures, planning, strict=True)]
        limit = ALL_S if name == "8x8" else ALL_THREE_AXES_S
        yield judged(f"{LAYERS} layers on {name}: all within {limit:g} s", both, limit, name, gap)


def lowering(graph: Graph, rounds: int) -> Duration:
    """The program of a plan over 64 devices, and the work of its step."""
    cluster = mw.Cluster.load(CLUSTER, 64)
    plan = mw.plan(graph, cluster, layout=mw.Layout(dp=8, tp=8))
    seconds = timed(lambda: step_work(PlanLowering(graph)(plan), plan, cluster), rounds)
    return judged(f"{LAYERS} layers on 8x8: lower and price within {LOWER_S:g} s", seconds, LOWER_S, "8x8")


def problem_of(graph: Graph, mesh: Mesh, cluster: mw.Cluster) -> Problem:
    """What the strategies of a graph are chosen from."""
    return assign(graph, mesh, cluster, PlanLowering(graph)).formulated.problem


def growth(rounds: int, layers: Sequence[int]) -> Comparison:
    """The solve of many layers beside that of few, by turns."""
    mesh, cluster, run = MESHES["8x8"], mw.Cluster.load(CLUSTER, 64), new_run()
    problems = {count: problem_of(captured(count), mesh, cluster) for count in layers}
    seconds: dict[int, list[float]] = {count: [] for count in layers}
    for _ in range(rounds):
        for count, problem in problems.items():
            seconds[count] += timed(lambda problem=problem: solve(problem), 1)  # type: ignore[misc]
    few, many = (median(seconds[count]).value for count in layers)
    factor = ratio(seconds[layers[1]], seconds[layers[0]])
    series = {
        f"{count} layers": Series.of(solves, steps=1, settings="8x8", run=run) for count, solves in seconds.items()
    }
    return Comparison(
        target=f"the solve grows at most {GROWTH}x from {layers[0]} to {layers[1]} layers",
        verdict=at_most(factor, GROWTH),
        measured=f"{factor}: {few:.3f} s and {many:.3f} s",
        series=series,
        ours=f"{layers[1]} layers",
        baseline=f"{layers[0]} layers",
        ratio=factor.value,
        interval=factor.interval,
        limit=GROWTH,
    )


def findings(rounds: int = ROUNDS) -> Iterator[Finding]:
    """Every target, as it is found."""
    captured(1)  # what is imported and compiled at first use
    captures = timed(lambda: captured(LAYERS), rounds)
    each = [seconds / LAYERS for seconds in captures]
    yield judged(f"capture within {CAPTURE_A_LAYER_S:g} s a layer", each, CAPTURE_A_LAYER_S, "capture")
    graph = captured(LAYERS)
    yield from plans(graph, captures, rounds)
    yield lowering(graph, 4 * rounds)  # more rounds, for a narrower interval
    yield growth(rounds, (8, 128))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every target, and write them."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"repetitions (default {ROUNDS}; fewer: no file)")
    rounds: int = parser.parse_args(arguments).rounds
    results = []
    for finding in findings(rounds):
        report.show(finding)
        results.append(finding)
    if rounds >= ROUNDS:
        sizes: dict[str, str | int | float | bool] = {"model": "Llama-3-8B", "batch": BATCH, "sequence": SEQUENCE}
        settings = {
            name: Settings(dtype="bfloat16", ranks=1, threads=1, sizes=sizes | {"devices planned for": devices})
            for name, devices in (("capture", 1), ("8x8", 64), ("8x8x8", 512))
        }
        text = "Nothing is computed: tensors are on the meta device, and planning takes one core."
        timed_text = "capture, the solve, capture and planning together, or lowering and pricing, as each target says"
        report.write("planning", "Planning Llama-3-8B", COMMAND, timed_text, settings, results, text)
        print("written to benchmarks/results/planning.md and .json")
    return int(any(finding.verdict == "fail" for finding in results))


if __name__ == "__main__":
    sys.exit(main())
