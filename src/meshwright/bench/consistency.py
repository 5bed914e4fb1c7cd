"""Compare consistency rules: losses over equal wall time and over samples, with slow replicas and without."""

import statistics
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from meshwright import api
from meshwright.bench.machine import this_machine, today, versions
from meshwright.bench.repeat import measuring
from meshwright.bench.replica_runs import Pace, train
from meshwright.bench.scaling import check_alone, name_of_model, settings_of
from meshwright.errors import DataError, FileFormatError, LayoutError
from meshwright.ir import files
from meshwright.ir.consistency import Sync, consistency_of
from meshwright.ir.replica_runs import ReplicaRun, RuleRun
from meshwright.ir.result import Accuracy, Comparison, Finding, Result, Series
from meshwright.ir.run import Run
from meshwright.ir.statistics import ratio
from meshwright.runtime.loop import Progress, Silent
from meshwright.schedules.replicas import num_ranks

RULES = (
    "sync", "server(sync)", "server(ssp=3)", "server(async)", "partial(majority)",
    "gossip(one-peer, push=on, staleness=any)", "easgd(0.2, every=4, mode=async)", "local(8)", "diloco(16)",
)  # fmt: skip
PARTS = 5
"""The number of equal parts into which a training is cut. Each part gives one value of the seconds per batch."""
METRIC = "held-out loss"
SETTINGS = "run"
TIMED = (
    "{model} is trained by {replicas} replicas of {each} for {seconds:g} s of wall time after all have begun, with "
    "each rule and {seeds}, one after the other; a rank has one thread.{emulated} Seconds: those in "
    "which all replicas together train on a batch of {batch} samples, for each of {parts} parts of a training with "
    "equally many steps. Losses: of all held-out data at the end, with the parameters of each replica."
)
EMULATED = " Computing times are emulated: {step}{slow}."


class SlowCase(msgspec.Struct, frozen=True, kw_only=True):
    """The computing times of replicas in a case. ``name`` describes them in the form of the command line, and is empty
    if no replica is slow."""

    name: str
    pace: Pace


def consistency(
    run: Run,
    rules: Sequence[str],
    cases: Sequence[SlowCase],
    *,
    replicas: int = 4,
    seconds: float = 20.0,
    seeds: int = 3,
    progress: Progress | None = None,
) -> tuple[RuleRun, ...]:
    """Train ``run`` with ``replicas`` replicas under each rule, in each case and with each seed, for equal wall time.

    Args:
        run: its batch is the batch of all replicas together; its layout is the layout of one replica.
        rules: texts such as ``server(ssp=3)``.
        seconds: the wall time of each training, from the moment when all replicas have begun.
        seeds: the number of trainings with different initial values and data orders.

    Raises:
        LayoutError: there are fewer than two replicas, they do not divide the batch, a rule does not fit them, or the
            run's layout names replicas.
        PlanError: a text names no rule.
        DataError: the run holds out no data.
        FileFormatError: a number is too small, or the learning rate of the run depends on its number of steps.
        LaunchError: this process is a rank itself.
    """
    progress = progress or Silent()
    check_alone("bench consistency")
    _check(run, rules, cases, replicas, seconds, seeds)
    results = []
    with measuring(progress):
        progress.begin(f"training {len(rules) * len(cases) * seeds} times for {seconds:g} s",
                       len(rules) * len(cases) * seeds)  # fmt: skip
        for seed in range(seeds):
            for case in cases:
                for rule in rules:
                    variant = _variant(run, rule, replicas, seed, case.pace.emulated)
                    results.append(RuleRun(rule=rule, slow=case.name, seed=seed, seconds=seconds,
                                           replicas=trained(variant, replicas, case.pace, seconds)))  # fmt: skip
                    progress.advance()
    return tuple(results)


def trained(run: Run, replicas: int, pace: Pace, seconds: float) -> tuple[ReplicaRun, ...]:
    """Train a run for some seconds, and return the record of each replica. Replicas that died are missing."""
    with tempfile.TemporaryDirectory() as name:
        directory, results = Path(name), Path(name, "results")
        results.mkdir()
        arguments = (train, run, replicas, pace, seconds, results)
        if api.num_replica_jobs(run) == 1:
            api.run_ranks(*arguments, num_ranks=num_ranks(run.layout), directory=directory / "run")
        else:
            api.run_replicas(*arguments, num_replicas=replicas, num_ranks=api.ranks_of_replica(run),
                             directory=directory / "run", restarts=0)  # fmt: skip
        return tuple(files.load(path, ReplicaRun) for path in sorted(results.glob("*.json")))


def result_of(
    run: Run, runs: Sequence[RuleRun], cases: Sequence[SlowCase], *, replicas: int, seconds: float, seeds: int,
    command: str,
) -> Result:  # fmt: skip
    """The result file of ``consistency``, which was called with the same arguments. For each case and rule, it has the
    seconds per batch divided by those of the first rule, and the held-out loss.

    Raises:
        FileFormatError: a training has fewer steps than ``PARTS``.
    """
    batch, name, each = run.data.batch_size, uuid.uuid4().hex[:12], _ranks(run, replicas)
    layout = msgspec.structs.replace(run.layout, plan="", dp=replicas * max(1, run.layout.dp))
    seeds_text = "one seed" if seeds == 1 else f"each of {seeds} seeds"
    settings = settings_of(msgspec.structs.replace(run, layout=layout), replicas * each, 1)
    findings = [
        finding
        for case in cases
        for finding in _findings([run for run in runs if run.slow == case.name], case.name, batch, name)
    ]
    return Result(
        date=today(), name="consistency", command=command, machine=this_machine(accelerators=True), versions=versions(),
        timed=TIMED.format(
            model=name_of_model(run), replicas=replicas, each="one rank" if each == 1 else f"{each} ranks",
            seconds=seconds, seeds=seeds_text, emulated=emulated(cases), batch=batch, parts=PARTS,
        ),
        settings={SETTINGS: settings},
        findings=tuple(findings),
    )  # fmt: skip


