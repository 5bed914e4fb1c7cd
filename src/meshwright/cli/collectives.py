"""``meshwright collectives``: compare the algorithms of a collective, and draw their rounds."""

import typer

from meshwright.cli import display
from meshwright.errors import ScheduleError
from meshwright.schedules.collectives.operations import ALGORITHMS, build
from meshwright.schedules.collectives.picture import rounds

MOST_DRAWN = 256
"""The largest number of ranks whose rounds can be drawn."""
EPILOG = display.examples(
    "meshwright collectives --ranks 8 --bytes 1MiB",
    "meshwright collectives all_gather --ranks 16 --bytes 64MiB --cluster h100-dgx-ndr400x8",
    "meshwright collectives --ranks 4 --picture ring",
    'meshwright collectives --ranks 8 --bytes 64MiB --codec "topk(1%)+qsgd(4)"',
)


def collectives(
    operation: str = typer.Argument("all_reduce", help=f"One of {', '.join(ALGORITHMS)}."),
    ranks: int = typer.Option(8, help="Number of ranks, on the first devices of the cluster."),
    size: str = typer.Option("1MiB", "--bytes", help="Size of the vector that each rank holds, in float32."),
    cluster: str = typer.Option("a100-80gb-dgx-hdr200x8", help="A name of `meshwright clusters`, or a .toml file."),
    codec: str = typer.Option("", help="A codec for the messages: qsgd(4), topk(1%)+qsgd(4), lossless, ..."),
    picture: str = typer.Option("", help="Draw the rounds of this algorithm instead."),
    as_json: bool = display.JSON,
) -> None:
    """Compare the algorithms of a collective: rounds, bytes in total and at the busiest rank, and time on a cluster."""
    num_bytes = display.num_bytes(size, "--bytes")
    if picture:
        _draw(operation, picture, ranks, as_json)
        return
    from meshwright.prediction.collectives import compare

    with display.progress("simulating"):
        comparison = compare(operation, cluster, ranks, num_bytes, codec)
    if as_json:
        display.print_json(comparison)
        return
    terminal = display.console()
    form = f"float32, coded as {comparison.codec}" if comparison.codec else "float32"
    typer.echo(f"{operation} of {_size(num_bytes)} over {ranks} ranks of {comparison.cluster}, {form}\n")
    titles = ("", "rounds", "moved", "busiest", "peak", "fan-in", "alone", "shared links", "bits")
    table = display.table(titles, left=("", "bits"))
    for row in comparison.rows:
        counted = row.count
        shared = "" if row.shared_s is None else _time(row.shared_s)
        table.add_row(
            row.algorithm, str(counted.rounds), *(map(_size, (counted.moved, counted.busiest, counted.peak))),
            str(counted.fan_in), _time(row.alone_s), shared, "same" if row.same else "differ",
        )  # fmt: skip
    terminal.print(table)
    typer.echo(
        "\nbusiest: through the busiest rank of each round, added up; peak: through one rank in one round"
        "\nalone: a rank sends one message at a time, over links of its own; shared links: all of a round at once"
        "\nbits: whether ranks end with the same ones; where they differ, an algorithm is never chosen"
    )
    if comparison.codec:
        typer.echo(
            "moved and times of coded messages: selections as expected if ranks choose independently, lossless at most;"
            "\nrounds in which sizes are sent count too; times leave out encoding and decoding"
        )
    for each in comparison.refused:
        typer.echo(f"not with this codec: {each.algorithm}: {each.reason}")
    for title, best in (("alone", comparison.best_alone), ("shared links", comparison.best_shared)):
        if best:
            where = [f"{crossover.algorithm} from {_size(crossover.from_bytes)}" for crossover in best[1:]]
            typer.echo(f"\nfastest, {title}: {', '.join([best[0].algorithm, *where])}", nl=False)
    typer.echo()


def _draw(operation: str, algorithm: str, ranks: int, as_json: bool) -> None:
    if ranks > MOST_DRAWN:
        raise ScheduleError(f"{ranks} ranks", where="--ranks", remedy=f"draw 1 to {MOST_DRAWN}")
    pieces = 1 if operation == "barrier" else 2 * ranks  # enough parts for any algorithm
    steps = build(operation, algorithm, ranks, pieces)
    if as_json:
        display.print_json(steps)
        return
    typer.echo(f"{operation} {algorithm}: b>2+ sends piece b to rank 2, which adds it; b>2: which keeps it\n")
    typer.echo(rounds(steps), nl=False)


def _size(num_bytes: float) -> str:
    unit = next((unit for unit in ("Gi", "Mi", "Ki") if display.UNITS[unit] <= num_bytes), "")
    return f"{num_bytes / (display.UNITS[unit] if unit else 1):.4g} {unit}B"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"
