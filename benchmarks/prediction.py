"""Does prediction meet measurement? Step time of four models under several layouts on two ranks.

Run as ``make bench-prediction``, which also runs ``benchmarks.memory``. This machine is calibrated, without any model,
by turns with the steps of each model, and every layout is predicted and measured. A step is zero_grad, forward,
loss, backward and SGD with momentum 0.9 (the demo: clipping and AdamW) in float32, one thread a rank.
The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from benchmarks import emulation, report, simulation, tracing
from benchmarks.report import at_most, ms, new_run, show
from meshwright.bench.repeat import alternate
from meshwright.cost.optimizer import ADAMW, MOMENTUM, OptimizerCost
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout_text import layout_text
from meshwright.ir.result import Check, Finding, PredictedTime, Series, Settings
from meshwright.ir.statistics import median as estimated_median
from meshwright.ir.statistics import ratio
from meshwright.lower.plans import PlanLowering
from meshwright.models import MLP, ResNet, classification_loss, demo_gpt, gpt_s, language_model_loss
from meshwright.planner.foretell import foretell
from tests.distributed.pool import Ranks

COMMAND = "make bench-prediction"
ROUNDS, STEPS, TURNS = 10, 3, 2
ERROR, MEDIAN_ERROR, AUTO = 0.25, 0.064, 0.05


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


@dataclass(frozen=True)
class TrainedModel:
    """A model, its loss, its batch, and how it is trained."""

    make: Callable[[], torch.nn.Module]
    loss: Callable[..., Any]
    batch: Callable[[], dict[str, torch.Tensor]]
    optimizer: Callable[..., torch.optim.Optimizer] = _momentum
    states: OptimizerCost = MOMENTUM
    max_grad_norm: float | None = None


def text(size: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    text = torch.randint(vocabulary, (size, length + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def samples(name: str, size: int, *shape: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, *shape, generator=generator)
    return {name: inputs, "label": torch.randint(10, (size,), generator=generator)}


MODELS: Mapping[str, TrainedModel] = {
    "GPT-S": TrainedModel(gpt_s, language_model_loss, lambda: text(8, 128, 2048)),
    "ResNet": TrainedModel(
        lambda: ResNet(depth=8, width=32), classification_loss, lambda: samples("image", 32, 3, 32, 32)
    ),
    "MLP": TrainedModel(
        lambda: MLP((1024, 2048, 2048, 2048, 10)), classification_loss, lambda: samples("inputs", 256, 1024)
    ),
    "demo": TrainedModel(demo_gpt, language_model_loss, lambda: text(8, 256, 256), _adamw, ADAMW, 1.0),
}


@dataclass(frozen=True)
class LayoutCase:
    """A model under a layout."""

    model: str
    layout: mw.Layout

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    def __str__(self) -> str:
        return f"{self.model}, {layout_text(self.layout)}"


def cases_of(model: str, **layouts: Mapping[str, Any]) -> list[LayoutCase]:
    own = {"batch_statistics": "microbatch"}
    return [
        LayoutCase(model, mw.Layout(**(dict(layout) | (own if layout.get("microbatches", 1) > 1 else {}))))
        for layout in layouts.values()
    ]


_ALONE: dict[str, Mapping[str, Any]] = {
    "one": {}, "accumulate": {"microbatches": 4}, "recompute": {"microbatches": 4, "recompute": "full"},
}  # fmt: skip
_TWO: dict[str, Mapping[str, Any]] = {
    "dp": {"dp": 2},
    "dp accumulate": {"dp": 2, "microbatches": 4},
    "tp": {"tp": 2},
    "gpipe": {"pp": 2, "microbatches": 4, "schedule": "gpipe"},
    "1f1b": {"pp": 2, "microbatches": 4},
    "recompute": {"pp": 2, "microbatches": 4, "recompute": "full"},
}
_DEMO = {name: _TWO[name] for name in ("dp", "tp", "1f1b")}
_NO_TP = {name: layout for name, layout in _TWO.items() if name != "tp"} | {"1f1b of 8": {"pp": 2, "microbatches": 8}}
CASES = [
    case
    for model, two in (("demo", _DEMO), ("GPT-S", _TWO), ("ResNet", _NO_TP), ("MLP", _TWO))
    for case in cases_of(
        model, **(_ALONE if model == "GPT-S" else {"one": {}}), **{f"two {k}": v for k, v in two.items()}
    )
]


# --- on every rank ---------------------------------------------------------------------------------------------------


def trainer_of(case: LayoutCase, model: TrainedModel) -> tuple[Any, dict[str, torch.Tensor]]:
    """A trainer and its batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = model.batch()
    trainer = mw.parallelize(
        model.make(), model.loss, batch, plan=case.layout, optimizer=model.optimizer, max_grad_norm=model.max_grad_norm
    )
    return trainer, batch


