"""``meshwright plan``: show how a model is divided over ranks, and why, without running it."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from meshwright import config
from meshwright.cli import display
from meshwright.cli.layouts import recomputation, show_layouts
from meshwright.cli.networks import show_network
from meshwright.cli.overrides import overridden
from meshwright.cli.pages import write_report
from meshwright.cli.sweeps import show_sweep
from meshwright.cli.trust import TRUST, read_run
from meshwright.errors import ClusterError, FileFormatError, LayoutError
from meshwright.ir import files
from meshwright.ir.call_text import sizes_of
from meshwright.ir.layout import Layout
from meshwright.ir.plan import Plan
from meshwright.ir.run import Run
from meshwright.report.plan_difference import difference, difference_text
from meshwright.report.program_text import program_text

if TYPE_CHECKING:
    from meshwright.api import QuickAnswer

log = logging.getLogger("meshwright")

EPILOG = display.examples(
    "meshwright plan gpt --dp 2 --tp 2",
    "meshwright plan RUN.toml --ranks 8 --cluster a100-80gb-dgx --output plan.json",
    "meshwright plan gpt --tp 4 --model.width 1024 --model.heads 16 --json",
    "meshwright plan gpt --dp 2 --layout.microbatches 4 --program",
    "meshwright plan llama3-70b --cluster h100-dgx-ndr400x8 --ranks 256 --batch 512",
    "meshwright plan gpt3-175b --cluster a100-80gb-dgx-hdr200x8 --batch 1536 --vary devices=256..2048",
    "meshwright plan llama3-8b --cluster h100-dgx-ndr400x8 --ranks 32 "
    "--vary cluster=h100-dgx-ndr400x8,h200-dgx-ndr400x8",
    "meshwright plan llama3-70b --cluster h100-dgx-ndr400x8 --ranks 256 --report plan.html",
    "meshwright plan RUN.toml --ranks 8 --layout.plan auto --why-not dp=8,zero=1",
    "meshwright plan RUN.toml --cluster h100-dgx-ndr400x8 --vary devices=8..1024",
    'meshwright plan gpt --layout.plan auto --ranks 4 --allow "local(16)" --allow "diloco(50)"',
    "meshwright plan RUN.toml --cluster cluster.toml --layout.plan auto --codec auto",
    "meshwright plan diff OLD.json NEW.json",
    "meshwright plan resnet --workspace 64MiB",
    "meshwright plan alexnet --cluster v100-dgx1-edr100x4 --ranks 8 --batch 1024",
    note="A model of `meshwright models`, or a Hugging Face config.json, is not captured: its layouts are "
    "compared by its sizes.",
)
TARGET: Any = typer.Argument(
    ..., metavar="RUN.toml|MODEL", help=f"A run file, or a model: {', '.join(config.REFERENCES)}."
)
PLANNED: Any = typer.Argument(
    ...,
    metavar="RUN.toml|MODEL",
    help=f"A run file, or a model: {', '.join(config.REFERENCES)}. `diff OLD NEW` compares two plan files.",
)
DP: Any = typer.Option(None, "--dp", help="Data-parallel size; -1: all ranks that other axes leave.")
STRICT: Any = typer.Option(False, "--strict", help="Refuse a model with an operator that no rule splits.")
TP: Any = typer.Option(
    None, "--tp", help="Tensor-parallel size; -1: all ranks that other axes leave; or a grid of ranks, as in 2x2x2."
)
RANKS: Any = typer.Option(0, help="Number of ranks; 0: the number in the layout, or all of the cluster.")
CLUSTER: Any = typer.Option("", help="A name of `meshwright clusters`, or a .toml file; default: this machine.")
OF_CAPTURED = (
    "dp", "tp", "strict", "output", "memory", "workspace", "seconds", "fresh", "program", "rank", "why_not", "only",
    "allow",
)  # fmt: skip
"""Options that do not apply to a model that is planned from its sizes."""
OF_SIZES = ("batch", "sequence", "price", "software", "recompute", "report")
"""Options that do not apply to a model that is captured."""
OF_ONE = ("dp", "tp", "output", "program", "rank", "why_not", "allow")
"""Options that need one plan as the answer."""


def plan(
    context: typer.Context,
    target: str = PLANNED,
    dp: int | None = DP,
    tp: str | None = TP,
    strict: bool = STRICT,
    trust: bool = TRUST,
    ranks: int = RANKS,
    cluster: str = CLUSTER,
    as_json: bool = typer.Option(False, "--json", help="Print the plan as JSON; with --program, the program."),
    codec: str = typer.Option("", help="The codec of gradients, as in qsgd(4); auto: the fastest, or no codec."),
    program: bool = typer.Option(False, "--program", help="Print the program of a rank: its phases, node by node."),
    rank: int = typer.Option(0, "--rank", min=0, help="The rank for --program."),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="Write the plan to a file, which layout.plan can name."
    ),
    seconds: float | None = typer.Option(
        None, help="Time limit of the search of layout.plan = auto, which then takes the best layout so far."
    ),
    allow: list[str] = typer.Option(
        [],
        "--allow",
        help="A consistency rule under which layout.plan = auto may join replicas, as in local(16). May be repeated.",
    ),
    fresh: bool = typer.Option(
        False, "--fresh", help="Search again, even if the cache has the plan of an equal search."
    ),
    why_not: str = typer.Option("", "--why-not", help="Explain why this layout was not chosen, as in dp=8,tp=2."),
    only: str = typer.Option(
        "",
        "--only",
        help="Only divide operators (intra), only make stages (inter), or all three searches side by side (each).",
    ),
    workspace: str = typer.Option(
        "", "--workspace", help="Limit on the temporary memory of each convolution, as in 64MiB."
    ),
    memory: str = typer.Option(
        "",
        "--memory",
        help="Memory for the tensors of a rank, as in 8GiB; default: the amount that surely fits a device.",
    ),
    batch: int = typer.Option(512, min=1, help="Sequences or images per step, for a model of `meshwright models`."),
    sequence: int = typer.Option(
        0, "--seq", min=0, help="Tokens per sequence, for a model of `meshwright models`; 0: its default."
    ),
    vary: str = typer.Option(
        "",
        help="Show the best layout for each value: devices=64..512 or cluster=A,B; for a model of `meshwright models` "
        "also seq=.. or batch=..",
    ),
    price: float = typer.Option(
        0.0,
        min=0.0,
        help="US dollars per device and hour, for a model of `meshwright models`; 0: the catalog's price, if any.",
    ),
    software: str = typer.Option(
        "",
        help="The training software, for a model of `meshwright models`: a name of `meshwright clusters --software`, "
        "or a .toml file.",
    ),
    recompute: str = typer.Option(
        "",
        help="Consider only this recomputation (none, selective, full), for a model of `meshwright models`; default: "
        "all.",
    ),
    report: Path | None = typer.Option(
        None, help="Write an HTML page of the plan, for a model of `meshwright models`."
    ),
    scaling: str = typer.Option(
        "strong",
        help="With --vary devices: strong (the batch stays), or weak (the batch grows; for a model of `meshwright "
        "models`).",
    ),
) -> int:
    """Show how a model is divided over ranks, module by module, with the reasons."""
    from meshwright import prediction

    if target == "diff":
        names = (name for name in context.params if name not in ("target", "as_json"))
        refuse(context, names, "two plan files are compared")
        return show_difference(context.args, as_json)
    network = target in prediction.network_names()
    by_name = network or target in prediction.model_names() or target.endswith(".json")
    if target not in config.REFERENCES and by_name:
        reason = f"{target} is not captured; its layouts are compared by its sizes"
        refuse(context, OF_CAPTURED, reason)
        if context.args:
            raise LayoutError(reason, where=context.args[0], remedy="leave it out")
        if scaling not in ("strong", "weak"):
            raise LayoutError(f"unknown scaling {scaling!r}", where="--scaling", remedy="write strong or weak")
        if not cluster:
            raise ClusterError(
                "no cluster is named", where="--cluster", remedy="give a name of `meshwright clusters`, or a .toml file"
            )
        if network:
            unfit = ("sequence", "price", "report", "scaling", "codec", "recompute")
            refuse(context, unfit, f"{target} is a convolution network")
            return show_network(target, cluster, ranks, batch, vary, software, as_json)
        kind = recomputation(recompute)
        if report is not None:
            refuse(context, ("codec",), "the page shows plans without codecs")
            if vary:
                raise LayoutError(
                    "a report is of one plan", where="--report", remedy="leave out --vary: the page has a scaling curve"
                )
            options = {
                "cluster": cluster,
                "ranks": f"{ranks}",
                "batch": batch,
                "seq": sequence,
                "price": f"{price:g}" if price else "",
                "software": software,
                "recompute": recompute,
            }
            command = display.command("plan", target, options=options)
            return write_report(report, target, cluster, ranks, batch, sequence, price, software, kind, command)
        return show_layouts(
            target, cluster, ranks, batch, sequence, vary, scaling, price, software, codec, kind, as_json
        )
    limited = [f"--layout.seconds={seconds}"] if seconds is not None else []
    limited += [f"--layout.codec={codec}"] * bool(codec)
    if workspace:
        limited.append(f"--layout.workspace_bytes={display.num_bytes(workspace, '--workspace')}")
    run = run_of(target, [*limited, *context.args], dp, tp, cluster, strict)
    refuse(context, OF_SIZES, f"{target} is captured as it is: its run file has batch and sequence length")
    from meshwright import api

    limit = display.num_bytes(memory, "--memory") if memory else None
    if limit == 0:
        raise LayoutError(f"{memory} is no memory", where="--memory", remedy="give more, or leave it out")
    if vary:
        refuse(context, (*OF_ONE, "only"), "--vary searches for a plan at each value, and shows their costs")
        if vary.startswith("devices"):
            refuse(context, ("ranks",), "--vary gives the numbers of devices")
        return show_sweep(run, ranks, limit, vary, scaling, fresh, as_json)
    refuse(context, ("scaling",), "there is one number of devices")
    if only:
        refuse(context, OF_ONE, "--only searches for plans, and shows their costs")
        return show_searches(run, ranks, limit, only, fresh, as_json)
    with display.progress("capturing and planning") as bars, display.Interrupt(bars.say) as interrupt:

        def quick(answer: "QuickAnswer") -> None:
            interrupt.asked()  # from here on there is an answer, so Ctrl-C ends the search instead of the command
            log.info("%s; the exact search follows", answer.text)

        try:
            planned = api.plan_run(
                run, ranks, limit, lambda what: bars.say(f"planning: {what}"), rank if program else None,
                layout_of(why_not) if why_not else None, fresh=fresh, stop=interrupt.asked, quick=quick,
                allow=allow,
            )  # fmt: skip
        except LayoutError as error:
            if not interrupt.pressed:
                raise
            typer.echo(f"meshwright: {error.problem}", err=True)
            return display.INTERRUPTED
    chosen = planned.plan
    if output is not None:
        display.write(output, files.encode_json(chosen))
    if as_json:
        typer.echo(files.encode_json(planned.programs or chosen).decode(), nl=False)
    elif planned.programs is not None:
        display.console().print(program_text(planned.programs))
    else:
        display.console().print(chosen.explain())
        if chosen.prediction is not None and (interval_s := chosen.prediction.interval_s) is not None:
            between = f"{interval_s.low * 1e3:.4g} to {interval_s.high * 1e3:.4g} ms in 80 % of runs"
            display.console().print(f"  a step takes {between} (software {planned.software})")
        display.console().print(f"  constants of the cluster: {planned.constants}")
        room = f"{planned.memory_bytes / 2**30:.3g} GiB a rank"
        beside = f", with {planned.copies}" if planned.copies.total_bytes else ""
        chance = f"(chance {planned.fit_chance:.0%}){beside}"
        display.console().print(f"  memory: {planned.verdict} in {room} {chance}")
        for change in planned.changes:
            costs = f"{change.step_s * 1e3:.4g} ms a step, {change.peak_bytes / 2**30:.3g} GiB a rank"
            if chosen.prediction is not None:
                now_s = chosen.prediction.step_s * chosen.mesh.world_size / chosen.batch_size
                costs += f", {change.sample_device_s / now_s - 1:+.0%} device time for a sample"
            display.console().print(f"    it fits with {change.text}: {costs}")
        if planned.verdict == "does not fit" and not planned.changes and not chosen.layout.stage_sizes:
            display.console().print("    no single change makes it fit: --layout.plan auto looks for another layout")
        if planned.lost is not None:
            lost = planned.lost
            costs = f"{lost.step_s * 1e3:.4g} ms a step, {lost.peak_memory_bytes / 2**30:.3g} GiB a rank, "
            display.console().print(f"  why not {lost.layout}: {costs if lost.step_s else ''}{lost.why}")
    return display.INTERRUPTED if interrupt.pressed else 0


def show_searches(run: Run, ranks: int, memory_bytes: float | None, only: str, fresh: bool, as_json: bool) -> int:
    """Print the plans of searches that only divide operators, only make stages, or do both.

    Raises:
        LayoutError: ``only`` is none of these.
    """
    from meshwright import api

    if only not in ("intra", "inter", "each"):
        raise LayoutError(f"{only!r} is no kind of search", where="--only", remedy="write intra, inter or each")
    with display.progress("capturing and planning") as bars:
        searches = api.searches_of(
            run, ranks, memory_bytes, only, lambda what: bars.say(f"planning: {what}"), fresh=fresh
        )
    if as_json:
        typer.echo(files.encode_json(searches).decode(), nl=False)
        return 0
    table = Table("search", "layout", "ms a step", "communicates MiB", "ms waiting", "GiB a rank", box=None)
    for row in searches.searches:
        mib, gib = row.communicated_bytes / 2**20, row.peak_memory_bytes / 2**30
        numbers = (row.step_s * 1e3, mib, row.waiting_s * 1e3, gib) if row.layout else ()
        table.add_row(row.only, row.problem or row.layout, *(f"{number:.4g}" for number in numbers))
    display.console().print(table)
    return 0


def show_difference(paths: list[str], as_json: bool) -> int:
    """Print the decisions that differ between two plan files.

    Raises:
        LayoutError: there are not two files.
        FileFormatError: a file is not a plan.
    """
    if len(paths) != 2:
        raise LayoutError(
            f"{len(paths)} plans are given", where="meshwright plan diff", remedy="give two: OLD.json NEW.json"
        )
    old, new = (files.load(Path(path), Plan) for path in paths)
    changes = difference(old, new)
    if as_json:
        typer.echo(files.encode_json(changes).decode(), nl=False)
    else:
        display.console().print(difference_text(changes))
    return 0


def layout_of(text: str) -> Layout:
    """The layout that a text such as ``dp=8,tp=2`` describes.

    Raises:
        LayoutError: a word is not ``name=value``, there is no field of that name, or it cannot have that value.
    """
    fields: dict[str, Any] = {}
    known = Layout.__struct_fields__
    for word in text.split(","):
        name, has_value, value = word.strip().partition("=")
        if not has_value or name not in known:
            hint = files.did_you_mean(name, known, "write it as in dp=8,tp=2")
            raise LayoutError(f"{word.strip()!r} is not a size or option of a layout", where="--why-not", remedy=hint)
        words: dict[str, Any] = {"true": True, "false": False}
        number = int(value) if value.lstrip("-").isdigit() else words.get(value, value)
        fields[name] = sizes_of(value) or number
    return Layout(**fields)


def refuse(context: typer.Context, names: Iterable[str], reason: str) -> None:
    """Refuse options that do not apply, if the command line contains them.

    Raises:
        LayoutError: one of ``names`` was given; the error names the first.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--seq" if name == "sequence" else f"--{name.replace('_', '-')}"
            raise LayoutError(reason, where=option, remedy=f"leave out {option}")


def run_of(
    target: str,
    arguments: list[str],
    dp: int | None = None,
    tp: str | None = None,
    cluster: str = "",
    strict: bool = False,
) -> Run:
    """The run of a file, or the reference run of a model's name, with the options of the command line applied."""
    if target in config.REFERENCES:
        raw = config.REFERENCES[target]
    elif Path(target).suffix == ".toml" or Path(target).exists():
        raw = read_run(target)
    else:
        from meshwright import prediction

        known = [*config.REFERENCES, "RUN.toml", *prediction.model_names(), *prediction.network_names()]
        remedy = files.did_you_mean(target, known, f"models: {', '.join(config.REFERENCES)}")
        raise FileFormatError("neither a file nor a model", where=target, remedy=remedy)
    chosen = [f"--layout.{name}={size}" for name, size in (("dp", dp), ("tp", tp)) if size is not None]
    if tp is not None and dp is None:
        chosen.append("--layout.dp=1")
    if cluster:
        chosen.append(f"--layout.cluster={cluster}")
    if strict:
        chosen.append("--layout.strict=true")
    return config.make(overridden(raw, [*chosen, *arguments]), where=target)
