"""Measure the steps and the time that training takes to a target loss, by batch size and learning-rate rule."""

import math
import statistics
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import cycle, islice

import msgspec
import torch

from meshwright import api, build
from meshwright.bench.machine import this_machine, today, versions
from meshwright.bench.repeat import WARMUP_STEPS, alternate, measuring
from meshwright.bench.scaling import NUM_BATCHES, check_alone, check_rising, name_of_model, settings_of
from meshwright.data.loaders import Loader
from meshwright.errors import DataError, FileFormatError, LayoutError, NonFiniteLossError
from meshwright.ir.learning_rate import scaled_by
from meshwright.ir.result import BatchPoint, BatchSizes, Result, Series
from meshwright.ir.run import Run
from meshwright.runtime.loop import Progress, Silent, resumed_schedule
from meshwright.runtime.trainer import Trainer

RULES = ("none", "linear", "sqrt")
METRIC = "held-out loss"
LEAST_FOR_KNEE = 3
WORST_FIT = 0.25
"""The largest relative error of a fit to the steps; beyond it, no knee is reported."""
TIMED = (
    "Steps: {model} is trained with {optimizer} in {dtype} on {ranks} until the loss of all held-out data, evaluated "
    "about every {every} samples, is at most the target, for {seeds}; after {most} steps it is not reached. "
    "Seconds: after that, a training step of each batch size with a learning rate of 0, from when all ranks have met "
    "until the slowest is done, by turns, {repetitions} times over {steps} steps after {warmup} of warm-up. Time to "
    "the target is their product: evaluations are not in it."
)


class SeedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Trainings that differ only in their seed."""

    rule: str
    runs: tuple[Run, ...]

    @property
    def batch(self) -> int:
        """The batch size, which all runs of the case share."""
        return self.runs[0].data.batch_size


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements. ``steps`` and ``losses`` have an entry for each case with one value per seed: the steps to the
    target (0: not reached), and the last held-out loss. ``seconds`` maps a batch size to the seconds per step of each
    repetition."""

    steps: list[tuple[int, ...]]
    losses: list[tuple[float, ...]]
    seconds: dict[int, list[float]]


def batch_size(
    run: Run,
    sizes: Sequence[int],
    target: float,
    *,
    rules: Sequence[str] = RULES,
    seeds: int = 1,
    evaluate_every: int = 10,
    ranks: int = 1,
    repetitions: int = 5,
    steps: int = 3,
    threads: int = 1,
    command: str = "",
    progress: Progress | None = None,
) -> Result:
    """Train ``run`` at each batch size until its held-out loss is at most ``target``.

    Args:
        run: its learning rate and its ``schedule.warmup_steps`` hold for the smallest size. At k times that size, the
            rules scale the rate by k (linear) or √k (sqrt), and the warm-up covers the same number of samples. No size
            makes more than ``train.steps`` steps.
        sizes: ascending numbers of samples in the global batch.
        target: the loss, in its own unit (nats for a language model).
        rules: some of ``none``, ``linear`` and ``sqrt``.
        seeds: the number of seeds (initial values and data orders) with which each case is trained.
        evaluate_every: steps between two evaluations, at the smallest size.
        repetitions, steps: the number of time measurements, and the steps in each.

    The knee is defined by S. McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162;
    the method of measurement is that of C. Shallue et al., "Measuring the Effects of Data Parallelism on Neural Network
    Training", JMLR 20, 2019, arXiv:1811.03600.

    Raises:
        LayoutError: sizes are not at least two ascending numbers, do not divide over the ranks, or the run has a plan.
        FileFormatError: a rule is unknown, the target is not a number, or the run's schedule depends on the batch size.
        DataError: the run holds out no data, or has fewer samples than a batch.
        LaunchError: this process is a rank itself.
    """
    progress = progress or Silent()
    check_alone("bench batch-size")
    _check(run, sizes, target, rules)
    cases = cases_of(run, sizes, rules, seeds)
    by_size = {case.batch: case.runs[0] for case in cases}
    progress.begin("planning", len(by_size))
    for variant in by_size.values():
        api.plan_run(variant, ranks)
        progress.advance()
    with measuring(progress):
        progress.begin(f"training {len(cases)} x {seeds} times to a loss of {target:g}")
        counted = api.run_ranks(measure, cases, target, evaluate_every, repetitions, steps, threads, num_ranks=ranks)
    return Result(
        date=today(),
        name="batch-size",
        command=command,
        machine=this_machine(accelerators=True),
        versions=versions(),
        timed=TIMED.format(
            model=name_of_model(run), optimizer=type(run.optimizer).__name__,
            dtype=run.layout.precision or run.train.dtype,
            ranks="one rank" if ranks == 1 else f"{ranks} ranks", every=evaluate_every * sizes[0],
            seeds="one seed" if seeds == 1 else f"{seeds} seeds", most=run.train.steps, repetitions=repetitions,
            steps=steps, warmup=WARMUP_STEPS,
        ),
        settings={name_of(size): settings_of(variant, ranks, threads) for size, variant in by_size.items()},
        findings=(finding(cases, counted, target, steps),),
    )  # fmt: skip


