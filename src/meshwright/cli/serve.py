"""``meshwright serve``: workflows of models on tiers of workers: plan, simulate, run, profile."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import typer

from meshwright.cli import display
from meshwright.errors import FileFormatError
from meshwright.ir import units
from meshwright.report.serve_page import ServeFigure, render_serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.serving.explain import PlannedWorkflow
    from meshwright.serving.simulate import PlayedItems
    from meshwright.serving.workflow import Workflow

group = typer.Typer(name="serve", help="Plan, simulate and run workflows of models on tiers of workers.")

TARGET: Any = typer.Argument(..., metavar="WORKFLOW", help="A workflow file (.toml), or the name vqa.")
ITEMS: Any = typer.Option(1000, min=2, help="Items of each source.")
ARRIVALS: Any = typer.Option("even", help="When items come: even or poisson.")
SEED: Any = typer.Option(0, help="Seed of arrivals, of varying seconds, and of items.")
ACCURACY: Any = typer.Option(None, min=0.0, help="The least accuracy, in place of the file's limit.")
PAGE: Any = typer.Option(None, "--page", metavar="FILE.html", help="Write the page too.")


@group.command(epilog=display.examples(
    "meshwright serve plan vqa",
    "meshwright serve plan WORKFLOW.toml --accuracy 58 --page plan.html",
    "meshwright serve plan WORKFLOW.toml --json",
))  # fmt: skip
def plan(
    target: str = TARGET, accuracy: float | None = ACCURACY, arrivals: str = ARRIVALS, seed: int = SEED,
    page: Path | None = PAGE, as_json: bool = display.JSON,
) -> None:  # fmt: skip
    """Choose the models and workers of a workflow, and explain what they cost and what is beside them."""
    workflow, planned = _planned(target, accuracy, arrivals, seed)
    if page is not None:
        from meshwright.serving import explain, simulate

        played = simulate.simulate(
            workflow, planned.plan, items=explain.PLANNED_ITEMS, arrivals=_arrivals(arrivals), seed=seed
        )
        _write_page(page, workflow, planned, played, None, _command("plan", target, accuracy, arrivals, seed))
    if as_json:
        display.print_json(planned)
        return
    _print_plan(workflow, planned)
    if page is not None:
        display.console().print(f"\n-> {page}")


@group.command(epilog=display.examples(
    "meshwright serve simulate vqa",
    "meshwright serve simulate WORKFLOW.toml --items 5000 --arrivals poisson --page simulated.html",
))  # fmt: skip
def simulate(
    target: str = TARGET, accuracy: float | None = ACCURACY, items: int = ITEMS, arrivals: str = ARRIVALS,
    seed: int = SEED, page: Path | None = PAGE, as_json: bool = display.JSON,
) -> None:  # fmt: skip
    """Play a workflow's plan item by item: queues of workers and links, latencies and utilisation."""
    from meshwright.serving import explain
    from meshwright.serving import simulate as room

    workflow, planned = _planned(target, accuracy, arrivals, seed)
    with display.progress(f"simulating {items} items"):
        played = room.simulate(workflow, planned.plan, items=items, arrivals=_arrivals(arrivals), seed=seed)
    if page is not None:
        command = _command("simulate", target, accuracy, arrivals, seed, items=items)
        _write_page(page, workflow, planned, played, None, command)
    figures = explain.figures(played)
    if as_json:
        display.print_json({"figures": figures, "utilisation": played.utilisation, "latencies_s": played.latencies_s})
        return
    _print_figures(figures)
    _print_workers(planned, played, None)
    if page is not None:
        display.console().print(f"\n-> {page}")


