"""Measure what codecs gain and cost: time and bytes of a step, and losses after equal steps and after equal time."""

import statistics
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from meshwright import api, build
from meshwright.bench.batch_size import mean_loss, prepared, timed_step
from meshwright.bench.machine import this_machine, today, versions
from meshwright.bench.repeat import WARMUP_STEPS, alternate, measuring
from meshwright.bench.scaling import check_alone, name_of_model, settings_of
from meshwright.catalog import load_cluster
from meshwright.comm.groups import codings_of
from meshwright.emulation.network import run_in_boxes, why_not
from meshwright.errors import DataError, FileFormatError, LaunchError, LayoutError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.codec import codec_of
from meshwright.ir.result import Accuracy, Comparison, Finding, Result, Series
from meshwright.ir.run import Run
from meshwright.ir.statistics import ratio
from meshwright.runtime.loop import Progress, Silent, resumed_schedule
from meshwright.runtime.trainer import Trainer

MOST = 4
"""In equal time, a codec may make up to this number times the steps of dense training."""
DENSE = "dense"
METRIC = "held-out loss"
SETTINGS = "run"
TIMED = (
    "Seconds: a training step of {model} with a learning rate of 0 on {ranks} ranks {where}, from when all ranks have "
    "met until the slowest is done, dense and with every codec by turns, {repetitions} times after {warmup} steps of "
    "warm-up. Losses: of all held-out data, after {steps} steps of each of {seeds} seeds, and after as many steps as "
    "take as long as the dense steps (at most {most} times as many)."
)


