"""``meshwright bench``: measure this machine, measure models on it, and refuse results that mislead."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from meshwright import config
from meshwright.cli import bench_consistency, bench_convolutions, bench_products, display
from meshwright.cli.overrides import EXTRA, overridden, target_of
from meshwright.cli.plan import run_of
from meshwright.cli.trust import TRUST
from meshwright.ir import files, units
from meshwright.ir.result import BatchSizes, Comparison, Result, Scaling, Utilization

if TYPE_CHECKING:
    from meshwright.bench.lint import Refusal

SCALING_EPILOG = display.examples(
    "meshwright bench scaling",
    "meshwright bench scaling gpt --kind batch --ranks 2 --json",
    "meshwright bench scaling RUN.toml --kind strong --ranks 1,2,4 --layout.dp 1 --layout.tp -1 -o scaling.json",
    "meshwright bench scaling gpt --kind model --grow layers",
    note="""\
In strong scaling, model and batch stay the same; otherwise the batch or the model grows with the number of ranks. A
model that grows is divided by tensor parallelism unless the layout says otherwise. Rows with more ranks than cores are
measured too, and marked.""",
)
UTILIZATION_EPILOG = display.examples(
    "meshwright bench utilization",
    "meshwright bench utilization --size 4096 --threads 1 --json",
    "meshwright bench utilization --peak 224e9",
    note="""\
The peak is the larger of two numbers: the speed of the fastest matrix product measured here, and clock x vector width
x cores as Linux reports them (virtual machines often report the base clock). --peak replaces it.""",
)
BATCH_SIZE_EPILOG = display.examples(
    "meshwright bench batch-size --sizes 8,16,32 --target 2.7",
    "meshwright bench batch-size --sizes 8,32,128 --target 2.6 --rules none,sqrt --seeds 3 --optimizer.name lamb",
    "meshwright bench batch-size RUN.toml --sizes 16,64,256 --target 1.9 --ranks 2 --schedule.warmup_steps 100",
    note="""\
The run's learning rate and schedule.warmup_steps hold for the smallest size. No size makes more than train.steps steps.
The knee is the critical batch size: a larger batch takes many more samples, and saves only a few steps.""",
)
CODEC_EPILOG = display.examples(
    'meshwright bench codec --codec "qsgd(4)" --codec "topk(1%)"',
    'meshwright bench codec RUN.toml --codec "powersgd(4)" --ranks 4 --boxes 2 --gbit 0.1 --steps 100',
    note="""\
Losses are measured on held-out data: the mean over the seeds, and the range. In the columns of equal time, a codec
makes as many steps as fit in the time of the dense steps. Emulated boxes need root on Linux. In one box, ranks share
memory, and no codec saves time.""",
)
LINT_EPILOG = display.examples(
    "meshwright bench lint RESULT.json",
    "meshwright bench lint benchmarks/results/foundation.json --json",
    "meshwright bench lint --rules",
    note="The exit code is 1 if a result is refused. The format is explained in docs/reference/result-file.md.",
)
SMALL: dict[str, Any] = {
    "model": {"name": "gpt", "layers": 2, "width": 64, "heads": 2},
    "data": {"kind": "text", "sequence_length": 64, "max_bytes": 1_000_000, "held_out": 0.02},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "train": {"steps": 400},
}
"""The run that ``bench batch-size`` measures by default: a small GPT on text of the standard library."""
TARGET = typer.Argument(
    "gpt", metavar="RUN.toml|MODEL", help=f"A run file, or a model: {', '.join(config.REFERENCES)}."
)
JSON = typer.Option(False, "--json", help="Print the result file.")
OUTPUT = typer.Option(None, "--output", "-o", help="Write the result file.")
THREADS = "Threads of each rank."


def scaling(
    context: typer.Context,
    target: str = TARGET,
    trust: bool = TRUST,
    kind: str = typer.Option("strong", help="What grows with the number of ranks: nothing (strong), batch, or model."),
    ranks: str = typer.Option(
        "",
        help="The largest number of ranks (1, 2, 4, ... are measured), or a list: 1,2,3; empty: the number of cores.",
    ),
    grow: str = typer.Option("", help="With --kind model, the key of [model] that grows; empty: the layers of a GPT."),
    turns: int = typer.Option(3, min=1, help="How often each number of ranks is started; the numbers take turns."),
    repetitions: int = typer.Option(5, min=5, help="Measurements after each start."),
    steps: int = typer.Option(3, min=1, help="Training steps in a measurement."),
    threads: int = typer.Option(1, min=1, help=THREADS),
    as_json: bool = JSON,
    output: Path | None = OUTPUT,
) -> None:
    """Time the training of a model on 1 to N ranks of this machine: speed-up, efficiency, and their spread."""
    target, arguments = target_of(context, target, "gpt")
    run = run_of(target, arguments)
    from meshwright import api
    from meshwright.bench.scaling import scaling as measure_scaling

    counts = counts_of(ranks, api.num_devices())
    numbers = {"turns": turns, "repetitions": repetitions, "steps": steps, "threads": threads}
    options = {"kind": kind, "ranks": ",".join(map(str, counts)), **numbers, "grow": grow}
    command = display.command("bench", "scaling", target, options=options, arguments=arguments)
    with display.cursor_kept(), display.progress() as bars:
        result = measure_scaling(run, kind, counts, grow=grow, command=command, progress=bars, **numbers)
    _deliver(result, as_json, output)


def utilization(
    size: int = typer.Option(2048, min=1, help="Rows and columns of the matrices."),
    batch: int = typer.Option(8, min=1, help="Sequences in the batch of the training steps."),
    repetitions: int = typer.Option(15, min=5, help="Measurements of each product and step."),
    threads: int = typer.Option(0, min=0, help="Threads (cores) to use; 0: all cores."),
    peak: float = typer.Option(0.0, min=0.0, help="The CPU's peak in float32, in FLOP/s; 0: measure it."),
    as_json: bool = JSON,
    output: Path | None = OUTPUT,
) -> None:
    """Measure tuned and naive products and training steps as percent of this CPU's peak, in float32."""
    from meshwright.bench.utilization import utilization as measure_utilization

    options = {"size": size, "batch": batch, "repetitions": repetitions, "threads": threads}
    with display.progress() as bars:
        result = measure_utilization(
            size=size, batch_size=batch, repetitions=repetitions, threads=threads, peak_flops_per_s=peak,
            command=display.command("bench", "utilization", options=options | {"peak": peak and f"{peak:g}"}),
            progress=bars,
        )  # fmt: skip
    _deliver(result, as_json, output)


