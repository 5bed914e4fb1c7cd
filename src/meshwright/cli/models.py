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
    loaded = [prediction.load_model(key) for key in ([name] if name else prediction.model_names()) if key not in known]
    networks = [prediction.load_network(key) for key in known if name in ("", key)]
    if as_json:
        listed = [*loaded, *networks]
        display.print_json(listed[0] if name else listed)
        return
    if loaded:
        _print_transformers(loaded)
    if networks:
        if loaded:
            typer.echo()
        _print_networks(networks, by_layer=bool(name))


def _print_transformers(transformers: "list[Transformer]") -> None:
    titles = ("model", "parameters", "active", "layers", "hidden", "heads", "ffn", "vocabulary", "sequence", "source")
    table = display.table(titles, left=("model", "source"), wrapped=("source",))
    for row in transformers:
        table.add_row(
            row.name, _count(row.parameters), _count(row.active_parameters) if row.experts else "", f"{row.layers}",
            f"{row.hidden}", f"{row.heads}{f'/{row.kv_heads}' if row.kv_heads else ''}",
            f"{row.ffn}{f' x{row.experts}' if row.experts else ''}", f"{row.vocabulary}", f"{row.sequence}", row.source,
        )  # fmt: skip
    display.console().print(table)


def _print_networks(networks: "list[ConvNet]", *, by_layer: bool) -> None:
    titles = ("network", "parameters", "in dense layers", "GFLOP an image", "layers", "image", "source")
    table = display.table(titles, left=("network", "source"), wrapped=("source",))
    for net in networks:
        table.add_row(
            net.name, _count(net.parameters), f"{net.share('dense')[1]:.1%}", f"{net.forward_flops / 1e9:,.4g}",
            f"{len(net.layers)}", f"{net.image[1]} x {net.image[1]}", net.source,
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