@group.command(epilog=display.examples(
    "meshwright serve run WORKFLOW.toml --items 200",
    "meshwright serve run vqa --items 200 --emulate",
    "meshwright serve run WORKFLOW.toml --emulate --links --page run.html",
    "meshwright serve run WORKFLOW.toml --ray --address 10.0.0.1:6379",
    note="""\
Without --ray, every source and worker is a process of this machine. --emulate waits for the seconds of the profile in
place of running models; --links emulates the rates of links between tiers (Linux, root). With --ray, workers are Ray
actors on nodes that have the labels of their tier; without --address, a local Ray cluster starts by itself.""",
))  # fmt: skip
def run(
    target: str = TARGET, accuracy: float | None = ACCURACY,
    items: int = typer.Option(200, min=2, help="Items of each source."), arrivals: str = ARRIVALS, seed: int = SEED,
    emulate: bool = typer.Option(False, "--emulate", help="Wait for the profile's seconds in place of running models."),
    links: bool = typer.Option(False, "--links", help="Emulate the rates of links between tiers, by tc."),
    ray: bool = typer.Option(False, "--ray", help="Run on Ray."),
    address: str = typer.Option("", help="The Ray cluster; empty: a local one is started."),
    page: Path | None = PAGE, as_json: bool = display.JSON,
) -> None:  # fmt: skip
    """Run a workflow's plan with its PyTorch models, and show what is measured beside the prediction."""
    if links and ray:
        raise FileFormatError("links are emulated in local processes only", where="--links", remedy="leave out --ray")
    if address and not ray:
        raise FileFormatError("an address without --ray", where="--address", remedy="add --ray")
    from meshwright.serving import explain, local, on_ray, station
    from meshwright.serving import simulate as room

    workflow, planned = _planned(target, accuracy, arrivals, seed)
    job = station.StationJob(
        workflow=workflow, plan=planned.plan, items=items, arrivals=_arrivals(arrivals), seed=seed, emulate=emulate
    )
    with display.progress(f"running {items} items on {len(job.stations)} stations"):
        measured = on_ray.run_on_ray(job, address) if ray else local.run_locally(job, emulate_links=links)
        predicted = room.simulate(workflow, planned.plan, items=items, arrivals=job.arrivals, seed=seed)
    notes = [f"{len(planned.plan.operator_of)} workers ran {'on Ray' if ray else 'as processes of this machine'}."]
    notes += ["Devices were emulated: workers waited for the seconds of the profile."] * emulate
    notes += ["Links between tiers were emulated by tc."] * links
    if page is not None:
        command = _command(
            "run", target, accuracy, arrivals, seed, items=items, emulate=emulate, links=links, ray=ray, address=address
        )
        _write_page(page, workflow, planned, predicted, measured, command, notes)
    figures = explain.figures(predicted, measured)
    if as_json:
        display.print_json({"figures": figures, "predicted": predicted, "measured": measured, "notes": notes})
        return
    _print_figures(figures)
    _print_workers(planned, predicted, measured)
    for note in notes:
        display.console().print(note)
    if page is not None:
        display.console().print(f"\n-> {page}")


