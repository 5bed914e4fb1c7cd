"""``meshwright models``: the models that are known by name."""

import msgspec
import typer
from rich.table import Table

from meshwright.cli import display

EPILOG = """[bold]Examples[/bold]

  meshwright models

  meshwright models llama3-70b --json

  meshwright models path/to/config.json
"""


def models(
    name: str = typer.Argument("", help="One model: a name, or the path of a Hugging Face config.json."),
    families: bool = typer.Option(False, "--families", help="List the families instead."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the models of the catalog, or show one."""
    from meshwright import prediction

    if families:
        typer.echo("\n".join(prediction.family_names()))
        return
    found = [prediction.load_model(one) for one in ([name] if name else prediction.model_names())]
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found[0] if name else found)).decode())
        return
    table = Table(box=None, pad_edge=False)
    titles = ("model", "parameters", "active", "layers", "hidden", "heads", "ffn", "vocabulary", "sequence", "source")
    for title in titles:
        table.add_column(title, justify="left" if title in ("model", "source") else "right", no_wrap=title != "source")
    for one in found:
        table.add_row(
            one.name, _count(one.parameters), _count(one.active_parameters) if one.experts else "", f"{one.layers}",
            f"{one.hidden}", f"{one.heads}{f'/{one.kv_heads}' if one.kv_heads else ''}",
            f"{one.ffn}{f' x{one.experts}' if one.experts else ''}", f"{one.vocabulary}", f"{one.sequence}", one.source,
        )  # fmt: skip
    display.console().print(table)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"


def add_to(app: typer.Typer) -> None:
    """Make it a command."""
    app.command(epilog=EPILOG)(models)