class CodecRow(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one codec, or of training without a codec (``dense``).

    ``step_s``: seconds per step, for each repetition. ``sent_bytes``: the counted bytes that rank 0 sends for gradients
    in a step. For dense gradients, they are 2 (P-1)/P of the gradients' bytes. ``losses``: the held-out loss of each
    seed after equal steps. ``losses_in_time``: the held-out losses after ``steps_in_time`` steps, which take as long as
    all dense steps."""

    codec: str
    step_s: tuple[float, ...]
    sent_bytes: int
    losses: tuple[float, ...]
    steps_in_time: int
    losses_in_time: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median seconds of a step."""
        return statistics.median(self.step_s)


def codec(
    run: Run,
    codecs: Sequence[str],
    *,
    ranks: int = 2,
    steps: int = 60,
    seeds: int = 3,
    repetitions: int = 7,
    boxes: int = 1,
    gbit: float = 1.0,
    progress: Progress | None = None,
) -> tuple[CodecRow, ...]:
    """Train ``run`` without a codec and with each codec over ``ranks`` data-parallel ranks, with one thread per rank.

    Args:
        steps: the number of training steps without a codec. Every codec makes the same number, and then as many as fit
            in the time of the dense steps (at most ``MOST`` times that number).
        seeds: the number of trainings with different initial values and data orders.
        boxes, gbit: the number of emulated boxes that hold the ranks, and the rate of the links between them in Gbit/s.
            With one box, ranks share memory.

    Raises:
        LayoutError: no codec is given, the boxes do not divide the ranks, or the run's layout names another codec or
            other ranks.
        PlanError: a text names no codec.
        DataError: the run holds out no data.
        LaunchError: this process is a rank itself, or networks cannot be emulated here.
        FileFormatError: a number is too small.
    """
    progress = progress or Silent()
    check_alone("bench codec")
    _check(run, codecs, ranks, steps, seeds, boxes, gbit)
    with tempfile.TemporaryDirectory() as name:
        cluster = Path(name, "boxes.toml")
        if boxes > 1:
            files.save(boxes_of(boxes, ranks // boxes, gbit), cluster)
        cases = [
            (text or DENSE, _variants(run, text, ranks, seeds, str(cluster) if boxes > 1 else ""))
            for text in ("", *codecs)
        ]
        with measuring(progress):
            progress.begin(f"training {len(cases)} x {seeds} times")
            if boxes == 1:
                return api.run_ranks(measure, cases, steps, repetitions, num_ranks=ranks)
            return run_in_boxes(
                measure, cases, steps, repetitions, boxes=[rank * boxes // ranks for rank in range(ranks)],
                rates_bits_per_s=[gbit * 1e9] * boxes, directory=Path(name, "ranks"),
            )  # fmt: skip


def result_of(
    run: Run, rows: Sequence[CodecRow], *, ranks: int, steps: int, seeds: int, repetitions: int, boxes: int,
    gbit: float, command: str,
) -> Result:  # fmt: skip
    """The result file of ``codec``, which was called with the same arguments. For each codec, it has the time of a step
    divided by the time of a dense step. For each codec and for dense gradients, it has the mean losses after equal
    steps and after equal time."""
    name = uuid.uuid4().hex[:12]
    series = {row.codec: Series.of(row.step_s, settings=SETTINGS, run=name) for row in rows}
    findings: list[Finding] = []
    for row in rows[1:]:
        step_ratio = ratio(row.step_s, rows[0].step_s)
        findings.append(Comparison(
            target=f"{row.codec}: time of a step over that of a dense step", verdict="reported",
            measured=f"{step_ratio}; sends {row.sent_bytes:,} bytes, dense {rows[0].sent_bytes:,}",
            series={each: series[each] for each in (row.codec, DENSE)}, ours=row.codec, baseline=DENSE,
            ratio=step_ratio.value, interval=step_ratio.interval,
            notes={"sent_bytes": {each.codec: each.sent_bytes for each in (row, rows[0])}},
        ))  # fmt: skip
    for row in rows:
        for when, count, losses in (
            ("steps", steps, row.losses), ("time", row.steps_in_time, row.losses_in_time),
        ):  # fmt: skip
            mean = statistics.fmean(losses)
            findings.append(Accuracy(
                target=f"{row.codec}: {METRIC} after equal {when} ({count} steps)", verdict="reported",
                measured=f"{mean:.4f} ({min(losses):.4f} to {max(losses):.4f})", metric=METRIC, value=mean,
                settings=SETTINGS, notes={"losses": list(losses), "steps": count},
            ))  # fmt: skip
    return Result(
        date=today(), name="codec", command=command, machine=this_machine(accelerators=True), versions=versions(),
        timed=TIMED.format(
            model=name_of_model(run), ranks=ranks, repetitions=repetitions, warmup=WARMUP_STEPS, steps=steps,
            where="of one box" if boxes == 1 else f"in {boxes} emulated boxes, joined at {gbit:g} Gbit/s", seeds=seeds,
            most=MOST,
        ),
        settings={SETTINGS: settings_of(_variants(run, "", ranks, 1, "")[0], ranks, 1)},
        findings=tuple(findings),
    )  # fmt: skip


def boxes_of(boxes: int, each: int, gbit: float) -> Cluster:
    """Boxes of ``each`` CPU ranks, joined by links of a rate in Gbit/s."""
    this_machine = load_cluster("cpu-local")
    inner = msgspec.structs.replace(this_machine.levels[0], name="box", fan_out=each)
    network = msgspec.structs.replace(inner, name="network", fan_out=boxes, alpha_s=1e-4, beta_s_per_byte=8e-9 / gbit)
    return msgspec.structs.replace(
        this_machine, name="emulated", num_devices=boxes * each, levels=(inner, network), collectives=()
    )


def _variants(run: Run, text: str, ranks: int, seeds: int, cluster: str) -> list[Run]:
    replace = msgspec.structs.replace
    layout = replace(run.layout, dp=ranks, codec=text or "none", plan="", cluster=cluster or run.layout.cluster)
    return [replace(run, layout=layout, train=replace(run.train, seed=run.train.seed + seed)) for seed in range(seeds)]


def _check(run: Run, codecs: Sequence[str], ranks: int, steps: int, seeds: int, boxes: int, gbit: float) -> None:
    if not codecs:
        raise LayoutError("no codec", where="bench codec", remedy='name codecs: --codec "qsgd(4)" --codec "topk(1%)"')
    for text in codecs:
        codec_of(text)
    if run.layout.codec or run.layout.tp != 1 or run.layout.pp != 1:
        problem = "the layout names a codec, tp or pp"
        raise LayoutError(problem, where="bench codec", remedy="leave them out: ranks divide the batch here")
    if not run.data.held_out:
        raise DataError("no data are held out", where="data", remedy="set held_out, so that losses can be compared")
    for name, value, least in (("ranks", ranks, 2), ("steps", steps, 1), ("seeds", seeds, 1), ("boxes", boxes, 1)):
        if value < least:
            raise FileFormatError(f"{name} is {value}", where="bench codec", remedy=f"give at least {least}")
    if ranks % boxes:
        raise LayoutError(f"{ranks} ranks in {boxes} boxes", where="bench codec", remedy="give a multiple of the boxes")
    if not gbit > 0:
        raise FileFormatError(f"{gbit:g} Gbit/s", where="bench codec", remedy="give a rate above 0")
    if boxes > 1 and (missing := why_not()):
        raise LaunchError(missing, where="bench codec", remedy="measure with one box, or as root on Linux")


# --- on every rank ---------------------------------------------------------------------------------------------------


def measure(cases: Sequence[tuple[str, list[Run]]], steps: int, repetitions: int) -> tuple[CodecRow, ...]:
    """Time the steps of all cases in turns, then train each case."""
    torch.set_num_threads(1)
    sides = {name: timed_step(runs[0], runs[0].data.batch_size) for name, runs in cases}
    seconds = alternate(sides, rounds=repetitions, steps=1)
    sides.clear()
    dense_s = steps * statistics.median(seconds[DENSE])
    rows = []
    for name, runs in cases:
        in_time = max(1, min(MOST * steps, int(dense_s / statistics.median(seconds[name])))) if name != DENSE else steps
        losses, late, sent = [], [], 0
        for run in runs:
            equal, timed, sent = _trained(run, steps, in_time)
            losses.append(equal)
            late.append(timed)
        rows.append(CodecRow(
            codec=name, step_s=tuple(seconds[name]), sent_bytes=sent, losses=tuple(losses), steps_in_time=in_time,
            losses_in_time=tuple(late),
        ))  # fmt: skip
    return tuple(rows)


def _trained(run: Run, steps: int, in_time: int) -> tuple[float, float, int]:
    """The held-out losses after ``steps`` and after ``in_time`` steps, and the bytes sent per step."""
    trainer, loader, held_out = prepared(run, run.data.batch_size)
    schedule, batches = resumed_schedule(trainer, build.hyperparameters(run), run.lr_factors()), iter(loader)
    losses = {}
    for step in range(1, max(steps, in_time) + 1):
        trainer.step(next(batches), local=True)
        schedule.step()
        if step in (steps, in_time):
            losses[step] = mean_loss(trainer, held_out)
    return losses[steps], losses[in_time], sent_bytes_of(trainer)


def sent_bytes_of(trainer: Trainer) -> int:
    """The bytes that this rank sends for gradients in a step."""
    size, coded = trainer.plan.layout.dp, codings_of(trainer.groups)
    total = 0
    for bucket in trainer.plan.buckets:
        if bucket.codings:
            total += sum(coded[coding.axis, bucket.reduction].sent_bytes for coding in bucket.codings)
        else:
            total += 2 * (size - 1) * bucket.num_bytes // size
    return total