def batch_size(
    context: typer.Context,
    target: str = typer.Argument("", metavar="RUN.toml|MODEL", help="A run file, or a model; empty: a small GPT."),
    trust: bool = TRUST,
    sizes: str = typer.Option(..., help="Sizes of the global batch in rising order, such as 8,16,32."),
    loss: float = typer.Option(..., "--target", help="The held-out loss at which training ends, such as 2.7."),
    rules: str = typer.Option("none,linear,sqrt", help="Rules by which the learning rate grows with the batch."),
    seeds: int = typer.Option(1, min=1, help="Number of trainings, each with other initial values and data order."),
    evaluate_every: int = typer.Option(10, min=1, help="Steps between two evaluations, at the smallest batch size."),
    ranks: int = typer.Option(1, min=1, help="Ranks that work together."),
    repetitions: int = typer.Option(5, min=5, help="Measurements of a step, for each batch size."),
    steps: int = typer.Option(3, min=1, help="Training steps in a measurement."),
    threads: int = typer.Option(1, min=1, help=THREADS),
    as_json: bool = JSON,
    output: Path | None = OUTPUT,
) -> None:
    """Train to a target loss at several batch sizes; show steps, samples, time and knee for each learning-rate rule."""
    target, arguments = target_of(context, target, "")
    run = run_of(target, arguments) if target else config.make(overridden(SMALL, arguments), where="the small run")
    from meshwright.bench.batch_size import batch_size as measure

    rising = display.numbers(sizes, "--sizes", "write 8,16,32")
    numbers = {
        "seeds": seeds, "evaluate_every": evaluate_every, "ranks": ranks, "repetitions": repetitions, "steps": steps,
        "threads": threads,
    }  # fmt: skip
    options = {"sizes": sizes, "target": f"{loss:g}", "rules": rules, **numbers}
    command = display.command("bench", "batch-size", target, options=options, arguments=arguments)
    with display.cursor_kept(), display.progress() as bars:
        result = measure(run, rising, loss, rules=rules.split(","), command=command, progress=bars, **numbers)
    _deliver(result, as_json, output)


