"""``meshwright jobs GRAPH.toml``: check, plan and run a job graph."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec
import typer

from meshwright.cli import display
from meshwright.errors import FileFormatError

if TYPE_CHECKING:
    from meshwright.ir.job_run import JobRecord

log = logging.getLogger("meshwright")

EPILOG = display.examples(
    "meshwright jobs GRAPH.toml --plan",
    "meshwright jobs GRAPH.toml",
    "meshwright jobs GRAPH.toml --address 10.0.0.1:6379 --directory /shared/runs/graph",
    "meshwright jobs GRAPH.toml --on here --json",
    note="""\
Functions and commands that the file names are run: run only files that you trust. After Ctrl-C, a failure or a crash,
the same command goes on: vertices whose code, inputs and outputs are unchanged are not run again. On a Ray cluster, all
nodes must share the file system of the directory.""",
)


def jobs(
    file: Path = typer.Argument(..., metavar="GRAPH.toml", help="The vertices, and the channels between them."),
    plan: bool = typer.Option(False, "--plan", help="Check, draw and cost the graph, and run nothing."),
    on: str = typer.Option("ray", "--on", help="ray: a Ray cluster; here: processes of this machine."),
    address: str = typer.Option("", help="The Ray cluster; default: a local one starts, and ends with the command."),
    directory: Path | None = typer.Option(
        None, "--directory", "-d", metavar="DIR", help="Outputs and journal; default: runs/ and the file's name."
    ),
    page: Path | None = typer.Option(
        None, "--page", metavar="FILE", help="The page; default: jobs.html in DIR, and none with --plan."
    ),
    as_json: bool = display.JSON,
) -> None:
    """Run a job graph: prepare, train, evaluate, export, or any function and command. Each vertex starts as soon as its
    inputs and its resources are there. A vertex that died runs again alone."""
    from meshwright import jobs as room
    from meshwright.jobs.run import CarrierName
    from meshwright.report.jobs_page import render_jobs

    carrier = next((carrier_name for carrier_name in get_args(CarrierName) if carrier_name == on), None)
    if carrier is None:
        remedy = f"write {' or '.join(get_args(CarrierName))}"
        raise FileFormatError(f"{on!r} runs no jobs", where="--on", remedy=remedy)
    graph = room.load(file)
    if not graph.name or graph.name == "jobs":
        graph = msgspec.structs.replace(graph, name=file.stem)
    folder, runs = file.parent, directory or Path("runs") / file.stem
    options = {"on": "" if on == "ray" else on, "address": address, "directory": directory}
    command = display.command("jobs", str(file), options=options, arguments=["--plan"] * plan)
    terminal = display.console()
    if plan:
        record = room.plan_jobs(graph, folder, runs, where=str(file))
        if page is not None:
            display.write(page, render_jobs(record, command).encode())
    else:
        with display.progress() as bars:

            def planned(forecast: "JobRecord") -> None:
                if not as_json:
                    terminal.print(_text(forecast))
                bars.begin("starting", len(forecast.rows))

            running: dict[str, None] = {}

            def tell(event: str, name: str) -> None:
                if event == "started":
                    running[name] = None
                elif event in ("finished", "reused"):
                    bars.advance()
                    log.info("%s %s", event, name)
                for unit in [unit for unit in running if event != "started" and name in (unit, *unit.split("+"))]:
                    del running[unit]
                bars.say(f"running {', '.join(running)}" if running else "waiting")

            try:
                record = room.run_jobs(
                    graph, folder, runs, on=carrier, address=address, tell=tell,
                    planned=planned, where=str(file),
                )  # fmt: skip
            except KeyboardInterrupt:
                bars.end()
                log.info("finished vertices are kept in %s: the same command goes on", runs)
                raise
        display.write(page or runs / "jobs.html", render_jobs(record, command).encode())
    if as_json:
        display.print_json(record)
        return
    if plan:
        terminal.print(_text(record))
    else:
        from meshwright.report.jobs_page import jobs_sentence

        terminal.print(f"{jobs_sentence(record)}\n-> {page or runs / 'jobs.html'}")


def _text(record: "JobRecord") -> str:
    """The graph's picture, its cost and its notes."""
    from meshwright.report.job_drawing import graph_text
    from meshwright.report.jobs_page import jobs_sentence

    nodes = "; ".join(f"{name}: {text}" for name, text in record.nodes.items())
    return "\n".join([f"{record.name} on {nodes}", graph_text(record), jobs_sentence(record), *record.notes])
