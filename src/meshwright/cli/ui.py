"""``meshwright ui``: explore layouts, runs and plans on a local page."""

import os
import secrets
import sys
from pathlib import Path

import typer

from meshwright.cli import display
from meshwright.errors import FileFormatError

EPILOG = display.examples(
    "meshwright ui",
    "meshwright ui experiments/runs --port 8600 --no-browser",
    "meshwright ui --model config.json --cluster cluster.toml",
    "meshwright ui --plan old.json --plan new.json",
    "ssh -L 8600:127.0.0.1:8600 node7     then open the address that `meshwright ui --port 8600` prints there",
    note="The page is served to this machine alone (127.0.0.1), to who has the token in its address. It reads files "
    "and changes none; no request leaves the machine. Needs the extra `ui`: pip install 'meshwright\\[ui]'",
)


def ui(
    runs: Path = typer.Argument(Path("runs"), metavar="FOLDER", help="The folder that holds runs."),
    port: int = typer.Option(0, min=0, max=65535, help="The port; 0: any free port."),
    no_browser: bool = typer.Option(False, "--no-browser", help="Only print the address."),
    model: list[Path] = typer.Option([], help="A Hugging Face config.json to offer. May be repeated."),
    cluster: list[Path] = typer.Option([], help="A cluster file to offer. May be repeated."),
    plan: list[Path] = typer.Option([], help="A plan file to offer for comparison. May be repeated."),
) -> None:
    """Explore on a local page: layouts by time and memory, a step over time, what-if questions, runs beside their
    predictions, and plans line by line."""
    for option, paths in (("--model", model), ("--cluster", cluster), ("--plan", plan)):
        for path in paths:
            if not path.is_file():
                raise FileFormatError("there is no such file", where=f"{option} {path}", remedy="give another path")
    from meshwright.ui.explorer import Explorer
    from meshwright.ui.run_list import RunFolders
    from meshwright.ui.server import HOST, application, listening, open_browser, server_of

    explorer = Explorer([str(path) for path in model], [str(path) for path in cluster])
    token = secrets.token_urlsafe(24)
    opened = listening(port)
    number = opened.getsockname()[1]
    app = application(explorer, RunFolders(runs), token, number, plan)
    terminal = display.console()
    terminal.print(f"http://{HOST}:{number}/?token={token}")
    shown = not no_browser and _has_screen() and open_browser(f"http://{HOST}:{number}/?start={app.start}")
    if not (shown or no_browser):
        terminal.print("no browser can be opened here: open this address in one; from another machine, through ssh -L")
    terminal.print("Ctrl-C ends it")
    sys.stdout.flush()
    server_of(app).run(sockets=[opened])


def _has_screen() -> bool:
    """Whether a browser has somewhere to show itself. Without this question, a browser in text would take the
    terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