def codec(
    context: typer.Context,
    target: str = typer.Argument("", metavar="RUN.toml|MODEL", help="A run file, or a model; empty: a small GPT."),
    trust: bool = TRUST,
    codecs: list[str] = typer.Option([], "--codec", help="A codec, such as qsgd(4); repeat it for several."),
    ranks: int = typer.Option(2, min=2, help="Ranks that divide the batch."),
    boxes: int = typer.Option(1, min=1, help="Number of emulated boxes that hold the ranks."),
    gbit: float = typer.Option(1.0, help="Rate of the links between emulated boxes, in Gbit/s."),
    steps: int = typer.Option(60, min=1, help="Training steps without a codec."),
    seeds: int = typer.Option(3, min=1, help="Number of trainings, each with other initial values and data order."),
    repetitions: int = typer.Option(7, min=5, help="Measurements of a step, for each codec."),
    as_json: bool = JSON,
    output: Path | None = OUTPUT,
) -> None:
    """Compare codecs with dense gradients: time and bytes of a step, loss after equal steps and after equal time."""
    target, arguments = target_of(context, target, "")
    run = run_of(target, arguments) if target else config.make(overridden(SMALL, arguments), where="the small run")
    from meshwright.bench.codec import codec as measure
    from meshwright.bench.codec import result_of

    counts = {"ranks": ranks, "boxes": boxes, "steps": steps, "seeds": seeds, "repetitions": repetitions}
    with display.cursor_kept(), display.progress() as bars:
        rows = measure(run, codecs, **counts, gbit=gbit, progress=bars)
    options = {**counts, "gbit": f"{gbit:g}" if boxes > 1 else ""}
    coded = [argument for text in codecs for argument in ("--codec", text)]
    command = display.command("bench", "codec", target, options=options, arguments=[*coded, *arguments])
    result = result_of(run, rows, **counts, gbit=gbit, command=command)
    if output is not None:
        display.write(output, files.encode_json(result))
    if as_json:
        typer.echo(files.encode_json(result).decode(), nl=False)
        return
    titles = (
        "codec",
        "a step",
        "of dense",
        "sent",
        f"loss, {steps} steps",
        "range",
        "loss, equal time",
        "range",
        "steps",
    )
    table, dense = display.table(titles, left=("codec",)), rows[0]
    for row in rows:
        table.add_row(
            row.codec, units.seconds(row.median_s), f"{row.median_s / dense.median_s:.2f}", units.size(row.sent_bytes),
            *_spread(row.losses), *_spread(row.losses_in_time), str(row.steps_in_time),
        )  # fmt: skip
    display.console().print(table)


def _spread(losses: tuple[float, ...]) -> tuple[str, str]:
    return f"{sum(losses) / len(losses):.4f}", f"{min(losses):.4f} to {max(losses):.4f}"


def lint(
    result_files: list[Path] = typer.Argument(None, metavar="RESULT.json", help="Result files."),
    rules: bool = typer.Option(False, "--rules", help="List the rules and stop."),
    as_json: bool = typer.Option(False, "--json", help="Print the refusals as JSON."),
) -> int:
    """Refuse benchmark results that mislead. A refusal names the broken rule, the key in the file, and a remedy."""
    from meshwright.bench.lint import RULES
    from meshwright.bench.lint import lint as refusals_of

    if rules:
        titles = ("rule", "asks for", "source")
        table = display.table(titles, left=titles)
        for rule in RULES:
            table.add_row(rule.name, rule.asks, rule.source)
        display.console().print(table)
        return 0
    if not result_files:
        raise typer.BadParameter("give a file: meshwright bench lint RESULT.json")
    by_path = {str(path): refusals_of(files.load(path, Result), path.parent) for path in result_files}
    if as_json:
        display.print_json(by_path)
    else:
        _print_refusals(by_path)
    return 1 if any(by_path.values()) else 0


def counts_of(text: str, cores: int) -> list[int]:
    """The numbers of ranks that a text means: ``4`` means 1, 2, 4; ``6`` means 1, 2, 4, 6; ``1,3`` means 1, 3. An empty
    text means the same as the number ``cores``.

    Raises:
        FileFormatError: the text is not a number or a list of numbers.
    """
    numbers = display.numbers(text, "--ranks", "write 4, or 1,2,4") if text else [cores]
    if len(numbers) > 1:
        return numbers
    most = numbers[0]
    return sorted({most, *(2**power for power in range(max(most, 1).bit_length()) if 2**power <= most)})


def _print_refusals(by_path: "dict[str, tuple[Refusal, ...]]") -> None:
    from meshwright.bench.lint import RULES

    for path, refusals in by_path.items():
        for refusal in refusals:
            typer.echo(f"{path}: {refusal}")
        count = len(refusals)
        summary = f"{count} refusal{'s' if count > 1 else ''}" if count else f"nothing to refuse by {len(RULES)} rules"
        typer.echo(f"{path}: {summary}")


