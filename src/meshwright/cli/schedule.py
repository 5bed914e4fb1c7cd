"""``meshwright schedule``: draw a pipeline schedule, with its bubble, live micro-batches and sent bytes."""

from pathlib import Path

import msgspec
import typer

from meshwright.cli import display
from meshwright.errors import FileFormatError, ScheduleError
from meshwright.ir import files
from meshwright.ir.schedule import Schedule
from meshwright.schedules import passes, picture, pipeline
from meshwright.schedules.check import ScheduleReport, check

EPILOG = display.examples(
    "meshwright schedule 1f1b --stages 4 --microbatches 8",
    "meshwright schedule interleaved --stages 4 --microbatches 8 --chunks 2 --bytes 16MiB",
    "meshwright schedule zb-v --stages 4 --microbatches 8 --chunks 2",
    "meshwright schedule message-driven --stages 4 --microbatches 8",
    "meshwright schedule zb-h1 --stages 4 --microbatches 8 --text > zb-h1.csv",
    "meshwright schedule --file zb-h1.csv",
)


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``--json``."""

    schedule: Schedule
    report: ScheduleReport
    sent_bytes_per_microbatch: tuple[int, ...] | None = None


def schedule(
    name: str = typer.Argument("", help=f"A schedule: {', '.join(pipeline.NAMES)}."),
    stages: int | None = typer.Option(None, help="Ranks of the pipeline. Each has one stage, or --chunks stages."),
    microbatches: int | None = typer.Option(None, help="Micro-batches per step."),
    chunks: int = typer.Option(1, help="Stages per rank, for interleaved; zb-v and dualpipe-v always have 2."),
    file: Path | None = typer.Option(
        None, "--file", help="Check a schedule from a file: PyTorch's CSV (one line per rank), or Meshwright's .json."
    ),
    size: str = typer.Option(
        "", "--bytes", help="Size of the activation (or gradient) that passes between stages: 16MiB."
    ),
    whole: bool = typer.Option(False, "--whole", help="Draw all ranks and time slots, even if there are many."),
    as_text: bool = typer.Option(
        False, "--text", help="Print all actions as text that PyTorch reads, one line per rank."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print schedule and report as JSON."),
) -> None:
    """Draw and check a pipeline schedule: bubble, live micro-batches, sends. A backward counts as twice the time of a
    forward."""
    num_bytes = display.num_bytes(size, "--bytes") if size else None
    with display.progress("building and checking the schedule"):
        if file is None:
            sched = _built(name, stages, microbatches, chunks)
            report = check(sched)
        elif name or (stages, microbatches, chunks) != (None, None, 1):
            raise FileFormatError(
                "a file says itself which stages and micro-batches it has",
                where="--file",
                remedy="leave out NAME, --stages, --microbatches and --chunks",
            )
        else:
            sched, report = _read(file)
    if as_json:
        sent = None if num_bytes is None else tuple(stats.sent_per_microbatch * num_bytes for stats in report.ranks)
        printed = files.encode_json(Checked(schedule=sched, report=report, sent_bytes_per_microbatch=sent)).decode()
        typer.echo(printed, nl=False)
    elif as_text:
        typer.echo(sched.to_text(","), nl=False)
    else:
        _print(sched, report, num_bytes, whole)


def _built(name: str, stages: int | None, microbatches: int | None, chunks: int) -> Schedule:
    if not name or stages is None or microbatches is None:
        option = "NAME" if not name else "--stages" if stages is None else "--microbatches"
        remedy = "write NAME --stages P --microbatches M, or --file FILE"
        raise FileFormatError("is missing", where=option, remedy=remedy)
    computing = pipeline.build(name, stages, microbatches, chunks)
    return passes.add_reduction(passes.add_communication(computing))


def _read(file: Path) -> tuple[Schedule, ScheduleReport]:
    """Read a schedule from a file and check it; errors name the file."""
    try:
        text = file.suffix != ".json"
        sched = Schedule.from_text(file.read_text().rstrip(), name=file.stem) if text else files.load(file, Schedule)
        return sched, check(sched)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise FileFormatError(f"cannot read the file: {reason}", where=str(file), remedy="check the path") from None
    except ScheduleError as error:
        where = error.where if error.where.startswith(f"{file}") else f"{file}: {error.where}"
        raise ScheduleError(error.problem, where=where, remedy=error.remedy) from None


def _size_text(num_bytes: int) -> str:
    unit = next((unit for unit in ("Ti", "Gi", "Mi", "Ki") if display.UNITS[unit] <= num_bytes), "")
    return f"{num_bytes / display.UNITS[unit]:.4g} {unit}B"


def _print(sched: Schedule, report: ScheduleReport, num_bytes: int | None, whole: bool) -> None:
    counts = ((len(sched.ranks), "rank"), (sched.num_stages, "stage"), (sched.num_microbatches, "micro-batch"))
    words = [f"{count} {what}{'' if count == 1 else 'es' if what.endswith('h') else 's'}" for count, what in counts]
    drawn = picture.timeline(sched, tuple(stats.times for stats in report.ranks), whole=whole)
    typer.echo(f"{sched.name}: {', '.join(words)}\n\n{drawn}")
    titles = ("rank", "stages", "bubble", "live micro-batches", "sent per micro-batch")
    table = display.table(titles, left=("stages",))
    for rank, stats in enumerate(report.ranks if whole else report.ranks[: picture.MOST_RANKS]):
        sent = f"{stats.sent_per_microbatch} tensor{'' if stats.sent_per_microbatch == 1 else 's'}"
        if num_bytes is not None:
            sent = _size_text(stats.sent_per_microbatch * num_bytes)
        table.add_row(
            str(rank), " ".join(map(str, stats.stages)), f"{stats.bubble:.4g}", f"{stats.live_microbatches:.4g}", sent
        )
    terminal = display.console()
    terminal.print(table)
    terminal.print(
        f"\nbubble: {report.bubble:.4g} of the time that a rank computes; at most {report.live_microbatches:.4g} "
        "micro-batches alive on a rank"
    )
    if sched.in_flight:
        terminal.print(
            f"the order is a rule: this is the one that arises if nothing is late; at most {sched.in_flight} "
            "micro-batches are in flight on a rank"
        )
    if not whole and "\ndrawn: " in drawn:
        terminal.print("the first ranks and slots are shown: --whole draws all of it, --text and --json print it")
