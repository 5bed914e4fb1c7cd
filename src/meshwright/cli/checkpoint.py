"""``meshwright checkpoint``: list, verify, reshard and export checkpoints."""

from pathlib import Path

import typer

from meshwright.cli import display
from meshwright.errors import CheckpointError

group = typer.Typer(
    name="checkpoint",
    help="List, verify, reshard and export checkpoints: directories, or URLs of object stores (s3://bucket/run).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

PLACE = typer.Argument(..., metavar="PATH", help="A checkpoint, a directory of checkpoints, or a run's directory.")


@group.command(epilog=display.examples("meshwright checkpoint ls runs/gpt", "meshwright checkpoint ls s3://bucket/run"))
def ls(path: str = PLACE, as_json: bool = display.JSON) -> None:
    """List checkpoints, the latest first, with what is wrong with them. Only manifests and sizes are looked at."""
    from meshwright import api

    checkpoints = api.list_checkpoints(path)
    if as_json:
        display.print_json(checkpoints)
        return
    table = display.table(
        ("step", "size", "files", "model", "optimizer", "state", "path"), left=("model", "optimizer", "state", "path")
    )
    for checkpoint in checkpoints:
        size = f"{checkpoint.num_bytes / 2**20:,.1f} MiB" if checkpoint.num_bytes else ""
        files = f"{checkpoint.files}" if checkpoint.files else ""
        step = f"{checkpoint.step}" if checkpoint.step >= 0 else ""
        table.add_row(
            step, size, files, checkpoint.model, checkpoint.optimizer, checkpoint.problem or "whole", checkpoint.path
        )
    display.console().print(table)


@group.command(epilog=display.examples(
    "meshwright checkpoint verify runs/gpt", note="The exit code is 1 where a checkpoint is damaged.",
))  # fmt: skip
def verify(path: str = PLACE, as_json: bool = display.JSON) -> int:
    """Read checkpoints and compare all checksums."""
    from meshwright import api

    rows = []
    with display.progress() as bars:
        checkpoints = api.list_checkpoints(path)
        bars.begin("reading", total=len(checkpoints))
        for checkpoint in checkpoints:
            problem = checkpoint.problem
            if not problem:
                try:
                    api.verify_checkpoint(checkpoint.path)
                except CheckpointError as error:
                    problem = f"{error.where}: {error.problem}"
            rows.append((checkpoint.path, problem))
            bars.advance()
    if as_json:
        display.print_json([{"path": path, "problem": problem} for path, problem in rows])
    else:
        table = display.table(("", "checkpoint", "problem"), left=("", "checkpoint", "problem"), wrapped=("problem",))
        for path, problem in rows:
            table.add_row("FAIL" if problem else "pass", path, problem)
        display.console().print(table)
    return 1 if any(problem for _, problem in rows) else 0


@group.command(epilog=display.examples(
    "meshwright checkpoint reshard runs/gpt/checkpoints/step-00000200 resharded --ranks 2",
    note="""\
A checkpoint loads under any layout and number of ranks without this command. Written anew for the ranks that will load
it, it is read faster. The command also writes checkpoints of older versions of Meshwright in the present version, and
copies between disks and object stores. It needs memory for one chunk.""",
))  # fmt: skip
def reshard(
    path: str = PLACE,
    target: str = typer.Argument(..., metavar="TARGET", help="The new checkpoint: a new directory or URL."),
    ranks: int = typer.Option(1, "--ranks", min=1, help="Ranks: each gets a file with its rows of tensors."),
) -> None:
    """Write a checkpoint anew, as another number of ranks would have saved it."""
    from meshwright import api

    with display.progress("writing"):
        source = api.reshard_checkpoint(path, target, ranks)
    display.console().print(f"{source} is written to {target} for {ranks} rank{'s' if ranks > 1 else ''}")


@group.command(epilog=display.examples(
    "meshwright checkpoint export runs/gpt gpt-hf --config config.json --dtype bfloat16",
    note="""\
The tensors have the names that they have in the model. With the config of the same architecture, from_pretrained of
Hugging Face loads the folder.""",
))  # fmt: skip
def export(
    path: str = PLACE,
    folder: Path = typer.Argument(..., metavar="FOLDER", help="The folder to write."),
    config: str = typer.Option("", "--config", metavar="FILE", help="The config.json to put beside the weights."),
    dtype: str = typer.Option("", "--dtype", help="float32, bfloat16 or float16; default: as they are."),
    max_gb: float = typer.Option(5.0, "--max-gb", min=0.001, help="Largest size of a file in GB."),
) -> None:
    """Write the weights of a checkpoint as a folder of Hugging Face: safetensors files, their index, and the config."""
    from meshwright import api

    with display.progress("writing"):
        source, count = api.export_checkpoint(
            path, folder, config=config, dtype=dtype, max_file_bytes=int(max_gb * 10**9)
        )
    display.console().print(f"{count} tensors of {source} are written to {folder}")