def emulated(cases: Sequence[SlowCase]) -> str:
    """A sentence that says that computing times are emulated; empty if they are not."""
    if not any(case.pace.emulated for case in cases):
        return ""
    step_s = cases[0].pace.step_s
    step = f"a step lasts {step_s * 1e3:g} ms" if step_s else "a step lasts as long as it computes"
    slow = ", ".join(case.name for case in cases if case.name)
    return EMULATED.format(step=step, slow=f", longer where slow ({slow})" if slow else "")


def _findings(runs: Sequence[RuleRun], slow: str, batch: int, name: str) -> Iterator[Finding]:
    place = f", slow {slow}" if slow else ""
    by_rule = {rule: [run for run in runs if run.rule == rule] for rule in dict.fromkeys(run.rule for run in runs)}
    seconds = {rule: _seconds(each, batch) for rule, each in by_rule.items()}
    series = {rule: Series.of(values, settings=SETTINGS, run=name) for rule, values in seconds.items()}
    first = next(iter(by_rule))
    for rule, each in by_rule.items():
        sent_bytes = round(statistics.fmean(run.sent_bytes * batch / max(1, run.num_samples) for run in each))
        staleness = sum((run.staleness for run in each), start=Counter[int]())
        if rule != first:
            ratios = ratio(seconds[rule], seconds[first])
            yield Comparison(
                target=f"{rule}{place}: time per batch over that of {first}", verdict="reported",
                measured=f"{ratios}; sends {sent_bytes:,} bytes a batch",
                series={side: series[side] for side in (rule, first)}, ours=rule, baseline=first, ratio=ratios.value,
                interval=ratios.interval,
                notes={
                    "sent_bytes": sent_bytes,
                    "staleness": {str(steps): count for steps, count in sorted(staleness.items())},
                },
            )  # fmt: skip
        losses = [statistics.fmean(run.held_out) for run in each if run.held_out]
        diverged = sum(run.diverged for run in each)
        if losses:
            mean = statistics.fmean(losses)
            yield Accuracy(
                target=f"{rule}{place}: {METRIC} after equal time", verdict="reported",
                measured=f"{mean:.4f} ({min(losses):.4f} to {max(losses):.4f})"
                + (f"; {diverged} trainings diverged" if diverged else ""),
                metric=METRIC, value=mean, settings=SETTINGS,
                notes={"losses": losses, "samples": [run.num_samples for run in each]},
            )  # fmt: skip


def _seconds(runs: Sequence[RuleRun], batch: int) -> list[float]:
    seconds = []
    for run in runs:
        parts = run.seconds_a_batch(PARTS, batch)
        if not parts:
            raise FileFormatError(
                f"{len(run.ends)} steps of {run.rule} in {run.seconds:g} s", where="bench consistency",
                remedy="give more --seconds",
            )  # fmt: skip
        seconds += parts
    return seconds


def _variant(run: Run, rule: str, replicas: int, seed: int, emulated: bool) -> Run:
    """The run under a rule. With emulated times and ``sync``, micro-batches keep gradients back until the end of a
    rank's computing (``emulation/slow.py``)."""
    replace = msgspec.structs.replace
    layout = replace(run.layout, plan="", replicas=replicas, consistency=rule, dp=max(1, run.layout.dp))
    if emulated and isinstance(consistency_of(rule), Sync):
        layout = replace(layout, microbatches=max(2, layout.microbatches))
    return replace(run, layout=layout, train=replace(run.train, seed=run.train.seed + seed))


def _ranks(run: Run, replicas: int) -> int:
    """The number of ranks of a replica."""
    return api.ranks_of_replica(_variant(run, "local(1)", replicas, 0, False))


def _check(
    run: Run, rules: Sequence[str], cases: Sequence[SlowCase], replicas: int, seconds: float, seeds: int
) -> None:
    where = "bench consistency"
    for rule in rules:
        consistency_of(rule)
    if not rules:
        raise LayoutError("no rule", where=where, remedy='name rules: --rule sync --rule "server(ssp=3)"')
    if replicas < 2:
        raise LayoutError(f"{replicas} replicas", where=where, remedy="give 2 or more")
    if run.layout.replicas > 1 or run.layout.file:
        problem = "the layout names replicas or a plan"
        raise LayoutError(problem, where=where, remedy="give the sizes of one replica's layout, and --replicas")
    for case in cases:
        case.pace.faults.check(replicas)
    parts = replicas * max(1, run.layout.dp) * (2 if any(case.pace.emulated for case in cases) else 1)
    if run.data.batch_size % parts:
        problem = f"a batch of {run.data.batch_size} does not divide into {parts} parts (replicas and micro-batches)"
        raise LayoutError(problem, where="data.batch_size", remedy=f"give a multiple of {parts}")
    if not run.data.held_out:
        raise DataError("no data are held out", where="data", remedy="set held_out, so that losses can be compared")
    if run.schedule.name != "none" or run.schedule.batch_sizes:
        problem = "the learning rate or the batch depends on the number of steps, which differs between rules"
        raise FileFormatError(problem, where="schedule", remedy="leave it out; warmup_steps may stay")
    if not seconds > 0:
        raise FileFormatError(f"{seconds:g} s", where=where, remedy="give more --seconds")
    if seeds < 1:
        raise FileFormatError(f"{seeds} seeds", where=where, remedy="give at least 1")
