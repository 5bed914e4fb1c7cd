"""Measure how training scales over the ranks of this machine: strong, with the batch, or with the model."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from meshwright import api, build
from meshwright.bench.machine import this_machine, today, versions
from meshwright.bench.repeat import WARMUP_STEPS, alternate, eager_step, measuring
from meshwright.errors import FileFormatError, LaunchError, LayoutError
from meshwright.ir.result import Comparison, Finding, Result, Scalar, Scaling, ScalingPoint, Series, Settings
from meshwright.ir.run import Run, RunLayout
from meshwright.ir.run_model import FactoryModel, GPTModel
from meshwright.ir.statistics import ratio, ratio_of_medians
from meshwright.runtime import launch
from meshwright.runtime.loop import Progress, Silent

KINDS = {"strong": "nothing", "batch": "the batch", "model": "the model"}
"""Maps a kind of scaling to the quantity that grows with the ranks."""
OURS, EAGER = "meshwright", "eager PyTorch"
NUM_BATCHES = 4
TIMED = (
    "A training step of {model}: zero_grad, forward, loss, backward, {optimizer}, in {dtype}, on {threads} a rank. "
    "Every number of ranks is started {turns}, and after {warmup} steps of warm-up measured {repetitions} "
    "times over {steps} each, from when all ranks have met until the slowest is done. "
    "Intervals of 95 % by resampling."
)


class LaunchTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one launch. ``seconds`` maps a program (Meshwright or eager PyTorch) to its seconds per step,
    one value per repetition; ``losses`` maps it to its first losses."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]
    parameters: int
    flops: float
    items: int
    unit: str


def scaling(
    run: Run,
    kind: str,
    counts: Sequence[int],
    *,
    turns: int = 3,
    repetitions: int = 5,
    steps: int = 3,
    threads: int = 1,
    grow: str = "",
    command: str = "",
    progress: Progress | None = None,
) -> Result:
    """Measure ``run`` on each number of ranks in ``counts``. Meshwright's launcher starts the ranks.

    Args:
        kind: ``strong``: nothing grows; ``batch``: the batch size grows with the number of ranks; ``model``: the key
            ``grow`` of the model grows with it.
        counts: numbers of ranks, ascending; each is compared with the first.
        turns: the number of times that each number of ranks is started.
        repetitions: number of measurements after each start.
        steps: number of training steps in each measurement.
        threads: number of threads of each rank.
        grow: a key of ``[model]`` (``layers``, ``arguments.depth``); empty: the layers of a GPT.

    Raises:
        LayoutError: kind or counts are invalid; the layout or the batch cannot be divided over one of the counts.
        FileFormatError: the model has no such key.
        LaunchError: this process is a rank itself.
    """
    progress = progress or Silent()
    check_alone("bench scaling")
    runs = _planned(run, kind, counts, grow, progress)
    launches: dict[int, list[LaunchTimes]] = {count: [] for count in counts}
    with measuring(progress):
        progress.begin(f"measuring {' '.join(map(str, counts))} ranks", turns * len(counts))
        for turn in range(turns):
            for count in [*counts[turn % len(counts) :], *counts[: turn % len(counts)]]:
                arguments = (runs[count], repetitions, steps, threads)
                launches[count].append(api.run_ranks(measure, *arguments, num_ranks=count))
                progress.advance()
    return Result(
        date=today(),
        name=f"scaling-{kind}",
        command=command,
        machine=this_machine(accelerators=True),
        versions=versions(),
        timed=TIMED.format(
            model=name_of_model(run), optimizer=type(run.optimizer).__name__,
            dtype=run.layout.precision or run.train.dtype,
            turns="once" if turns == 1 else f"{turns} times, by turns",
            threads="one thread" if threads == 1 else f"{threads} threads", warmup=WARMUP_STEPS,
            repetitions=repetitions, steps=steps,
        ),
        settings={name_of(count): settings_of(runs[count], count, threads) for count in counts},
        findings=findings(kind, {count: runs[count].data.batch_size for count in counts}, launches, steps),
    )  # fmt: skip


def grown(run: Run, kind: str, factor: int, grow: str = "") -> Run:
    """The run for ``factor`` times as many ranks.

    Raises:
        FileFormatError: ``grow`` is not a key of the model, or its value is not a whole number.
    """
    replace = msgspec.structs.replace
    if kind == "batch":
        return replace(run, data=replace(run.data, batch_size=run.data.batch_size * factor))
    if kind != "model":
        return run
    plain = RunLayout(**{name: getattr(run.layout, name) for name in ("cluster", "microbatches")})
    if run.layout == plain:  # the run sets no sizes: the growing model is divided over the ranks
        run = replace(run, layout=replace(run.layout, dp=1, tp=-1))
    key = grow or ("layers" if isinstance(run.model, GPTModel) else "")
    if not key:
        raise FileFormatError(
            f"nothing says what grows in a model {name_of_model(run)!r}", where="--grow",
            remedy="name a whole number of [model], such as arguments.depth of a factory",
        )  # fmt: skip
    table, _, name = key.rpartition(".")
    inside = table == "arguments" and isinstance(run.model, FactoryModel)
    values = run.model.arguments if inside and isinstance(run.model, FactoryModel) else msgspec.to_builtins(run.model)
    value = values.get(name) if inside or not table else None
    if isinstance(value, bool) or not isinstance(value, int) or not value:
        raise FileFormatError(
            f"model.{key} is {value!r}", where="--grow", remedy="name a whole number that the file gives in [model]"
        )
    larger = {name: value * factor}
    return replace(run, model=replace(run.model, **({"arguments": values | larger} if inside else larger)))


def check_alone(where: str) -> None:
    """Raise a LaunchError if this process is a rank itself, because ``where`` starts ranks of its own."""
    if launch.launched():
        raise LaunchError("it starts its ranks itself", where=where, remedy="call it without torchrun")


def check_rising(numbers: Sequence[int], what: str, where: str, remedy: str) -> None:
    """Raise a LayoutError unless ``numbers`` are at least two ascending numbers from 1 on."""
    if len(numbers) < 2 or list(numbers) != sorted(set(numbers)) or numbers[0] < 1:
        raise LayoutError(f"{list(numbers)} are not at least two rising {what}", where=where, remedy=remedy)


def _planned(run: Run, kind: str, counts: Sequence[int], grow: str, progress: Progress) -> dict[int, Run]:
    """The runs by number of ranks. Each is planned once, so that errors come before the measurement."""
    if kind not in KINDS:
        raise LayoutError(f"unknown kind {kind!r}", where="--kind", remedy=f"write {', '.join(KINDS)}")
    check_rising(counts, "numbers of ranks", "--ranks", "give the most, as in 4, or several, as in 1,2,4")
    if run.layout.file:
        raise LayoutError(
            "a plan is for one number of ranks", where="layout.plan", remedy="give sizes, such as dp = -1, instead"
        )
    progress.begin("planning", len(counts))
    runs = {}
    for count in counts:
        factor, rest = divmod(count, counts[0])
        if rest and kind != "strong":
            raise LayoutError(
                f"{count} ranks are no multiple of {counts[0]}", where="--ranks",
                remedy="what grows must grow by whole numbers: begin with 1",
            )  # fmt: skip
        runs[count] = grown(run, kind, factor, grow)
        api.plan_run(runs[count], count)
        progress.advance()
    return runs


# --- on every rank ---------------------------------------------------------------------------------------------------


def measure(run: Run, repetitions: int, steps: int, threads: int) -> LaunchTimes:
    """Time the training step on this launch's ranks. On a single rank, also time plain eager PyTorch, in turns."""
    torch.set_num_threads(threads)
    source = build.DataSource(run)
    batches = list(islice(source.training(), NUM_BATCHES))
    trainer = api.trainer_of(run, batches[0])
    sides = {OURS: _over(trainer.step, batches)}
    if trainer.plan.mesh.world_size == 1:
        sides[EAGER] = _over(_eager(run, trainer.device), batches)
    items, unit = source.items_per_step
    return LaunchTimes(
        losses={name: [float(step()) for _ in range(2)] for name, step in sides.items()},
        seconds=alternate(sides, rounds=repetitions, steps=steps),
        parameters=sum(value.numel() for value in build.model(run).parameters()),
        flops=trainer.graph.flops(),
        items=items,
        unit=unit,
    )


