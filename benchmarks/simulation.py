"""How long simulating takes: 1,024 ranks x 64 micro-batches in several layouts. `python -m benchmarks.simulation`."""

import sys
import time

from benchmarks.report import alone, at_most, new_run
from meshwright.catalog import load_cluster
from meshwright.cost.work import Communicate, Compute, Piece, StageWork, StepWork, Wait
from meshwright.ir.mesh import Mesh
from meshwright.ir.result import Duration, Finding, Series
from meshwright.ir.statistics import median
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build
from meshwright.simulate.engine import play

TARGET_S = 2.0
MICROBATCHES = 64
SETTINGS = "1,024 simulated ranks"
LAYOUTS = ((1, 64, 16, "none", 1), (8, 16, 8, "1f1b", 1), (16, 8, 8, "1f1b", 1), (16, 8, 8, "gpipe", 1),
           (16, 8, 8, "zb-h1", 1), (16, 8, 8, "interleaved", 4), (64, 4, 4, "1f1b", 1))  # fmt: skip


def example_work(num_stages: int) -> StepWork:
    """Stages of a transformer in tensor parallel: two all-reduces in a forward, two in a backward."""

    def layer(seconds: float) -> tuple[Piece, ...]:
        first, second = (Communicate(name, "all_reduce", "tp", 2**25) for name in ("attention", "mlp"))
        return Compute("attention", seconds), first, Compute("mlp", seconds), second

    pieces = {"F": layer(1e-3), "B": layer(2e-3), "I": layer(1e-3), "W": (Compute("weights", 2e-3),)}
    pieces["REDUCE_GRAD"] = (Communicate("gradients", "all_reduce", "dp", 2**28, blocking=False),)
    stage = StageWork(
        pieces=pieces,
        after=(Wait("gradients"), Communicate("norm", "all_reduce", "pp", 8), Compute("optimizer", 1e-3)),
        sent_up_bytes=2**24,
        sent_down_bytes=2**24,
        saved_bytes=2**28,
        held_bytes=2**33,
        workspace_bytes=2**28,
    )
    return StepWork((stage,) * num_stages)


def findings() -> list[Finding]:
    """For each layout, seconds without the spans of all ranks; with them, as a note."""
    cluster, run = load_cluster("a100-80gb-dgx-hdr200x8", 1024), new_run()
    results: list[Finding] = []
    for pp, dp, tp, name, chunks in LAYOUTS:
        schedule = add_reduction(add_communication(build(name, pp, MICROBATCHES, chunks)))
        work, mesh = example_work(pp * chunks), Mesh.of(pp=pp, dp=dp, tp=tp)
        seconds, spans = [], 0
        for _ in range(5):
            start = time.perf_counter()
            played = play(schedule, work, mesh, cluster)
            seconds.append(time.perf_counter() - start)
            spans = len(played.trace().spans)
        series = Series.of(seconds, settings=SETTINGS, run=run)
        results.append(
            Duration(
                target=f"simulate pp{pp} x dp{dp} x tp{tp}, {name}, {MICROBATCHES} micro-batches: under {TARGET_S:g} s",
                verdict=at_most(median(seconds), TARGET_S),
                measured=f"{series.value_s:.2f} s (up to {max(seconds):.2f} s); all ranks have {spans:,} spans",
                series=series,
                limit_s=TARGET_S,
            )
        )
    return results


if __name__ == "__main__":
    sys.exit(alone(findings()))
