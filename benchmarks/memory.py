"""Does the predicted peak of memory meet the measured one? Models of a gibibyte and more, on two ranks.

Run with ``make bench-prediction``, or as ``python -m benchmarks.memory``. Measured is the larger rank's peak over two
steps (VmHWM, reset before) minus what was resident before the first. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import meshwright as mw
from benchmarks import report
from benchmarks.prediction import Case, Model, cases_of, samples, text, trainer_of
from benchmarks.report import show
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.program import stage_held, step_work
from meshwright.ir.cluster import Cluster
from meshwright.ir.result import Check, Finding
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, MLP, GPTConfig, ResNet, classification_loss, language_model_loss
from meshwright.schedules.pipeline import schedule_of
from tests.distributed.pool import Ranks

COMMAND = "python -m benchmarks.memory"
ERROR = 0.20
MIB = 2**20
LARGE = GPTConfig(layers=4, width=512, heads=8, vocabulary=2048, sequence_length=512)
MODELS: Mapping[str, Model] = {
    "large GPT": Model(lambda: GPT(LARGE), language_model_loss, lambda: text(32, 512, 2048)),
    "large GPT, 160 sequences": Model(lambda: GPT(LARGE), language_model_loss, lambda: text(160, 512, 2048)),
    "large ResNet": Model(
        lambda: ResNet(depth=14, width=64), classification_loss, lambda: samples("image", 512, 3, 32, 32)
    ),
    "large MLP": Model(
        lambda: MLP((1024, *[4096] * 6, 10)), classification_loss, lambda: samples("inputs", 32768, 1024)
    ),
}
CASES = [
    *cases_of(
        "large GPT",
        dp={"dp": 2},
        gpipe={"pp": 2, "microbatches": 16, "schedule": "gpipe"},
        tp={"tp": 2},
    ),
    *cases_of(
        "large GPT, 160 sequences",
        one_f_one_b={"pp": 2, "microbatches": 8},
        recompute={"dp": 2, "microbatches": 2, "recompute": "full"},
    ),
    *cases_of("large ResNet", dp={"dp": 2}, gpipe={"pp": 2, "microbatches": 4, "schedule": "gpipe"}),
    *cases_of("large MLP", dp={"dp": 2}, one_f_one_b={"pp": 2, "microbatches": 4}),
]


def peak_bytes(case: Case) -> int:
    """What two steps need at their peak beyond what is there before the first: VmHWM minus resident memory."""
    trainer, batch = trainer_of(case, MODELS[case.model])
    gc.collect()
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        trainer.step(batch)
    return status_bytes("VmHWM") - before


def status_bytes(key: str) -> int:
    """A line of this process's status: ``VmRSS`` is resident now, ``VmHWM`` was at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def predicted_peaks(case: Case, cluster: Cluster) -> list[int]:
    """By pipeline rank, the peak beyond what is there before the first step: parameters, buffers, inputs."""
    model = MODELS[case.model]
    graph = mw.capture(model.make(), model.loss, model.batch())
    plan = mw.plan(graph, cluster, layout=case.layout)
    programs = PlanLowering(graph)(plan)
    work = step_work(programs, plan, cluster, optimizer=model.states)
    found = []
    for rank, one in enumerate(peak_memory(work, schedule_of(plan))):
        mine = plan.pipeline.stages_of(rank)
        held = [stage_held(programs, plan, stage, cluster, model.states) for stage in mine]
        found.append(
            one.peak_bytes - sum(one.parameters_bytes + one.buffers_bytes for one in held) - held[0].inputs_bytes
        )
    return found


def memory(cluster: Cluster, only: str) -> list[Finding]:
    """Predicted beside measured peaks, of the rank that needs most."""
    results: list[Finding] = []
    for case in (one for one in CASES if only in str(one)):
        with Ranks() as ranks:  # fresh processes: memory is not given back
            measured = max(ranks(case.num_ranks, peak_bytes, case, timeout=1800.0))
        predicted = max(predicted_peaks(case, cluster))
        error = predicted / measured - 1
        passed = abs(error) <= ERROR
        results.append(
            Check(
                target=f"{case}: peak memory within {ERROR:.0%}",
                verdict="pass" if passed else "fail",
                measured=f"{error:+.1%}: predicted {predicted / MIB:.0f} MiB, measured {measured / MIB:.0f} MiB",
                passed=int(passed),
                total=1,
                notes={"error": error, "predicted_bytes": predicted, "measured_bytes": measured},
            )
        )
        show(results[-1])
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write every target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="run only what contains this in its name; writes no file")
    options = parser.parse_args(arguments)
    results = memory(mw.Cluster.load("cpu-local"), options.only)
    if not options.only:
        words = (
            "The larger rank's peak over two steps, minus what was resident before the first. Predicted with the "
            "sizes of what lives, oneDNN's copies of images, and one factor for what glibc's heap cannot use again "
            "(`Software.heap`)."
        )
        report.write("memory", "Predicted beside measured peak of memory", COMMAND, "", {}, results, words)
        print("written to benchmarks/results/memory.md and .json")
    return int(any(result.verdict == "fail" for result in results))


if __name__ == "__main__":
    sys.exit(main())
