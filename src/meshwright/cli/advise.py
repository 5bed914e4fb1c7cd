"""``meshwright advise``: read a configuration of another trainer, predict it, and show a faster layout."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli import display
from meshwright.cli.export import costs
from meshwright.ir import files
from meshwright.report.plan_difference import difference_text

if TYPE_CHECKING:
    from meshwright.export.advice import Advice, Better

EPILOG = display.examples(
    "meshwright advise train.toml --cluster h100-dgx-ndr400x8 --ranks 64",
    "meshwright advise pretrain.sh --cluster a100-80gb-dgx-hdr200x8 --ranks 128 --output better",
    "meshwright advise ds_config.json --model llama3-8b --cluster h100-dgx-ndr400x8 --ranks 16",
    note="A configuration of torchtitan (.toml, .py), Megatron-LM (arguments, also in a shell script), DeepSpeed "
    "(.json) or accelerate (.yaml). Python files are read, not run.",
)


def advise(
    config: str = typer.Argument(..., metavar="CONFIG", help="The configuration file of another trainer."),
    cluster: str = typer.Option(..., help="A name of `meshwright clusters`, or a .toml file."),
    ranks: int = typer.Option(0, min=0, help="Number of ranks; 0: all devices of the cluster."),
    model: str = typer.Option(
        "", help="A name of `meshwright models`, or a config.json: if the configuration has no model sizes."
    ),
    sequence: int = typer.Option(0, "--seq", min=0, help="Tokens per sequence, with --model; 0: its default."),
    batch: int = typer.Option(0, min=0, help="Sequences per step; 0: those of the configuration."),
    source: str = typer.Option(
        "", "--from", help="torchtitan, megatron, deepspeed or accelerate; default: by the file."
    ),
    software: str = typer.Option("", help="The software profile of predictions; default: that of the trainer."),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="The folder for the faster layout's configuration."
    ),
    as_json: bool = display.JSON,
) -> int:
    """Read a configuration of another trainer, predict its step, and show the best layout beside it."""
    from meshwright import prediction
    from meshwright.export import advice as advices

    text = files.read_bytes(config).decode(errors="replace")
    machine = prediction.load_cluster(cluster, ranks or None)
    sizes = prediction.load_model(model, sequence=sequence) if model else None
    with display.progress("weighing layouts"):
        advice = advices.advise(
            text, config, machine, num_ranks=ranks, model=sizes, source=source, global_batch=batch, software=software
        )
    if output is not None and advice.best is not None:
        for name, changed in advice.best.export.files.items():
            display.write(output / name, changed.encode())
    if as_json:
        display.print_json(advice)
    else:
        _print(advice, output)
    return 1 if advice.verdict == "does not fit" else 0


def _print(advice: "Advice", output: Path | None) -> None:
    terminal = display.console()
    imported, setup = advice.imported, advice.setup
    axes = " x ".join(f"{axis}={getattr(setup, axis)}" for axis in ("dp", "cp", "tp", "pp", "ep"))
    terminal.print(f"{setup.model.name}, {imported.source}: {axes}, {setup.microbatches} micro-batches")
    for line in imported.assumptions:
        terminal.print(f"  assumed: {line}")
    for line in imported.unread:
        terminal.print(f"  not read: {line}")
    terminal.print(f"  predicted (software {advice.software}): {costs(advice.prediction)}; {advice.verdict}")
    if advice.best is None:
        terminal.print(f"  no other layout that {imported.source} can run is faster")
    else:
        _print_better(advice, advice.best, f"the fastest layout that {imported.source} can run")
        if output is not None:
            terminal.print(f"  written: {', '.join(str(output / name) for name in advice.best.export.files)}")
    if advice.beyond is not None:
        _print_better(advice, advice.beyond, f"faster still, but {imported.source} cannot express it")
        for gap in advice.beyond.export.gaps:
            terminal.print(f"    {gap.what}")


def _print_better(advice: "Advice", better: "Better", title: str) -> None:
    terminal = display.console()
    ratio = better.prediction.step_s / advice.prediction.step_s
    terminal.print(f"{title}: {costs(better.prediction)}, {ratio:.3f} x the step; {better.verdict}")
    terminal.print(difference_text(better.changes))
