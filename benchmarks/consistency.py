"""What do consistency rules gain? ``python -m benchmarks.consistency [--only PART]`` prints the verdicts.

Without ``--only``, the result file is written. The exit code is 1 if a target is missed.

straggler  Four replicas of the demo's GPT, one of which takes twice as long: always the same, or in each step another.
           Computing times are emulated: a replica sleeps until its step has lasted as long as on a device of its own
           (``emulation/slow.py``), so that four share two cores; what they exchange, and what they learn, is real.
           ``meshwright bench consistency`` measures it. The time to equal loss is that to the losses that synchronous
           training has after 0.6 to 1 of its time, each the mean of ten batches. All of them must be reached in time;
           if only some are, the verdict is undecided.
           Under ssp and async the learning rate is half of the others', because servers make more steps.
diloco     Two replicas in two emulated boxes at 0.1 Gbit/s (network namespaces, ``emulation/network.py``; as root, else
           nothing is judged; ``benchmarks/consistency_boxes.py``): bytes that the kernel counts on the links; time to
           equal loss, from random values and, reported, after 150 steps that replicas make alike and without exchange;
           and time per step beside PyTorch's PostLocalSGDOptimizer and, if it is installed, torchft, by turns.
kills      Replicas with servers beside them, of which one or two are killed again and again
           (``benchmarks/consistency_kills.py``). Every gradient marks an element of its own, so that a lost and a
           doubled update show.
servers    The worked example ps-resnet50, scaled: workers push gradients over emulated links to one server, to two that
           share the parameters, and without a server (``benchmarks/consistency_boxes.py``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import msgspec

from benchmarks import consistency_boxes, consistency_kills, report
from meshwright import config
from meshwright.bench.consistency import PARTS as SAMPLED
from meshwright.bench.consistency import SlowCase, consistency
from meshwright.bench.replica_runs import Pace
from meshwright.catalog import load_cluster
from meshwright.ir.consistency import consistency_of
from meshwright.ir.replica_runs import RuleRun, smoothed, time_to
from meshwright.ir.result import Check, Finding, Settings, Verdict
from meshwright.ir.run import Run
from meshwright.ir.statistics import ratio
from meshwright.planner.replicas import compare_rules
from meshwright.simulate.faults import Faults, ReplicaFaults
from meshwright.simulate.letters import ReplicaStep

COMMAND = "python -m benchmarks.consistency"
REPLICAS, STEP_S, SECONDS, SEEDS = 4, 0.25, 40.0, 1
RULES = ("server(ssp=3)", "server(async)", "partial(majority)", "gossip(one-peer, staleness=any, push=on)")
LR = 1e-3
LRS = {"server(ssp=3)": LR / 2, "server(async)": LR / 2}
"""Learning rates other than ``LR``: these servers make up to four steps of AdamW for as many samples as others one."""
FASTER, SOONER = 1.6, 0.75
BATCHES = 10
SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of the time of synchronous training whose losses are the goals."""
CASES = {
    "one of 4 replicas always takes 2 x the time": ReplicaFaults(each=Faults(slow={1: 2.0})),
    "in each step another of 4 replicas takes 2 x the time": ReplicaFaults(in_turn=(2.0,)),
}
ALWAYS, IN_TURN = CASES
WAITING = {ALWAYS: (1.0, (3 + 0.5) / 2), IN_TURN: (2 / 1.25, 2 / 1.25)}
"""What a rule gains over synchronous training by less waiting, at most, if nobody exchanges anything: rules that bound
the staleness, and others. A rule with a bound is in the long run as slow as its slowest replica. What is measured may
be more, because synchronous training also pays for its all-reduces."""


def demo(lr: float = LR) -> Run:
    """The demo's model; each replica has two short sequences, so that the cores compute a part of the time only."""
    return config.make(
        {
            "model": {"name": "gpt", "layers": 4, "width": 256, "heads": 4, "sequence_length": 64},
            "data": {
                "kind": "text", "sequence_length": 64, "batch_size": 2 * REPLICAS, "max_bytes": 1_000_000,
                "held_out": 0.005,
            },
            "optimizer": {"name": "adamw", "lr": lr, "betas": [0.9, 0.95]},
        },
        where=COMMAND,
    )  # fmt: skip


