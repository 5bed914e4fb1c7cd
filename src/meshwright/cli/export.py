"""``meshwright export``: write a plan or a layout as the configuration of another trainer."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright import config
from meshwright.cli import display
from meshwright.cli.overrides import target_of
from meshwright.cli.plan import refuse, run_of
from meshwright.cli.trust import TRUST
from meshwright.errors import ClusterError, LayoutError

if TYPE_CHECKING:
    from meshwright.export.exported import Exported
    from meshwright.ir.plan import Prediction

EPILOG = display.examples(
    "meshwright export llama3-8b --to torchtitan --cluster h100-dgx-ndr400x8 --ranks 64 --batch 512",
    "meshwright export llama3-70b --to megatron --cluster h100-dgx-ndr400x8 --ranks 64 --batch 512 "
    "--layout tp=8,pp=4,sequence_parallel=true --output exported",
    "meshwright export plan.json RUN.toml --to fsdp2 --output exported",
    "meshwright export gpt --to deepspeed --layout.dp 2 --layout.zero 1",
    note="The export names each part that the trainer cannot express, with its replacement, and predicts both forms.",
)
OF_SIZES = ("batch", "sequence", "layout", "software")
"""Options that do not apply to a captured model."""
OF_RUNS = ("cluster", "ranks")
"""Options that do not apply to a plan file without its run."""


def export(
    context: typer.Context,
    target: str = typer.Argument(
        ..., metavar="PLAN.json|RUN.toml|MODEL", help="A plan file, a run file, or a model of `meshwright models`."
    ),
    run_file: str = typer.Argument(
        "", metavar="[RUN.toml|MODEL]", help="The run of a plan file: for fsdp2, and to predict the exported form."
    ),
    to: str = typer.Option(..., "--to", help="torchtitan, megatron, deepspeed, accelerate or fsdp2."),
    cluster: str = typer.Option("", help="A name of `meshwright clusters`, or a .toml file; default: this machine."),
    ranks: int = typer.Option(0, min=0, help="Number of ranks; 0: the number in the layout, or all of the cluster."),
    batch: int = typer.Option(512, min=1, help="Sequences per step, for a model that is described by its sizes."),
    sequence: int = typer.Option(0, "--seq", min=0, help="Tokens per sequence, for such a model; 0: its default."),
    layout: str = typer.Option(
        "", help="The layout of such a model, as in dp=8,tp=8,micro_batch=2; default: the planner's best."
    ),
    software: str = typer.Option("", help="The software profile of predictions, for such a model."),
    base: str = typer.Option("", help="For torchtitan: the configuration to change, as in llama3:llama3_8b."),
    output: Path | None = typer.Option(None, "--output", "-o", help="The folder in which files are written."),
    trust: bool = TRUST,
    as_json: bool = display.JSON,
) -> int:
    """Write a plan, or a layout by sizes, as the configuration and the launch command of another trainer."""
    from meshwright import prediction

    run_file, arguments = target_of(context, run_file, "")
    sizes = target in prediction.model_names() and target not in config.REFERENCES
    sizes = sizes or (target.endswith(".json") and not run_file and _is_model(target))
    if sizes:
        if extra := [*([run_file] if run_file else []), *arguments]:
            problem = f"{target} is described by its sizes, and takes neither a run file nor keys of one"
            raise LayoutError(problem, where=extra[0], remedy="leave it out; --layout has the layout")
        exported = _of_sizes(target, to, cluster, ranks, batch, sequence, layout, software, base)
    else:
        refuse(context, OF_SIZES, f"{target} is captured: its run file has batch and layout")
        if target.endswith(".json") and not run_file:
            refuse(context, OF_RUNS, f"{target} is exported without its run, for the devices of the plan")
        exported = _of_captured(arguments, target, run_file, to, cluster, ranks, base)
    if output is not None:
        for name, text in exported.files.items():
            display.write(output / name, text.encode())
    if as_json:
        display.print_json(exported)
    else:
        _print(exported, output)
    return 0


def _is_model(path: str) -> bool:
    """Whether a JSON file is a Hugging Face config.json, and no plan."""
    try:
        return b'"architectures"' in Path(path).read_bytes() or b'"model_type"' in Path(path).read_bytes()
    except OSError:
        return False


def _of_sizes(
    model: str, to: str, cluster: str, ranks: int, batch: int, sequence: int, layout: str, software: str, base: str,
) -> "Exported":  # fmt: skip
    from meshwright import prediction
    from meshwright.export.by_sizes import export_sizes

    if not cluster:
        raise ClusterError(
            "no cluster is named", where="--cluster", remedy="give a name of `meshwright clusters`, or a .toml file"
        )
    machine = prediction.load_cluster(cluster, ranks or None, software or None)
    known = prediction.load_model(model, sequence=sequence)
    return export_sizes(to, known, machine, global_batch=batch, layout=layout, base=base)


def _of_captured(
    arguments: list[str], target: str, run_file: str, to: str, cluster: str, ranks: int, base: str
) -> "Exported":
    from meshwright.export import captured
    from meshwright.ir import files
    from meshwright.ir.plan import Plan

    if target.endswith(".json") and not run_file:
        return captured.export_plan(to, files.load(target, Plan), base)
    if target.endswith(".json"):
        arguments = [f"--layout.plan={target}", *arguments]
    run = run_of(run_file or target, arguments, cluster=cluster)
    with display.progress("capturing and planning"):
        return captured.export_run(to, run, ranks, base)


def _print(exported: "Exported", output: Path | None) -> None:
    terminal = display.console()
    if output is None:
        for name, text in exported.files.items():
            terminal.print(f"--- {name}\n{text}---")
    else:
        terminal.print(f"written: {', '.join(str(output / name) for name in exported.files)}")
    terminal.print(f"start it: {exported.command}")
    for line in exported.in_code:
        terminal.print(f"  in your program: {line}")
    for gap in exported.gaps:
        terminal.print(f"  {exported.target} cannot express: {gap.what}\n    instead: {gap.nearest}")
    for line in exported.assumptions:
        terminal.print(f"  assumed: {line}")
    software = f" (software {exported.software})" if exported.software else ""
    if exported.planned is not None:
        terminal.print(f"  predicted as planned{software}: {costs(exported.planned)}")
    if exported.predicted is not None:
        more = ""
        if exported.planned is not None and exported.gaps:
            more = f", {exported.predicted.step_s / exported.planned.step_s:.3f} x the step"
        terminal.print(f"  predicted as exported{software}: {costs(exported.predicted)}{more}")
    elif exported.gaps:
        terminal.print("  the exported form is not predicted: name the run file too, after the plan file")
    if exported.own_predicted is not None:
        terminal.print(f"  predicted as exported (software {exported.own_software}): {costs(exported.own_predicted)}")


def costs(prediction: "Prediction") -> str:
    """Step time and memory in words."""
    step = f"{prediction.step_s:.4g} s" if prediction.step_s >= 1 else f"{prediction.step_s * 1e3:.4g} ms"
    return f"{step} a step, {prediction.peak_memory_bytes / 2**30:.3g} GiB a rank"
