"""``meshwright demo``: train a small GPT on English and code that ship with Python, on this machine's cores."""

import time
from importlib import resources

import typer

from meshwright import config
from meshwright.cli import display
from meshwright.cli.overrides import overridden
from meshwright.cli.train import RECALIBRATE, run_training, with_directory

EPILOG = display.examples(
    "meshwright demo",
    "meshwright demo --steps 100 --layout.tp 2",
    "meshwright demo --print > RUN.toml     a file to start from",
)


def demo(
    context: typer.Context,
    steps: int = typer.Option(0, help="Training steps; 0: the demo's default."),
    feed_back: bool = RECALIBRATE,
    print_file: bool = typer.Option(False, "--print", help="Print the demo's RUN.toml, and stop."),
) -> None:
    """Train a byte-level GPT for a few minutes, then let it write text. The options of `train` work here too."""
    text = resources.files("meshwright.cli").joinpath("demo.toml").read_text()
    if print_file:
        typer.echo(text, nl=False)
        return
    chosen = [f"--train.steps={steps}"] if steps else []
    raw = overridden(config.tables(text.encode(), where="demo.toml"), [*chosen, *context.args])
    run = config.make(raw, where="demo.toml")
    run_training(with_directory(run, f"runs/demo-{time.strftime('%Y%m%d-%H%M%S')}"), feed_back=feed_back)
