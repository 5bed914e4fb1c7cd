"""Does the predicted peak of memory meet the measured one? Models of a gibibyte and more, on two ranks.

Run with ``make bench-prediction``, or as ``python -m benchmarks.memory``. Measured is the larger rank's peak over two
steps (VmHWM, reset before) minus what was resident before the first. ``Software.heap`` was fitted on the cases FITTED,
which are only reported; the cases HELD_OUT judge it. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

import meshwright as mw
from benchmarks import report
from benchmarks.prediction import LayoutCase, TrainedModel, cases_of, samples, text, trainer_of
from benchmarks.report import show
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.program import stage_held, step_work
from meshwright.ir.cluster import Cluster
from meshwright.ir.result import Check, Finding
from meshwright.lower.plans import PlanLowering
from meshwright.models import (
    GPT,
    MLP,
    GPTConfig,
    ResNet,
    UNet,
    WideResNet,
    classification_loss,
    language_model_loss,
    segmentation_loss,
)
from meshwright.schedules.pipeline import schedule_of
from tests.distributed.pool import Ranks

COMMAND = "python -m benchmarks.memory"
ERROR = 0.20
MIB = 2**20
Part = Literal["fitted", "held out"]
LARGE = GPTConfig(layers=4, width=512, heads=8, vocabulary=2048, sequence_length=512)
WIDE = GPTConfig(layers=3, width=1024, heads=16, vocabulary=8192, sequence_length=256)


def pictures(size: int, pixels: int) -> dict[str, torch.Tensor]:
    """Pictures with a label for each pixel."""
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(size, 3, pixels, pixels, generator=generator)
    return {"image": image, "label": torch.randint(4, (size, pixels, pixels), generator=generator)}


MODELS: Mapping[str, TrainedModel] = {
    "large GPT": TrainedModel(lambda: GPT(LARGE), language_model_loss, lambda: text(32, 512, 2048)),
    "large GPT, 160 sequences": TrainedModel(lambda: GPT(LARGE), language_model_loss, lambda: text(160, 512, 2048)),
    "large ResNet": TrainedModel(
        lambda: ResNet(depth=14, width=64), classification_loss, lambda: samples("image", 512, 3, 32, 32)
    ),
    "large MLP": TrainedModel(
        lambda: MLP((1024, *[4096] * 6, 10)), classification_loss, lambda: samples("inputs", 32768, 1024)
    ),
    "wide GPT": TrainedModel(lambda: GPT(WIDE), language_model_loss, lambda: text(32, 256, 8192)),
    "large U-Net": TrainedModel(lambda: UNet(depth=3, width=32), segmentation_loss, lambda: pictures(48, 128)),
    "large Wide-ResNet": TrainedModel(
        lambda: WideResNet((1, 1, 1, 1), 32, classes=10),
        classification_loss,
        lambda: samples("image", 256, 3, 128, 128),
    ),
}
FITTED = [
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
"""The cases on which ``Software.heap`` was fitted."""
HELD_OUT = [
    *cases_of("wide GPT", dp={"dp": 2}, tp={"tp": 2}, gpipe={"pp": 2, "microbatches": 8, "schedule": "gpipe"}),
    *cases_of("large U-Net", dp={"dp": 2}, rows={"spatial": (2,)}, one_f_one_b={"pp": 2, "microbatches": 2}),
    *cases_of("large Wide-ResNet", dp={"dp": 2}, gpipe={"pp": 2, "microbatches": 4, "schedule": "gpipe"}),
]
"""Cases of other models, which no number was fitted on."""
CASES: list[tuple[LayoutCase, Part]] = [(case, "fitted") for case in FITTED] + [(case, "held out") for case in HELD_OUT]


def peak_bytes(case: LayoutCase) -> int:
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


def predicted_peaks(case: LayoutCase, cluster: Cluster) -> list[int]:
    """By pipeline rank, the peak beyond what is there before the first step: parameters, buffers, inputs."""
    model = MODELS[case.model]
    graph = mw.capture(model.make(), model.loss, model.batch())
    plan = mw.plan(graph, cluster, layout=case.layout)
    programs = PlanLowering(graph)(plan)
    work = step_work(programs, plan, cluster, optimizer=model.states)
    peaks = []
    for rank, memory in enumerate(peak_memory(work, schedule_of(plan))):
        own_stages = plan.pipeline.stages_of(rank)
        held = [stage_held(programs, plan, stage, cluster, model.states) for stage in own_stages]
        peaks.append(
            memory.peak_bytes
            - sum(stage.parameters_bytes + stage.buffers_bytes for stage in held)
            - held[0].inputs_bytes
        )
    return peaks


def memory(cluster: Cluster, only: str) -> list[Finding]:
    """Predicted beside measured peaks, of the rank that needs most. Fitted cases are only reported."""
    results: list[Finding] = []
    for case, part in CASES:
        if only not in str(case):
            continue
        with Ranks() as ranks:  # fresh processes: memory is not given back
            measured = max(ranks(case.num_ranks, peak_bytes, case, timeout=1800.0))
        predicted = max(predicted_peaks(case, cluster))
        error = predicted / measured - 1
        passed = abs(error) <= ERROR
        results.append(
            Check(
                target=f"{part}: {case}: peak memory within {ERROR:.0%}",
                verdict="reported" if part == "fitted" else "pass" if passed else "fail",
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
            "(`Software.heap`). Rows called fitted are the cases on which that factor was chosen; they are only "
            "reported. Rows called held out judge it: other models and sizes, on which no number was fitted."
        )
        report.write("memory", "Predicted beside measured peak of memory", COMMAND, "", {}, results, words)
        print("written to benchmarks/results/memory.md and .json")
    return int(any(result.verdict == "fail" for result in results))


if __name__ == "__main__":
    sys.exit(main())
