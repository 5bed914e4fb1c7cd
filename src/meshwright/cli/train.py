"""``meshwright train RUN.toml``: train the model of a run file, on this machine's cores or under torchrun."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from meshwright import config
from meshwright.cli import display
from meshwright.cli.calibrate import calibrate_once, print_learned
from meshwright.cli.overrides import keys, overridden
from meshwright.cli.plan import STRICT
from meshwright.cli.trust import TRUST, read_run
from meshwright.errors import ClusterError, FailedRankError, PreemptedError
from meshwright.ir.run import Run

if TYPE_CHECKING:
    from meshwright.api import Meeting, Trained

EPILOG = display.examples(
    "meshwright train gpt.toml",
    "meshwright train gpt.toml --optimizer.lr 3e-4 --layout.tp 2",
    "torchrun --nproc-per-node 4 -m meshwright.cli train gpt.toml",
    note="If a rank is lost, all ranks start again from a copy of the state in memory, or from the last checkpoint. "
    "The same command, run again, also continues from the last checkpoint. After SIGTERM or SIGUSR1, the run saves and "
    "ends with exit code 75: it can continue later.",
)
RECALIBRATE: Any = typer.Option(
    False, "--recalibrate", help="Correct this machine's calibration with the times that the run measures."
)


def train(
    context: typer.Context,
    file: Path = typer.Argument(..., metavar="RUN.toml", help="The run file: model, data, optimizer, layout."),
    feed_back: bool = RECALIBRATE,
    strict: bool = STRICT,
    trust: bool = TRUST,
    compile: bool = typer.Option(False, "--compile", help="Join operators into kernels; needs a C++ compiler."),
    list_keys: bool = typer.Option(False, "--keys", help="List all keys with their defaults and stop."),
) -> None:
    """Train the model of a RUN.toml. Every key of the file is an option too: --SECTION.KEY VALUE."""
    if list_keys:
        for name, default, owner in keys():
            typer.echo(f"--{name:<28} {default:<22} {owner}".rstrip())
        return
    chosen = [*(["--layout.strict=true"] if strict else []), *(["--train.compile=true"] if compile else [])]
    raw = overridden(read_run(file), [*chosen, *context.args])
    run_training(with_directory(config.make(raw, where=str(file)), f"runs/{file.stem}"), feed_back=feed_back)


def with_directory(run: Run, directory: str) -> Run:
    """The run, with ``directory`` filled in if the run names no directory."""
    return msgspec.structs.replace(
        run, train=msgspec.structs.replace(run.train, directory=run.train.directory or directory)
    )


def run_training(run: Run, *, feed_back: bool = False, meeting: "Meeting | None" = None) -> None:
    """Train on the ranks that a launcher has started, or start the ranks first. Then print the results.

    ``feed_back``: correct this machine's calibration with the run's ledger. ``meeting``: where this
    launcher meets the launchers of other hosts, which run the same; by default the place that Kubernetes has set in the
    environment.
    """
    from meshwright import api

    if api.launched():
        result = display.on_rank(api.train, run)
        if api.launched_rank() == 0:
            summarize(run, result, feed_back)
        if result.stopped:
            raise typer.Exit(PreemptedError.CODE)
        return
    meeting = meeting or api.meeting()
    if feed_back and run.layout.cluster:
        raise ClusterError(
            "only what is known of this machine can be corrected",
            where="--recalibrate",
            remedy="leave layout.cluster out",
        )
    if (run.layout.searched and not run.layout.cluster) or feed_back:
        calibrate_once()
    if api.num_replica_jobs(run) > 1:
        summarize(run, run_replicas(run), feed_back)
        return
    num_ranks = (meeting and meeting.ranks_per_host) or api.ranks_here(run)
    beside = f" on each of {meeting.num_hosts} hosts," if meeting is not None else ""
    display.console().print(f"starting {num_ranks} rank{'s' if num_ranks > 1 else ''}{beside} in {run.train.directory}")
    if num_ranks > max(api.num_cores(), api.num_devices()):
        display.console().print(
            f"warning: {num_ranks} ranks share {api.num_cores()} cores: they take turns, and no step gets faster"
        )
    directory = Path(run.train.directory)
    again = api.Restarts(directory / "checkpoints", display.console().print)
    port = run.train.port
    try:
        with display.cursor_kept():
            result = api.run_ranks(
                display.on_rank, api.train, run, num_ranks=num_ranks, directory=directory, port=port, again=again,
                meeting=meeting, fits=partial(api.can_use, run),
            )  # fmt: skip
    except FailedRankError as error:
        raise api.too_large(run, error, num_ranks) if again.out_of_memory else error from None
    except KeyboardInterrupt:
        whole = sorted((directory / "checkpoints").glob("step-*/manifest.json"))
        if whole:
            display.console().print(f"{whole[-1].parent} is saved: --train.directory {directory} goes on from there")
        raise
    summarize(run, result, feed_back)
    if result.stopped:
        raise typer.Exit(PreemptedError.CODE)


def run_replicas(run: Run) -> "Trained":
    """Start each replica as a job of its own, so that the other replicas continue if it dies."""
    from meshwright import api

    num_replicas, each = api.num_replica_jobs(run), api.ranks_of_replica(run)
    ranks = f" of {each} ranks" if each > 1 else ""
    display.console().print(f"starting {num_replicas} replicas{ranks} in {run.train.directory}")
    with display.cursor_kept():
        return api.run_replicas(
            display.on_rank, api.train, run, num_replicas=num_replicas, num_ranks=each,
            directory=Path(run.train.directory), tell=display.console().print,
        )  # fmt: skip


def summarize(run: Run, result: "Trained", feed_back: bool) -> None:
    """Print the results of a run, and correct the calibration if ``feed_back`` is set."""
    from meshwright import api

    terminal = display.console()
    if result.stopped:
        what = f"step {result.steps} of {run.train.steps} is saved" if result.steps else "nothing was made"
        terminal.print(f"stopped by {result.stopped}; {what}: the same command goes on from there")
        return
    if result.text:
        prompt = run.sample.prompt.strip() if run.sample is not None else ""
        terminal.print(f"\n--- it writes{f', after {prompt!r}' if prompt else ''}:\n{result.text}\n---\n")
    if result.held_out:
        first, last = result.held_out[0], result.held_out[-1]
        terminal.print(f"held out: after step {first.step}: {first}")
        terminal.print(f"          after step {last.step}: {last}")
    if result.ledger is not None:
        terminal.print(f"\n{result.ledger.table()}\n", highlight=False)
    terminal.print(
        f"the run lies in {result.directory}: metrics.jsonl, plan.json, run.toml, checkpoints; `meshwright report "
        f"{result.directory}` makes a page of it"
    )
    if not feed_back:
        return
    if result.ledger is None:
        terminal.print("nothing is corrected: fewer than 2 steps were made, or nothing was predicted")
    else:
        learned = api.recalibrate(result.ledger)
        print_learned(learned)
        terminal.print(f"corrected: {learned.cluster.source}, in {api.calibration_file()}")
