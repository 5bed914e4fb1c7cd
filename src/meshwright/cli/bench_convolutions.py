"""``meshwright bench convolutions``: the algorithms of a model's convolutions, time against samples."""

from pathlib import Path

import typer

from meshwright import config
from meshwright.cli import display
from meshwright.cli.overrides import overridden, target_of
from meshwright.cli.plan import run_of
from meshwright.cli.trust import TRUST
from meshwright.ir import units
from meshwright.ir.algorithm_times import AlgorithmTiming

EPILOG = display.examples(
    "meshwright bench convolutions",
    "meshwright bench convolutions RUN.toml --ranks 2 --threads 1",
    note="""\
The times go into a table in the user's cache, beside the calibration. Plans of given layouts for this machine read
the table. They do so with `meshwright plan MODEL --workspace 64MiB`; without a limit, they do so if another algorithm
is faster than PyTorch's own.
""",
)
SMALL = config.REFERENCES["resnet"]
"""The run that is measured by default."""


def convolutions(
    context: typer.Context,
    target: str = typer.Argument("", metavar="RUN.toml|MODEL", help="A run file, or a model; empty: resnet."),
    trust: bool = TRUST,
    ranks: int = typer.Option(1, min=1, help="The number of ranks over which the layout divides the convolutions."),
    threads: int = typer.Option(1, min=1, help="Threads of each rank."),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="The table file to extend; default: in the user's cache."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the measured times as JSON."),
) -> None:
    """Measure the algorithms of a model's convolutions, for 1, 2, 4, ... samples, and keep the times for plans."""
    target, arguments = target_of(context, target, "")
    run = run_of(target, arguments) if target else config.make(overridden(SMALL, arguments), where="resnet")
    from meshwright import api

    with display.cursor_kept(), display.progress("measuring convolutions") as bars:
        measured = api.measure_convolutions(run, ranks, bars.say, threads=threads, path=output)
    if as_json:
        display.print_json(measured)
        return
    shapes: dict[object, list[AlgorithmTiming]] = {}
    for timing in measured.timings:
        if timing.piece:
            continue
        shapes.setdefault(timing.sizes._replace(samples=0), []).append(timing)
    for timings in shapes.values():
        _print(timings)
    display.console().print(f"\nwritten to {output or api.times_file(threads)}")


def _print(timings: list[AlgorithmTiming]) -> None:
    """A table of one convolution: a row for each algorithm, a column for each number of samples."""
    counts = sorted({timing.sizes.samples for timing in timings})
    sizes = max((timing.sizes for timing in timings), key=lambda sizes: sizes.samples)
    image, kernel = ("x".join(map(str, numbers)) for numbers in (sizes.image, sizes.kernel))
    terminal = display.console()
    terminal.print(
        f"\n{sizes.direction}: {sizes.channels} channels of {image} -> {sizes.filters} filters of {kernel}, "
        f"stride {max(sizes.stride)}"
    )
    titles = ("algorithm", *(f"{count}" for count in counts), "workspace of all")
    table = display.table(titles, left=("algorithm",))
    for name in dict.fromkeys(timing.algorithm for timing in timings):
        own = {timing.sizes.samples: timing for timing in timings if timing.algorithm == name}
        cells = [units.seconds(own[count].seconds) if count in own else "" for count in counts]
        last = own.get(counts[-1])
        table.add_row(name, *cells, units.size(last.workspace_bytes) if last is not None else "")
    terminal.print(table)
