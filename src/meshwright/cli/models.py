"""``meshwright models``: list the models of the catalog."""

from typing import TYPE_CHECKING

import typer

from meshwright.cli import display

if TYPE_CHECKING:
    from meshwright.ir.convnet import ConvNet
    from meshwright.ir.transformer import Transformer

EPILOG = display.examples(
    "meshwright models",
    "meshwright models llama3-70b --json",
    "meshwright models resnet50",
    "meshwright models path/to/config.json",
)


def models(
    name: str = typer.Argument("", help="One model: a name, or the path of a Hugging Face config.json."),
    families: bool = typer.Option(False, "--families", help="List the families instead."),
    as_json: bool = display.JSON,
) -> None:
    """List the models of the catalog, or show one."""
    from meshwright import prediction

    if families:
        typer.echo("\n".join(prediction.family_names()))
        return
    known = prediction.network_names()
    found = [prediction.load_model(one) for one in ([name] if name else prediction.model_names()) if one not in known]
    networks = [prediction.load_network(one) for one in known if name in ("", one)]
    if as_json:
        told = [*found, *networks]
        display.print_json(told[0] if name else told)
        return
    if found:
        _print_transformers(found)
    if networks:
        if found:
            typer.echo()
        _print_networks(networks, by_layer=bool(name))


def _print_transformers(found: "list[Transformer]") -> None:
    titles = ("model", "parameters", "active", "layers", "hidden", "heads", "ffn", "vocabulary", "sequence", "source")
    table = display.table(titles, left=("model", "source"), wrapped=("source",))
    for one in found:
        table.add_row(
            one.name, _count(one.parameters), _count(one.active_parameters) if one.experts else "", f"{one.layers}",
            f"{one.hidden}", f"{one.heads}{f'/{one.kv_heads}' if one.kv_heads else ''}",
            f"{one.ffn}{f' x{one.experts}' if one.experts else ''}", f"{one.vocabulary}", f"{one.sequence}", one.source,
        )  # fmt: skip
    display.console().print(table)


def _print_networks(networks: "list[ConvNet]", *, by_layer: bool) -> None:
    titles = ("network", "parameters", "in dense layers", "GFLOP an image", "layers", "image", "source")
    table = display.table(titles, left=("network", "source"), wrapped=("source",))
    for one in networks:
        table.add_row(
            one.name, _count(one.parameters), f"{one.share('dense')[1]:.1%}", f"{one.forward_flops / 1e9:,.4g}",
            f"{len(one.layers)}", f"{one.image[1]} x {one.image[1]}", one.source,
        )  # fmt: skip
    terminal = display.console()
    terminal.print(table)
    if not by_layer:
        return
    titles = ("layer", "inputs", "outputs", "kernel", "positions", "parameters", "GFLOP an image")
    layers = display.table(titles, left=("layer",))
    for layer in networks[0].layers:
        layers.add_row(
            layer.name, f"{layer.inputs}", f"{layer.outputs}", f"{layer.kernel}", f"{layer.pixels_out}",
            f"{layer.parameters:,}", f"{layer.forward_flops / 1e9:.4g}",
        )  # fmt: skip
    terminal.print()
    terminal.print(layers)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"