def straggler_findings() -> list[Finding]:
    """Samples per second and time to equal loss, with the best possible and the simulated beside the measured."""
    batch = demo().data.batch_size
    cases = [SlowCase(name=name, pace=Pace(step_s=STEP_S, faults=faults)) for name, faults in CASES.items()]
    runs = [
        each
        for rule in ("sync", *RULES)
        for each in consistency(demo(LRS.get(rule, LR)), [rule], cases, replicas=REPLICAS, seconds=SECONDS, seeds=SEEDS)
    ]
    results: list[Finding] = []
    for case in cases:
        simulated = _simulated(case.pace.faults)
        same = [each for each in runs if each.slow == case.name]
        sync = [each for each in same if each.rule == "sync"]
        for rule in RULES:
            ours = [each for each in same if each.rule == rule]
            results += _judged(case.name, rule, ours, sync, batch, simulated[rule])
    return results


def _judged(
    case: str, rule: str, ours: Sequence[RuleRun], sync: Sequence[RuleRun], batch: int, simulated: float
) -> list[Finding]:
    seconds, theirs = (
        [value for each in runs for value in each.seconds_a_batch(SAMPLED, batch)] for runs in (ours, sync)
    )
    gain = ratio(theirs, seconds)
    waiting = WAITING[case][0 if rule.startswith("server(ssp") else 1]
    verdict: Verdict = "pass" if gain.low >= FASTER else "fail" if gain.high < FASTER else "undecided"
    place = f"{case} (emulated computing): {rule}"
    rows: list[Finding] = [Check(
        target=f"{place}, per sample at least {FASTER:g} x as fast as sync", verdict=verdict,
        measured=f"{gain}; simulated {simulated:.3f}; less waiting alone gives at most {waiting:g}",
        passed=int(verdict == "pass"), total=1,
    )]  # fmt: skip
    shares = [
        share for own_run, other in zip(ours, sync, strict=True) for share in times_to_equal_loss(own_run, other, batch)
    ]
    reached = [share for share in shares if share is not None]
    soon = sum(share <= SOONER for share in reached)
    verdict = "pass" if soon == len(shares) else "undecided" if soon else "fail"
    text = f"{soon} of {len(shares)} losses, {len(shares) - len(reached)} are not reached"
    text += f"; shares {min(reached):.3f} to {max(reached):.3f}" if reached else ""
    target = f"{place}, to equal loss in at most {SOONER:g} of the time of sync"
    return [*rows, Check(target=target, verdict=verdict, measured=text, passed=soon, total=len(shares))]


def times_to_equal_loss(ours: RuleRun, sync: RuleRun, batch: int) -> list[float | None]:
    """The time to losses of synchronous training, over its own time to each; None if a loss is not reached."""
    window = BATCHES * batch
    points = list(smoothed(sync.ends, window))
    shares: list[float | None] = []
    for share in SHARES:
        goal = min(point.loss for point in points if point.time_s <= share * points[-1].time_s)
        sync_s, own_s = time_to(sync, goal, window), time_to(ours, goal, window)
        shares.append(own_s / sync_s if own_s is not None and sync_s else None)
    return shares


def _simulated(faults: ReplicaFaults) -> dict[str, float]:
    """How many times as fast per sample as ``sync`` each rule is, by simulation."""
    num_bytes = 4.0 * NUM_PARAMETERS
    rules = [consistency_of(rule) for rule in RULES]
    comparison = compare_rules(
        rules, REPLICAS, ReplicaStep(step_s=STEP_S, parts={0: num_bytes}), load_cluster("cpu-local", REPLICAS),
        batch_size=1, faults=faults, steps=round(SECONDS / STEP_S),
    )  # fmt: skip
    return {row.times.rule: row.speedup for row in comparison.rows}


NUM_PARAMETERS = 3_241_472
"""Those of the demo's GPT with short sequences."""
PARTS: dict[str, Callable[[], list[Finding]]] = {
    "straggler": straggler_findings, "diloco": consistency_boxes.diloco_findings,
    "kills": consistency_kills.findings, "servers": consistency_boxes.server_findings,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; write the result if all parts were measured."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part only")
    options = parser.parse_args(arguments)
    results: list[Finding] = []
    for part in options.only or PARTS:
        rows = PARTS[part]()
        results += rows
        for row in rows:
            report.show(row)
    if not options.only:
        timed = (
            "Steps of replicas from when all have begun; computing times are emulated where a finding says so, and "
            "there are more ranks than cores: only ratios are told."
        )
        sections = {"model": demo().model, "data": demo().data}
        sizes: dict[str, str | int | float | bool] = {
            f"{name}.{key}": str(value)
            for name, section in sections.items()
            for key, value in msgspec.to_builtins(section).items()
        }
        settings = {"demo": Settings(dtype="float32", ranks=REPLICAS, threads=1, sizes=sizes)}
        text = (__doc__ or "").partition("is missed.")[2].strip()
        report.write("consistency", "Consistency rules", COMMAND, timed, settings, results, text)
    return int(any(finding.verdict == "fail" for finding in results))


if __name__ == "__main__":
    sys.exit(main())
