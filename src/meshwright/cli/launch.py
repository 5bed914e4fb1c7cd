"""``meshwright launch RUN.toml --on ENGINE``: start a run on this machine, on several hosts, or on a cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import typer

from meshwright import config
from meshwright.cli import display
from meshwright.cli.overrides import overridden
from meshwright.cli.train import run_training, summarize, with_directory
from meshwright.cli.trust import TRUST, is_trusting, read_run
from meshwright.engines.job import Job, shell
from meshwright.errors import FileFormatError, LaunchError, PreemptedError
from meshwright.ir import files
from meshwright.ir.nodes import Engine

EPILOG = display.examples(
    "meshwright launch gpt.toml --on slurm --nodes.count 4 --nodes.ranks_per_node 8 --nodes.time_limit_s 14400",
    "meshwright launch gpt.toml --on kubernetes --nodes cluster.toml --dry-run",
    "meshwright launch gpt.toml --on torchrun --nodes hosts.toml     on every host",
    note="The table [nodes] of RUN.toml, or a file with the keys of this table, describes the nodes.",
)


def launch(
    context: typer.Context,
    file: Path = typer.Argument(..., metavar="RUN.toml", help="What to train, on what, how and where."),
    on: str = typer.Option("local", metavar="ENGINE", help=f"What starts the ranks: {', '.join(get_args(Engine))}."),
    nodes: Path | None = typer.Option(None, help="A TOML file with keys of [nodes], in place of that table."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print what would be run or submitted, and stop."),
    detach: bool = typer.Option(False, "--detach", help="Submit a Slurm job without watching it."),
    trust: bool = TRUST,
) -> None:
    """Start the run of a RUN.toml on nodes. Keys of the file are options, too: --SECTION.KEY VALUE."""
    if on not in get_args(Engine):
        remedy = files.did_you_mean(on, get_args(Engine), f"known: {', '.join(get_args(Engine))}")
        raise FileFormatError(f"{on!r} is no engine", where="--on", remedy=remedy)
    raw = read_run(file)
    if nodes is not None:
        described = config.read(nodes)
        raw["nodes"] = described.get("nodes", described)
    raw = overridden(raw, context.args)
    run = with_directory(config.make(raw, where=str(file)), f"runs/{file.stem}")
    code = _STARTS[on](Job(run=run, file=file, arguments=tuple(context.args), trust=is_trusting()), dry_run, detach)
    if code:
        raise typer.Exit(code)


def _local(job: Job, dry_run: bool, detach: bool) -> int:
    if job.nodes.count > 1:
        raise LaunchError(
            f"{job.nodes.count} nodes, and this engine has one",
            where="nodes.count",
            remedy="choose another engine: --on torchrun starts the ranks of one host of several",
        )
    run = job.run
    if job.nodes.ranks_per_node:
        run = msgspec.structs.replace(run, train=msgspec.structs.replace(run.train, ranks=job.nodes.ranks_per_node))
    if dry_run:
        from meshwright import api

        command = job.command(ranks=job.nodes.ranks_per_node)
        typer.echo(f"# {run.num_ranks(api.num_devices())} ranks on this machine\n{shell(command)}")
    else:
        run_training(run)
    return 0


def _torchrun(job: Job, dry_run: bool, detach: bool) -> int:
    from meshwright.engines import torchrun

    if dry_run:
        typer.echo(torchrun.described(job))
    else:
        run_training(job.run, meeting=torchrun.meeting(job))
    return 0


def _slurm(job: Job, dry_run: bool, detach: bool) -> int:
    from meshwright.engines import slurm

    if dry_run:
        typer.echo(slurm.described(job), nl=False)
        return 0
    return slurm.start(job, display.console().print, detach=detach)


def _ray(job: Job, dry_run: bool, detach: bool) -> int:
    from meshwright.engines import ray

    if dry_run:
        typer.echo(ray.described(job))
        return 0
    result = ray.start(job, display.console().print)
    summarize(job.run, result, False)
    return PreemptedError.CODE if result.stopped else 0


def _kubernetes(job: Job, dry_run: bool, detach: bool) -> int:
    from meshwright.engines import kubernetes

    if dry_run:
        typer.echo(kubernetes.described(job), nl=False)
        return 0
    return kubernetes.start(job, display.console().print)


_STARTS: dict[str, Callable[[Job, bool, bool], int]] = {
    "local": _local, "torchrun": _torchrun, "slurm": _slurm, "ray": _ray, "kubernetes": _kubernetes,
}  # fmt: skip