def cases_of(run: Run, sizes: Sequence[int], rules: Sequence[str], seeds: int) -> tuple[SeedRuns, ...]:
    """The cases of every size and rule. The smallest size occurs once, because no rule changes it."""
    replace, base, cases = msgspec.structs.replace, sizes[0], []
    for size in sizes:
        for rule in rules if size != base else rules[:1]:
            schedule = replace(
                run.schedule, scaling=rule, base_batch_size=base,
                warmup_steps=math.ceil(run.schedule.warmup_steps * base / size),
            )  # fmt: skip
            sized = replace(run, data=replace(run.data, batch_size=size), schedule=schedule)
            trains = [replace(run.train, seed=run.train.seed + k) for k in range(seeds)]
            cases.append(SeedRuns(rule=rule, runs=tuple(replace(sized, train=train) for train in trains)))
    return tuple(cases)


def _check(run: Run, sizes: Sequence[int], target: float, rules: Sequence[str]) -> None:
    check_rising(sizes, "batch sizes", "--sizes", "write 8,16,32")
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown or not rules:
        raise FileFormatError(
            f"unknown rule {unknown[0]!r}" if unknown else "no rule is given", where="--rules",
            remedy=f"write {','.join(RULES)}, or some of them",
        )  # fmt: skip
    if not math.isfinite(target):
        raise FileFormatError(f"{target} is no loss", where="--target", remedy="give a number, such as 2.5")
    for key in ("name", "scaling", "batch_sizes"):
        value = getattr(run.schedule, key)
        if value not in ("none", ()):
            raise FileFormatError(
                f"it is {value!r}: how long it takes would depend on it", where=f"schedule.{key}",
                remedy="leave it out; warmup_steps may stay",
            )  # fmt: skip
    if run.layout.file:
        raise LayoutError("a plan is for one batch size", where="layout.plan", remedy="give sizes, such as dp = -1")
    if not run.data.held_out:
        raise DataError("nothing is held out", where="data.held_out", remedy="hold some out, such as 0.05")


# --- on every rank ---------------------------------------------------------------------------------------------------


def measure(
    cases: Sequence[SeedRuns], target: float, evaluate_every: int, repetitions: int, steps: int, threads: int
) -> Counted:
    """Train every case to the target, then time a step of each batch size."""
    torch.set_num_threads(threads)
    base = cases[0].batch
    counted = [
        [_to_target(run, base, target, max(1, round(evaluate_every * base / case.batch))) for run in case.runs]
        for case in cases
    ]
    sides = {str(case.batch): timed_step(case.runs[0], base) for case in cases}
    seconds = alternate(sides, rounds=repetitions, steps=steps)
    return Counted(
        steps=[tuple(count for count, _ in pairs) for pairs in counted],
        losses=[tuple(loss for _, loss in pairs) for pairs in counted],
        seconds={int(size): values for size, values in seconds.items()},
    )


def _to_target(run: Run, base: int, target: float, every: int) -> tuple[int, float]:
    """Steps until the held-out loss is at most ``target`` (0: never), and the last held-out loss."""
    trainer, loader, held_out = prepared(run, base)
    schedule, batches, loss = resumed_schedule(trainer, build.hyperparameters(run), run.lr_factors()), iter(loader), 0.0
    with suppress(NonFiniteLossError):  # divergence by too high a learning rate is a result too
        for step in range(1, run.train.steps + 1):
            trainer.step(next(batches), local=True)
            schedule.step()
            if step % every == 0:
                loss = mean_loss(trainer, held_out)
                if loss <= target:
                    return step, loss
    return 0, loss


def timed_step(run: Run, base: int) -> Callable[[], object]:
    """A training step with a learning rate of 0, so that the model stays finite."""
    trainer, loader, _ = prepared(run, base)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    batches = cycle(list(islice(loader, NUM_BATCHES)))
    return lambda: trainer.step(next(batches), local=True)