def _eager(run: Run, device: torch.device) -> Callable[[Any], Tensor]:
    """The same step in plain eager PyTorch: low precision by autocast, not compiled."""
    model, loss_fn, precision = build.model(run).to(device).train(), build.loss_function(run), run.layout.precision

    def loss_of(model: nn.Module, batch: Any) -> Any:
        with torch.autocast(device.type, getattr(torch, precision or "bfloat16"), enabled=bool(precision)):
            return loss_fn(model, batch)

    step = eager_step(model, loss_of, build.optimizer(run)(list(model.named_parameters())), run.train.max_grad_norm)
    return lambda batch: step(
        {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
    )


def _over(step: Callable[[Any], Tensor], batches: Sequence[Any]) -> Callable[[], Tensor]:
    turn = cycle(batches)
    return lambda: step(next(turn))


# --- findings --------------------------------------------------------------------------------------------------------


def name_of(count: int) -> str:
    """The name of the settings of ``count`` ranks in a result."""
    return "1 rank" if count == 1 else f"{count} ranks"


def findings(
    kind: str, batches: Mapping[int, int], launches: Mapping[int, Sequence[LaunchTimes]], steps: int
) -> tuple[Finding, ...]:
    """The scaling, and the comparison of one rank with eager PyTorch if that was measured."""
    run = uuid.uuid4().hex[:12]
    series = {
        (count, side): Series.of(
            [value for measured in measurements for value in measured.seconds[side]],
            steps=steps, settings=name_of(count), run=run, losses=tuple(measurements[0].losses[side]),
        )
        for count, measurements in launches.items()
        for side in measurements[0].seconds
    }  # fmt: skip
    counts = list(launches)
    first = counts[0]
    points = []
    for count in counts:
        measured = launches[count][0]
        work, base = (float(what.flops if kind == "model" else what.items) for what in (measured, launches[first][0]))
        speedup = ratio_of_medians(series[first, OURS].seconds, series[count, OURS].seconds).times(work / base)
        points.append(
            ScalingPoint(
                series=series[count, OURS], batch=batches[count], parameters=measured.parameters, work=work,
                speedup=speedup.value, interval=speedup.interval, efficiency=speedup.value * first / count,
            )
        )  # fmt: skip
    last = points[-1]
    low, high = last.interval or (0.0, 0.0)
    what = "the same step" if kind == "strong" else f"{KINDS[kind]} grows with the ranks"
    scaled = Scaling(
        target=f"{kind} scaling to {name_of(counts[-1])}: {what}",
        verdict="reported",
        measured=f"speed-up {last.speedup:.2f} (95 %: {low:.2f} to {high:.2f}), efficiency {last.efficiency:.0%}",
        scaling=kind,
        base=f"{name_of(first)} of the same program",
        work_unit="FLOP" if kind == "model" else launches[first][0].unit,
        points=tuple(points),
    )
    if (first, EAGER) not in series:
        return (scaled,)
    sides = {OURS: series[first, OURS], EAGER: series[first, EAGER]}
    over = ratio(sides[OURS].seconds, sides[EAGER].seconds)
    beside = Comparison(
        target="the base case: one rank over eager PyTorch",
        verdict="reported",
        measured=str(over),
        series=sides,
        ours=OURS,
        baseline=EAGER,
        ratio=over.value,
        interval=over.interval,
    )
    return scaled, beside


def settings_of(run: Run, count: int, threads: int) -> Settings:
    """The settings of a run on ``count`` ranks, as a result file holds them."""
    layout = run.layout.sizes().resolved(count)
    sections = {"model": run.model, "data": run.data}
    sizes: dict[str, Scalar] = {
        f"{name}.{key}": value if isinstance(value, Scalar) else str(value)
        for name, section in sections.items()
        for key, value in msgspec.to_builtins(section).items()
    }
    sizes["layout"] = " x ".join(f"{axis}={getattr(layout, axis)}" for axis in ("dp", "tp", "pp"))
    sizes |= {"compile": run.train.compile, "offload": run.layout.offload}
    return Settings(dtype=run.layout.precision or run.train.dtype, ranks=count, threads=threads, sizes=sizes)


def name_of_model(run: Run) -> str:
    """The name of the run's model: its factory, or its kind, such as gpt."""
    return run.model.factory if isinstance(run.model, FactoryModel) else str(run.model.__struct_config__.tag)
