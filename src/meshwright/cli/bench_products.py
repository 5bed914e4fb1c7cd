"""``meshwright bench products``: matrix products on grids of ranks, timed against their sizes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshwright.cli import display
from meshwright.ir import files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwright.bench.products import ProductRow

SHAPES = {"square": (1.0, 1.0, 1.0), "tall": (0.25, 16.0, 0.25), "flat": (4.0, 0.0625, 4.0), "rows": (16.0, 0.25, 0.25)}
"""m, k and n of a shape, in units of the side of the square product that has the same number of FLOPs."""
EPILOG = display.examples(
    "meshwright bench products --sides 256,512",
    "meshwright bench products --shape tall --sides 512,1024 --boxes 2 --gbit 1 -o products.json",
    "meshwright bench products --shape flat --sides 1024 --memory 1000000 --json",
    note="""\
A product has as many FLOPs as the square product of its side s. Shapes: tall is s/4 x 16s by 16s x s/4; flat is
4s x s/16 by s/16 x 4s; rows is 16s x s/4 by s/4 x s/4. The bound has two parts: the fewest words (elements) that some
rank must receive, and the time of the local products alone. Emulated boxes need root on Linux.""",
)


def products(
    shape: str = typer.Option("square", help=f"The shape of the products: {', '.join(SHAPES)}."),
    sides: str = typer.Option("256,512,1024", help="Sizes: the sides of square products with as many FLOPs."),
    ranks: int = typer.Option(4, min=2, help="Ranks that work together."),
    boxes: int = typer.Option(1, min=1, help="Number of emulated boxes that hold the ranks."),
    gbit: float = typer.Option(1.0, help="Rate of the links between emulated boxes, in Gbit/s."),
    memory: float = typer.Option(0.0, min=0.0, help="The most words (elements) that a rank may hold; 0: no limit."),
    repetitions: int = typer.Option(7, min=5, help="Measurements of each grid."),
    as_json: bool = typer.Option(False, "--json", help="Print the result file."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the result file."),
) -> None:
    """Time matrix products on grids of ranks: 1D, SUMMA, 2.5D, 3D and the grid that the planner chooses, beside the
    lower bound."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"--shape {shape}: write one of {', '.join(SHAPES)}")
    from meshwright.bench.products import products as measure
    from meshwright.bench.products import result_of

    sizes = [sizes_of(shape, side) for side in display.numbers(sides, "--sides", "write 256,512")]
    counts: dict[str, Any] = {"ranks": ranks, "boxes": boxes, "gbit": gbit, "repetitions": repetitions}
    options = {"shape": shape, "sides": sides, **counts, "gbit": f"{gbit:g}", "memory": f"{memory:g}" if memory else ""}
    with display.cursor_kept(), display.progress() as bars:
        rows = measure(sizes, **counts, memory_words=memory or None, progress=bars)
    result = result_of(rows, **counts, command=display.command("bench", "products", options=options))
    if output is not None:
        display.write(output, files.encode_json(result))
    if as_json:
        typer.echo(files.encode_json(result).decode(), nl=False)
        return
    display.console().print(f"{result.timed}\n")
    _print(rows)


def sizes_of(shape: str, side: int) -> tuple[int, int, int]:
    """The m, k and n of a shape with as many FLOPs as the square product of this side. Each is at least 1."""
    m, k, n = (max(1, round(part * side)) for part in SHAPES[shape])
    return m, k, n


def _print(rows: "Sequence[ProductRow]") -> None:
    titles = ("m x k x n", "name", "grid", "panels", "ms", "least", "predicted", "bound", "words", "bound")
    table = display.table(titles, left=("name", "grid", "panels"))
    for row in rows:
        table.add_row(
            "x".join(map(str, row.sizes)), row.name, f"{row.plan.grid}", f"{row.plan.panels} over {row.plan.over}",
            f"{row.median_s * 1e3:.2f}", f"{min(row.seconds) * 1e3:.2f}", f"{row.predicted_s * 1e3:.2f}",
            f"{row.bound_s * 1e3:.2f}", f"{row.words:,}", f"{row.bound_words:,.0f}",
        )  # fmt: skip
    display.console().print(table)
