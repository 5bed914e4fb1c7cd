"""Does ``codec="auto"`` know when a codec pays? Ten cases on two ranks. ``python -m benchmarks.codec_auto``.

This machine's device is calibrated first, and the link in emulated boxes of one rank each (network namespaces,
``emulation/network.py``; as root, else nothing is judged), or shared memory in one box. Steps without a codec and with
``codec="auto"`` are planned for both, predicted, and run by turns in the same processes, one thread a rank. Where auto
takes no codec and the same buckets, its plan is the dense plan: there is nothing to compare.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

import meshwright as mw
from benchmarks import report
from benchmarks.boxes import LINK_SIZES, known
from benchmarks.codec_steps import SUBJECTS
from benchmarks.prediction import calibrated
from benchmarks.report import at_most, ms, new_run
from meshwright.bench.repeat import alternate
from meshwright.cost.optimizer import SGD
from meshwright.emulation.network import run_in_boxes, why_not
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout import ZeroStage
from meshwright.ir.plan import Plan
from meshwright.ir.result import Check, Finding, PredictedTime, Series, Settings
from meshwright.ir.statistics import median, ratio
from meshwright.lower.plans import PlanLowering
from meshwright.planner.foretell import foretell
from meshwright.runtime import launch
from meshwright.runtime.between import MeasuredSizes, between, boxes_of_world
from meshwright.runtime.ranks import run_ranks

COMMAND = "python -m benchmarks.codec_auto"
RANKS, ROUNDS = 2, 11
SLOWER, ERROR = 1.02, 0.15
"""Limits: the time of a step with ``auto`` over that without a codec, and the relative error of predictions."""
DENSE, AUTO = "no codec", "auto"
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = (64, *(2**power for power in range(12, 25, 2)))
LONGEST_S = 0.2
"""A link is measured with the sizes that cross it within this time."""


@dataclass(frozen=True)
class CodecCase:
    """A model, the rate of the link in Gbit/s (0: shared memory), and the ZeRO stage."""

    model: str
    gbit: float
    zero: ZeroStage = 0

    def __str__(self) -> str:
        link = f"emulated {self.gbit:g} Gbit/s" if self.gbit else "shared memory"
        return f"{self.model}, {link}" + (f", zero={self.zero}" if self.zero else "")


CASES = [
    *(CodecCase(model, gbit) for gbit in (0.0, 0.1, 1.0, 10.0) for model in SUBJECTS),
    *(CodecCase(model, 0.1, zero=1) for model in SUBJECTS),
]


class AutoTimes(msgspec.Struct, frozen=True):
    """Predicted and measured seconds of a step, by side; the codecs that auto takes; whether both plans are equal."""

    predicted_s: dict[str, float]
    seconds: dict[str, list[float]]
    codecs: tuple[str, ...]
    equal: bool


def table_of(gbit: float) -> MeasuredSizes:
    """The collectives with which a link is measured."""
    sizes = tuple(size for size in SIZES if size <= LONGEST_S * gbit * 1e9 / 8)
    return msgspec.structs.replace(LINK_SIZES, bytes=sizes, most_s=0.5, operations=OPERATIONS)


# --- on every rank ---------------------------------------------------------------------------------------------------


def measure(cases: Sequence[CodecCase], device: Cluster, rounds: int) -> list[AutoTimes]:
    """Plan, predict and run the cases of one link."""
    torch.set_num_threads(1)
    launch.start("cpu")
    places = boxes_of_world()
    if places.num_boxes > 1:
        with torch.inference_mode():
            rows = between(table_of(cases[0].gbit), places, lambda what: None)
        device = known(rows, places.num_boxes, places.each, device)
    return [_of_case(case, device, rounds) for case in cases]


def _of_case(case: CodecCase, cluster: Cluster, rounds: int) -> AutoTimes:
    subject = SUBJECTS[case.model]()
    batch = subject.batch(0)
    predicted_s: dict[str, float] = {}
    sides: dict[str, Callable[[], object]] = {}
    plans: list[Plan] = []
    for side, text in ((DENSE, "none"), (AUTO, "auto")):
        torch.manual_seed(0)
        model = subject.make()
        graph = mw.capture(model, subject.loss_fn, batch)
        layout = mw.Layout(dp=RANKS, zero=case.zero, codec=text)
        plan = mw.plan(graph, cluster, layout=layout, optimizer=SGD)
        foretold = foretell(PlanLowering(graph), plan, cluster, optimizer=SGD, contention=True)
        predicted_s[side] = foretold.played.step_s
        trainer = mw.parallelize(
            model, subject.loss_fn, batch, plan=plan,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        )  # fmt: skip
        sides[side] = partial(trainer.step, batch)
        plans.append(plan)
    codecs = sorted({coding.codec for bucket in plans[1].buckets for coding in bucket.codings})
    return AutoTimes(
        predicted_s, alternate(sides, rounds=rounds, steps=3), tuple(codecs), plans[0].buckets == plans[1].buckets
    )


# --- judged ----------------------------------------------------------------------------------------------------------


def findings(rounds: int, cases: Sequence[CodecCase] = CASES) -> list[Finding]:
    """Every case: auto against no codec, and both predictions."""
    if missing := why_not():
        return [Check(target="codec='auto'", verdict="reported", measured=f"not measured: {missing}")]
    results: list[Finding] = []
    for gbit in dict.fromkeys(case.gbit for case in cases):
        those, device = [case for case in cases if case.gbit == gbit], calibrated()
        with tempfile.TemporaryDirectory() as name:
            if gbit:
                measured = run_in_boxes(
                    measure, those, device, rounds,
                    boxes=(0, 1), rates_bits_per_s=(gbit * 1e9, gbit * 1e9), directory=Path(name),
                )  # fmt: skip
            else:
                measured = run_ranks(measure, those, device, rounds, num_ranks=RANKS, directory=Path(name))
        for case, times in zip(those, measured, strict=True):
            results += _judged(case, times)
    return results


def _judged(case: CodecCase, measured: AutoTimes) -> list[Finding]:
    predicted_s, run = measured.predicted_s, new_run()
    slower = ratio(measured.seconds[AUTO], measured.seconds[DENSE])
    foretold = predicted_s[AUTO] <= predicted_s[DENSE] * (1 + 1e-9)
    verdict = "pass" if measured.equal else at_most(slower, SLOWER)
    taken = " and ".join(measured.codecs) or "no codec"
    verdict = verdict if foretold else "fail"
    results: list[Finding] = [
        Check(
            target=f"{case}: auto takes at most {SLOWER:g} x no codec",
            verdict=verdict,
            measured=f"it takes {taken}"
            + (", the same plan" if measured.equal else f": {slower} measured")
            + f", {predicted_s[AUTO] / predicted_s[DENSE]:.3f} predicted",
            passed=int(verdict == "pass"),
            total=1,
        )
    ]
    for side in (DENSE, AUTO):
        if side == AUTO and measured.equal:
            continue
        series = Series.of(tuple(measured.seconds[side]), steps=3, settings=str(case), run=run)
        off = median(measured.seconds[side]).inverse().times(predicted_s[side])
        inside = [abs(end - 1) <= ERROR for end in off.interval]
        outside = off.low > 1 + ERROR or off.high < 1 - ERROR
        results.append(
            PredictedTime(
                target=f"{case}, {side}: step time within {ERROR:.0%}",
                verdict="pass" if all(inside) else "fail" if outside else "undecided",
                measured=f"{off.value - 1:+.1%} (95 %: {off.low - 1:+.1%} to {off.high - 1:+.1%}): predicted "
                f"{ms(predicted_s[side])}, measured {ms(series.value_s)}",
                series=series,
                predicted_s=predicted_s[side],
                error=off.value - 1,
                limit=ERROR,
            )
        )
    return results


def settings() -> dict[str, Settings]:
    """What changes the speed of each case."""
    return {
        str(case): Settings(
            dtype="float32", ranks=RANKS, threads=1, sizes={"model": case.model, "gbit": case.gbit, "zero": case.zero}
        )
        for case in CASES
    }


def main() -> int:
    """Measure and print; the result file is ``benchmarks.codecs``'."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="alternating rounds, at least 5")
    parser.add_argument("--only", default="", help="measure the cases that contain this in their name")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in str(case)]
    links = [[case for case in cases if case.gbit == gbit] for gbit in dict.fromkeys(case.gbit for case in cases)]
    return max(report.alone(findings(max(5, options.rounds), each)) for each in links)


if __name__ == "__main__":
    sys.exit(main())