def _deliver(result: Result, as_json: bool, output: Path | None) -> None:
    if output is not None:
        display.write(output, files.encode_json(result))
    if as_json:
        typer.echo(files.encode_json(result).decode(), nl=False)
        return
    terminal = display.console()
    machine, python = result.machine, result.versions
    devices = (
        f"{len(machine.accelerators)} x {machine.accelerators[0]}" if machine.accelerators else f"{machine.cores} cores"
    )
    terminal.print(
        f"{devices} ({machine.cpu}), torch {python.get('torch')}, Python {python.get('python')}\n{result.timed}"
    )
    for finding in result.findings:
        if isinstance(finding, Scaling):
            terminal.print(f"\n{finding.target}; speed-up over {finding.base}\n")
            terminal.print(_points(result, finding))
        elif isinstance(finding, BatchSizes):
            terminal.print(f"\n{finding.target}; {finding.measured}\n")
            terminal.print(_sizes(finding))
        elif isinstance(finding, Comparison):
            sides = ", ".join(f"{name} {series.value_s * 1e3:.4g} ms" for name, series in finding.series.items())
            terminal.print(f"\n{finding.target}: {finding.measured}; {sides}")
    shown = [finding for finding in result.findings if isinstance(finding, Utilization)]
    if shown:
        terminal.print()
        terminal.print(_fractions(shown))
        terminal.print(f"\n100 %: {shown[0].peak.flops_per_s / 1e9:.1f} GFLOP/s, {shown[0].peak.found}")
        for text, flops_per_s in shown[0].notes["other_peaks"].items():
            terminal.print(f"also:  {flops_per_s / 1e9:.1f} GFLOP/s, {text}")


def _points(result: Result, finding: Scaling) -> Table:
    unit = "GFLOP/s" if finding.work_unit == "FLOP" else f"{finding.work_unit}/s"
    titles = ("ranks", "batch", "parameters", "ms/step", "least", "most", unit, "speed-up", "95 %", "efficiency", "")
    table = display.table(titles, left=("",))
    for point in finding.points:
        seconds = point.series.seconds
        rate = point.work / point.series.value_s
        count = result.settings_of(point.series).ranks
        low, high = point.interval or (point.speedup, point.speedup)
        table.add_row(
            f"{count}", f"{point.batch}", f"{point.parameters:,}", f"{point.series.value_s * 1e3:.4g}",
            f"{min(seconds) * 1e3:.4g}", f"{max(seconds) * 1e3:.4g}",
            f"{rate / 1e9:.4g}" if finding.work_unit == "FLOP" else f"{rate:,.0f}", f"{point.speedup:.2f}",
            f"{low:.2f} to {high:.2f}" if point.speedup != 1 else "", f"{point.efficiency:.0%}",
            "more ranks than cores: not to be judged" if count > result.machine.num_devices else "",
        )  # fmt: skip
    return table


def _sizes(finding: BatchSizes) -> Table:
    titles = ("rule", "batch", "lr", "steps", "samples", "ms/step", "time to target")
    table = display.table(titles, left=("rule",))
    rules = list(dict.fromkeys(point.rule for point in finding.points))
    for point in sorted(finding.points, key=lambda point: rules.index(point.rule)):
        reached = point.steps_to_target > 0
        table.add_row(
            point.rule, f"{point.batch}", f"{point.lr:.3g}",
            f"{point.steps_to_target:,}" if reached else "not reached",
            f"{point.samples_to_target:,}" if reached else "", f"{point.series.value_s * 1e3:.4g}",
            f"{point.target_s:.3g} s" if reached else "",
        )  # fmt: skip
    return table


def _fractions(shown: list[Utilization]) -> Table:
    titles = ("", "ms", "least", "most", "GFLOP/s", "of the peak", "95 %")
    table = display.table(titles, left=("",))
    for row in shown:
        seconds, (low, high) = row.series.seconds, row.interval or (row.fraction, row.fraction)
        table.add_row(
            row.series.settings, f"{row.series.value_s * 1e3:.4g}", f"{min(seconds) * 1e3:.4g}",
            f"{max(seconds) * 1e3:.4g}", f"{row.flops / row.series.value_s / 1e9:.4g}", f"{row.fraction:.1%}",
            f"{low:.1%} to {high:.1%}",
        )  # fmt: skip
    return table


def _help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


group = typer.Typer(
    name="bench",
    help="Measure scaling, utilization, batch sizes, codecs, consistency rules, convolutions, and products on grids; "
    "refuse what misleads.",
    rich_markup_mode="rich",
)
group.callback(invoke_without_command=True)(_help)
group.command(context_settings=EXTRA, epilog=SCALING_EPILOG)(scaling)
group.command(epilog=UTILIZATION_EPILOG)(utilization)
group.command(context_settings=EXTRA, epilog=BATCH_SIZE_EPILOG)(batch_size)
group.command(context_settings=EXTRA, epilog=CODEC_EPILOG)(codec)
group.command(context_settings=EXTRA, epilog=bench_consistency.EPILOG)(bench_consistency.consistency)
group.command(context_settings=EXTRA, epilog=bench_convolutions.EPILOG)(bench_convolutions.convolutions)
group.command(epilog=bench_products.EPILOG)(bench_products.products)
group.command(epilog=LINT_EPILOG)(lint)