def measure(cases: Sequence[LayoutCase], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step by case and round, cases in turn."""
    sides = {}
    for case in cases:
        trainer, batch = trainer_of(case, MODELS[case.model])
        sides[str(case)] = lambda trainer=trainer, batch=batch: trainer.step(batch)
    return alternate(sides, rounds=rounds, steps=steps)


# --- prediction ------------------------------------------------------------------------------------------------------


def predicted_s(case: LayoutCase, cluster: Cluster) -> float:
    """The simulated step, as plans and ledgers have it."""
    model = MODELS[case.model]
    graph = mw.capture(model.make(), model.loss, model.batch())
    plan = mw.plan(graph, cluster, layout=case.layout)
    clips = model.max_grad_norm is not None
    return foretell(PlanLowering(graph), plan, cluster, optimizer=model.states, clips=clips).played.step_s


def calibrated() -> Cluster:
    """This machine, measured now."""
    from meshwright import api

    with tempfile.TemporaryDirectory() as directory:
        return api.calibrate(Path(directory) / "cluster.toml")


# --- targets ---------------------------------------------------------------------------------------------------------


def step_times(calibrate: Callable[[], Cluster], only: str, rounds: int, steps: int) -> tuple[list[Finding], float]:
    """Predicted beside measured step times; the largest difference of predictions of one case.

    Calibration and the rounds of a group of cases take turns, since the machine's speed drifts within minutes. A
    prediction is the mean of those by the calibrations before, between and after the rounds.
    """
    results: list[Finding] = []
    run = new_run()
    drift = 0.0
    before = calibrate()
    for num_ranks in (1, 2):
        for model in dict.fromkeys(case.model for case in CASES):
            cases = [
                candidate
                for candidate in CASES
                if candidate.model == model and candidate.num_ranks == num_ranks and only in str(candidate)
            ]
            if not cases:
                continue
            chosen = LayoutCase(model, auto_layout(model, num_ranks, before))
            if str(chosen) not in map(str, cases):
                cases.append(chosen)
            clusters = [before]
            seconds: dict[str, list[float]] = {str(case): [] for case in cases}
            with Ranks() as ranks:
                for turn in range(TURNS):
                    share = rounds * (turn + 1) // TURNS - rounds * turn // TURNS
                    for name, more in ranks(num_ranks, measure, cases, share, steps, timeout=1800.0)[0].items():
                        seconds[name] += more
                    clusters.append(calibrate())
            for case in cases:
                predictions = [predicted_s(case, cluster) for cluster in clusters]
                drift = max(drift, max(predictions) / min(predictions) - 1)
                results.append(_step_time(case, seconds[str(case)], statistics.fmean(predictions), steps, run))
                show(results[-1])
            if num_ranks > 1 and not only:
                results.append(
                    _auto(model, str(chosen), {str(candidate): seconds[str(candidate)] for candidate in cases})
                )
                show(results[-1])
            before = clusters[-1]
    return results, drift


def _step_time(case: LayoutCase, seconds: Sequence[float], predicted: float, steps: int, run: str) -> PredictedTime:
    estimate = estimated_median(seconds).inverse().times(predicted)
    error = estimate.value - 1
    kept = [abs(limit - 1) <= ERROR for limit in estimate.interval]
    outside = not any(kept) and (estimate.high < 1 or estimate.low > 1)
    series = Series.of(list(seconds), steps=steps, settings=str(case), run=run)
    return PredictedTime(
        target=f"{case}: step time within {ERROR:.0%}",
        verdict="pass" if all(kept) else "fail" if outside else "undecided",
        measured=f"{error:+.1%} (95 %: {estimate.low - 1:+.1%} to {estimate.high - 1:+.1%}): "
        f"predicted {ms(predicted)}, measured {ms(series.value_s)}",
        series=series,
        predicted_s=predicted,
        error=error,
        limit=ERROR,
    )


def auto_layout(model: str, num_ranks: int, cluster: Cluster) -> mw.Layout:
    """What the planner chooses."""
    subject = MODELS[model]
    graph = mw.capture(subject.make(), subject.loss, subject.batch())
    clips = subject.max_grad_norm is not None
    return mw.plan(graph, cluster, devices=num_ranks, optimizer=subject.states, clips=clips).layout


def _auto(model: str, chosen: str, seconds: Mapping[str, Sequence[float]]) -> Finding:
    """The planner's choice beside the fastest of all layouts, measured by turns."""
    fastest = min(seconds, key=lambda name: statistics.median(seconds[name]))
    slower = ratio(seconds[chosen], seconds[fastest])
    verdict = at_most(slower, 1 + AUTO)
    return Check(
        target=f'{model}, 2 ranks: "auto" within {AUTO:.0%} of the fastest layout measured',
        verdict=verdict,
        measured=f"{slower} of it: it chooses {chosen}; the fastest is {fastest}",
        passed=int(verdict == "pass"),
        total=1,
        notes={"ratio": slower.value},
    )


def _foretold_by_itself(results: Sequence[Finding]) -> Check:
    """How well a measurement of the same step foretells it: no prediction can be expected to be closer."""
    errors = []
    for case in results:
        if isinstance(case, PredictedTime):
            seconds = case.series.seconds
            third = max(1, len(seconds) // 3)
            errors.append(abs(statistics.median(seconds[:third]) / statistics.median(seconds[-third:]) - 1))
    return Check(
        target="median error, if the first third of a step's own rounds predicted the last third",
        verdict="reported",
        measured=f"{statistics.median(errors):.1%} of {len(errors)} cases; the largest {max(errors):.1%}",
        passed=len(errors),
        total=len(errors),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, measure, print and write every target."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"alternating rounds (default {ROUNDS})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps in a round (default {STEPS})")
    parser.add_argument("--only", default="", help="run only what contains this in its name; writes no file")
    parser.add_argument("--cluster", default="", help="a cluster file, instead of calibrating")
    options = parser.parse_args(arguments)
    given = mw.Cluster.load(options.cluster) if options.cluster else None
    results, drift = step_times(lambda: given or calibrated(), options.only, options.rounds, options.steps)
    errors = [abs(finding.error) for finding in results if isinstance(finding, PredictedTime)]
    if errors:
        median = statistics.median(errors)
        passed = int(median <= MEDIAN_ERROR)
        results.append(
            Check(
                target=f"median error of step time at most {MEDIAN_ERROR:.1%}",
                verdict="pass" if median <= MEDIAN_ERROR else "fail",
                measured=f"{median:.1%} of {len(errors)} cases; the largest {max(errors):.1%}",
                passed=passed,
                total=1,
            )
        )
        show(results[-1])
        results.append(_foretold_by_itself(results))
        show(results[-1])
    if not options.only:
        for part in (emulation, simulation, tracing):
            for finding in part.findings():
                results.append(finding)
                show(finding)
        words = (
            "Step times are medians over alternating rounds, beside the simulation over what `meshwright calibrate` "
            f"measured: the mean of the predictions by {TURNS + 1} calibrations, with which the rounds of a model took "
            f"turns. These differ by up to {drift:.0%}: by so much the machine's own speed drifted. "
            "Emulated devices: 8 processes with the executor, the channels and the schedule of training, whose "
            "kernels and links wait their predicted time instead of working."
        )
        timed = "a step of the trainer: forward, loss, backward, reduction, update; from when all ranks have met"
        settings = {
            str(case): Settings(dtype="float32", ranks=case.num_ranks, threads=1, sizes={"model": case.model})
            for case in CASES
        } | {
            finding.series.settings: Settings(
                dtype="float32", ranks=2, threads=1, sizes={"model": finding.series.settings}
            )
            for finding in results
            if isinstance(finding, PredictedTime) and finding.series.settings not in map(str, CASES)
        }
        settings[simulation.SETTINGS] = Settings(ranks=1, threads=1, sizes={"microbatches": simulation.MICROBATCHES})
        report.write("prediction", "Prediction beside measurement", COMMAND, timed, settings, results, words)
        print("written to benchmarks/results/prediction.md and .json")
    return 1 if any(result.verdict == "fail" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
