"""``meshwright explain RUN_DIR``: why the ranks of a run wait, or for what they waited when they ended."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshwright.cli import display

if TYPE_CHECKING:
    from meshwright.ir.flight import Flight

EPILOG = display.examples(
    "meshwright explain runs/gpt",
    "meshwright explain runs/gpt --events 20",
    "meshwright explain runs/gpt --json",
    note="""\
Each rank records its last 1,000 operations in RUN_DIR/ranks/N.flight, which stays when the rank is gone. Ranks of this
machine that live are asked where they are: the answer is their stack. Ranks of your own program record in the
directory that MESHWRIGHT_FLIGHTS names.""",
)


def explain(
    directory: Path = typer.Argument(..., metavar="RUN_DIR", help="The directory of the run, which may still run."),
    events: int = typer.Option(0, "--events", metavar="N", help="Also print the last N operations of each rank."),
    as_json: bool = display.JSON,
) -> None:
    """Explain a hang: which rank is missing, in which operation, what each other rank waits for, and where they are."""
    from meshwright import api

    explanation = api.explain_run(directory)
    if as_json:
        display.print_json(explanation)
        return
    terminal = display.console()
    if explanation.hang is not None:
        lines = list(explanation.hang.lines)
    else:
        lines = [
            "no rank waits for long",
            *(f"  rank {rank}: {each.doing}" for rank, each in sorted(explanation.ranks.items())),
        ]
    living = any(each.condition != "ended" for each in explanation.ranks.values())
    if explanation.reported and not living:
        lines += ["", "while it ran, this was reported:", *explanation.reported.splitlines()]
    for rank, each in sorted(explanation.ranks.items()) if events else ():
        lines += ["", f"rank {rank}:", *_events(each.flight, events)]
    for line in lines:
        terminal.print(line)


def _events(record: "Flight", most: int) -> list[str]:
    """The last events of a rank, one a line: when they began, how long they were waited for, and what they were."""
    lines = []
    for event in record.events[-most:]:
        end_s = abs(event.done_s) or record.now_s
        waited = f"waited {1e3 * (end_s - event.waits_s):9.2f} ms" if event.waits_s else " " * 19
        state = "" if event.done_s > 0 else "  failed" if event.done_s < 0 else "  not done"
        ago_s = record.now_s - event.begun_s
        lines.append(f"  {ago_s:9.3f} s ago  {waited}  #{event.sequence} {event.what}{state}")
    return lines