def prepared(run: Run, base: int) -> tuple[Trainer, Loader, Loader]:
    """A trainer with its training and held-out data. The held-out data and their batches are equal for all sizes."""
    source = build.DataSource(msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, batch_size=base)))
    whole = source.training()
    whole.resize(run.data.batch_size)
    trainer = api.trainer_of(run, next(iter(whole)))
    whole.close()
    loader, held_out = source.training(trainer.data_shard), source.held_out(trainer.own_shard)
    loader.resize(run.data.batch_size)
    assert held_out is not None
    return trainer, loader, held_out


def mean_loss(trainer: Trainer, held_out: Loader) -> float:
    """The mean loss of all held-out data."""
    total, samples = 0.0, 0
    held_out.rewind()
    for batch in held_out:
        count = len(next(iter(batch.values())))
        total += float(trainer.evaluate(batch, local=True)) * count
        samples += count
    return total / samples


# --- findings --------------------------------------------------------------------------------------------------------


def name_of(size: int) -> str:
    """The name of a batch size's settings in a result."""
    return f"batch {size}"


def finding(cases: Sequence[SeedRuns], counted: Counted, target: float, steps: int) -> BatchSizes:
    """Steps, samples and time of every case, and the knee of every rule."""
    run, base = uuid.uuid4().hex[:12], cases[0].batch
    series = {
        size: Series.of(seconds, steps=steps, settings=name_of(size), run=run)
        for size, seconds in counted.seconds.items()
    }
    rules = list(dict.fromkeys(case.rule for case in cases))
    points = []
    for case, counts, losses in zip(cases, counted.steps, counted.losses, strict=True):
        median = round(statistics.median(counts)) if all(counts) else 0
        first = case.runs[0]
        points += [
            BatchPoint(
                series=series[case.batch], batch=case.batch, rule=rule, lr=_highest_lr(first),
                steps=counts, losses=losses, steps_to_target=median, samples_to_target=median * case.batch,
                target_s=median * series[case.batch].value_s,
            )
            for rule in (rules if case.batch == base else [case.rule])
        ]  # fmt: skip
    knees = {
        rule: knee({p.batch: p.steps_to_target for p in points if p.rule == rule and p.steps_to_target})
        for rule in rules
    }
    reached = [p for p in points if p.steps_to_target]
    best = min(reached, key=lambda p: p.target_s, default=None)
    phrases = [f"{rule}: {_in_words(value)}" for rule, value in knees.items()]
    if best is not None:
        phrases.append(f"least time at batch {best.batch} ({best.rule}): {best.target_s:.3g} s")
    return BatchSizes(
        target=f"steps and time to a {METRIC} of {target:g}", verdict="reported", measured="; ".join(phrases),
        metric=METRIC, goal=target, points=tuple(points),
        knees={rule: value for rule, value in knees.items() if value is not None and math.isfinite(value)},
    )  # fmt: skip


def knee(steps: Mapping[int, int]) -> float | None:
    """The critical batch size: training with it takes twice the fewest steps to the target, and twice the fewest
    samples.

    Fits S(B) = S_min + E_min / B, which is (S / S_min - 1)(E / E_min - 1) = 1 with E = B S (McCandlish et al. 2018),
    by least squares of relative errors; the knee is E_min / S_min.

    Returns:
        Infinity if steps still fall as 1 / B; 0 if they do not fall; None for fewer than three batch sizes, or if the
        relative error of the fit exceeds ``WORST_FIT`` at a batch size.
    """
    if len(steps) < LEAST_FOR_KNEE:
        return None
    rows = [(1 / count, 1 / (size * count)) for size, count in steps.items()]  # of S_min, E_min; right side: 1
    aa, ab, bb = (math.fsum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (math.fsum(row[i] for row in rows) for i in (0, 1))
    least_steps, least_samples = a1 * bb - b1 * ab, b1 * aa - a1 * ab  # both times the same positive determinant
    determinant = aa * bb - ab * ab
    if any(abs(least_steps * x + least_samples * y - determinant) > WORST_FIT * determinant for x, y in rows):
        return None
    tiny = 1e-9 * abs(a1 * bb)
    if least_samples <= 0:
        return 0.0
    return least_samples / least_steps if least_steps > tiny else math.inf


def _highest_lr(run: Run) -> float:
    schedule = run.schedule
    return run.optimizer.lr * scaled_by(schedule.scaling, run.data.batch_size, schedule.base_batch_size)


def _in_words(value: float | None) -> str:
    if value is None:
        return f"no knee: fewer than {LEAST_FOR_KNEE} sizes reached the target, or steps do not follow S + E / batch"
    if value == math.inf:
        return "the knee is beyond the largest size: steps fall as the batch grows"
    return f"the knee is at a batch of {value:.3g}" if value else "the knee is below the smallest size"