@group.command(epilog=display.examples(
    "meshwright serve profile WORKFLOW.toml --device laptop",
    "meshwright serve profile WORKFLOW.toml --device a100 --cluster a100-80gb-dgx-hdr200x8",
    note="""\
Seconds, their variation and the bytes of results are written into the workflow file, under the name of the device;
comments of the file are not kept. With --cluster nothing is measured: the cost model predicts the seconds.""",
))  # fmt: skip
def profile(
    target: Path = typer.Argument(..., metavar="WORKFLOW.toml", help="The workflow file, with models."),
    device: str = typer.Option(..., help="The kind of device whose seconds are written."),
    cluster: str = typer.Option("", help="Predict for a device of this cluster (a name or a file)."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write this file, and leave the other as it is."),
    as_json: bool = display.JSON,
) -> None:
    """Measure the seconds of a workflow's models on one core of this machine, and write them into its file."""
    from meshwright.serving import profile as room
    from meshwright.serving import reading

    workflow = reading.load(target)
    with display.progress("profiling") as bars:
        profiles = room.profile(workflow, cluster=cluster, progress=bars.say)
    path = output or target
    try:
        reading.save(room.with_profiles(workflow, profiles, device), path)
    except OSError as error:
        raise FileFormatError(
            f"cannot write the file: {error.strerror}", where=str(path), remedy="check the path"
        ) from None
    if as_json:
        display.print_json(profiles)
        return
    table = display.table(
        ("operator", "variant", "measured", "variation", "predicted", "result"), left=("operator", "variant")
    )
    for entry in profiles:
        measured = (units.seconds(entry.measured_s), f"{entry.variation:.0%}") if entry.measured_s else ("", "")
        table.add_row(
            entry.operator, entry.variant, *measured, units.seconds(entry.predicted_s), f"{entry.message_bytes:,} B"
        )
    display.console().print(table)
    display.console().print(f"\n-> {path}")


# --- what the commands share -----------------------------------------------------------------------------------------


def _arrivals(text: str) -> Literal["even", "poisson"]:
    if text not in ("even", "poisson"):
        raise FileFormatError(f"unknown arrivals {text!r}", where="--arrivals", remedy="write even or poisson")
    return cast(Literal["even", "poisson"], text)


def _planned(target: str, accuracy: float | None, arrivals: str, seed: int) -> "tuple[Workflow, PlannedWorkflow]":
    import msgspec

    from meshwright.serving import explain, reading

    workflow = reading.load(target)
    if accuracy is not None:
        limits = msgspec.structs.replace(workflow.limits, accuracy=accuracy)
        workflow = msgspec.structs.replace(workflow, limits=limits)
    with display.progress("choosing models and workers"):
        return workflow, explain.plan_workflow(workflow, arrivals=_arrivals(arrivals), seed=seed)


def _command(name: str, target: str, accuracy: float | None, arrivals: str, seed: int, **options: object) -> str:
    flags = [f"--{key}" for key, value in options.items() if value is True]
    others = {key: value for key, value in options.items() if not isinstance(value, bool)}
    options_set = {"accuracy": accuracy, "arrivals": "" if arrivals == "even" else arrivals, "seed": seed, **others}
    return display.command("serve", name, target, options=options_set, arguments=flags)


def _write_page(
    path: Path, workflow: "Workflow", planned: "PlannedWorkflow", predicted: "PlayedItems",
    measured: "PlayedItems | None", command: str, notes: "Sequence[str]" = (),
) -> None:  # fmt: skip
    from meshwright.serving import explain

    page = explain.page_of(workflow, planned, predicted, measured, command=command, notes=notes)
    display.write(path, render_serve(page).encode())


def _print_plan(workflow: "Workflow", planned: "PlannedWorkflow") -> None:
    from meshwright.serving import explain

    terminal, chosen = display.console(), planned.plan
    terminal.print(f"{planned.usd_per_hour:.5f} $/h at accuracy {chosen.accuracy:g}: {explain.proof(chosen)}")
    terminal.print(
        f"workers {chosen.workers_usd_per_hour:.5g} $/h, links {chosen.links_usd_per_hour:.5g} $/h; "
        f"{planned.throughput_per_s:.4g} items/s, p50 {units.seconds(planned.p50_s)}, "
        f"p99 {units.seconds(planned.p99_s)}"
        + (f", workers at most {chosen.headroom:.0%} busy" if chosen.headroom < 1 else "")
    )
    table = display.table(
        ("operator", "variant", "workers", "busiest", "workers $/h", "links $/h"),
        left=("operator", "variant", "workers"),
    )
    for operator in planned.operators:
        usd = (f"{operator.workers_usd_per_hour:.4g}", f"{operator.links_usd_per_hour:.4g}")
        table.add_row(operator.operator, operator.variant, operator.workers, f"{operator.utilisation:.1%}", *usd)
    terminal.print(table)
    terminal.print(f"next cheaper:       {planned.cheaper or 'none: no choice of models is cheaper'}")
    terminal.print(f"next more accurate: {planned.more_accurate or 'none: the workers do nothing more accurate'}")


def _print_figures(figures: "Sequence[ServeFigure]") -> None:
    measured = any(figure.measured for figure in figures)
    titles = ("", "predicted", "measured", "meas/pred") if measured else ("", "predicted")
    table = display.table(titles, left=("",))
    for figure in figures:
        ratio = f"{figure.ratio:.2f}" if figure.ratio is not None else ""
        table.add_row(figure.name, figure.predicted, *((figure.measured, ratio) if measured else ()))
    display.console().print(table)


def _print_workers(planned: "PlannedWorkflow", predicted: "PlayedItems", measured: "PlayedItems | None") -> None:
    titles = ("worker", "operator", "items/s", "planned", "simulated", *(("measured",) if measured else ()))
    table = display.table(titles, left=("worker", "operator"))
    for choice in planned.plan.choices:
        for load in choice.workers:
            shares = [load.utilisation, predicted.utilisation[load.worker]]
            shares += [measured.utilisation[load.worker]] if measured else []
            table.add_row(load.worker, choice.operator, f"{load.rate_per_s:.4g}", *(f"{share:.1%}" for share in shares))
    display.console().print(table)
