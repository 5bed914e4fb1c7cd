"""The command line, ``meshwright``. Each command has a file. Errors are printed as messages, never as tracebacks."""

import os
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence

import typer

from meshwright import __version__
from meshwright.cli import (
    advise,
    bench,
    calibrate,
    checkpoint,
    clusters,
    collectives,
    demo,
    dryrun,
    explain,
    export,
    jobs,
    launch,
    models,
    plan,
    predict,
    recompute,
    report,
    schedule,
    serve,
    simulate,
    train,
    ui,
    validate,
    verify,
    watch,
)
from meshwright.cli.display import INTERRUPTED
from meshwright.cli.overrides import EXTRA
from meshwright.errors import MeshwrightError, PreemptedError

SIGNALLED = 128
"""More than this, an exit code is that of a signal, as shells have it."""
_NO_MEMORY = re.compile(
    r"can(not|'t) allocate memory|failed to map segment|can't start new thread|resource temporarily unavailable"
    r"|error return without exception set",
    re.IGNORECASE,
)
"""How PyTorch, the loader of libraries, the system and Python itself say that there is no memory."""
_SMALLER = "take a smaller model, batch or number of ranks, or a machine with more"
_LAST_WORDS = f"meshwright: the command: there is not enough memory\n  -> {_SMALLER}\n".encode()
"""The message if there is not even memory to make one."""
GOES_ON = "the same command goes on from the last checkpoint, or from the beginning if there is none"

app = typer.Typer(
    name="meshwright",
    help="Plans, predicts and runs the parallel training of unmodified PyTorch models.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module in (
    demo, train, launch, watch, report, explain, plan, simulate, predict, validate, recompute, verify, dryrun, schedule,
    collectives, calibrate, clusters, models, jobs, export, advise, ui,
):  # fmt: skip
    _name = _module.__name__.rpartition(".")[2]  # a command is the function with the name of its module
    _settings = EXTRA if _module in (demo, train, launch, plan, simulate, verify, dryrun, export) else None
    app.command(epilog=_module.EPILOG, context_settings=_settings)(getattr(_module, _name))
app.add_typer(bench.group)
app.add_typer(checkpoint.group)
app.add_typer(serve.group)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    if version:
        typer.echo(f"meshwright {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line of this process: the console script ``meshwright``."""
    try:
        code = run(sys.argv[1:])
    except (MemoryError, SystemError):
        os.write(2, _LAST_WORDS)
        code = 2
    if code not in (0, PreemptedError.CODE) and "RANK" in os.environ:
        # Under torchrun, other ranks may wait for this one. A normal exit would wait for those ranks in turn.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code: 0, 1 (a check failed), 2 (a user's mistake), 75 (asked to end: go on
    later), 130 (Ctrl-C)."""
    try:
        result = app(args=list(arguments), prog_name="meshwright", standalone_mode=False)
    except MeshwrightError as error:
        _complain(str(error))
        return PreemptedError.CODE if isinstance(error, PreemptedError) else 2
    except typer.TyperException as error:
        _complain(f"{error.format_message()}\n  -> `meshwright COMMAND --help` shows how it is written")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        _complain("stopped")
        return INTERRUPTED
    except SystemExit as ended:  # a launcher that was told to end at once
        code = ended.code if isinstance(ended.code, int) else 1
        if code > SIGNALLED:
            _complain(f"stopped at once by {signal.Signals(code - SIGNALLED).name}\n  -> {GOES_ON}")
        return code
    except BrokenPipeError:  # for example `meshwright plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (MemoryError, RuntimeError, SystemError, ImportError, OSError) as error:
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(str(error)):
            return _defect(error)
        _complain(_no_memory(" ".join(arguments[:2]), str(error)))
        return 2
    except Exception as error:  # noqa: BLE001 - the last resort: a defect of ours, told in a line too
        return _defect(error)
    if result == INTERRUPTED:  # typer itself caught the KeyboardInterrupt
        _complain("stopped")
    return result if isinstance(result, int) else 0


def _no_memory(command: str, error: str) -> str:
    asked = re.search(r"[0-9]+ bytes", error)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    limited = "" if limit == resource.RLIM_INFINITY else f"; `ulimit -v` is {limit / 2**20:.0f} MiB"
    return (
        f"meshwright {command}: there is not enough memory{f' for {asked[0]}' if asked else ''}{limited}\n"
        f"  -> {_SMALLER}"
    )


def _defect(error: Exception) -> int:
    with tempfile.NamedTemporaryFile("w", prefix="meshwright-", suffix=".traceback", delete=False) as file:
        file.write(traceback.format_exc())
    _complain(f"unexpected {type(error).__name__}: {error}\n  -> this is a defect; its traceback is in {file.name}")
    return 1


def _complain(text: str) -> None:
    rank = os.environ.get("RANK", "0")
    prefix = "meshwright" if rank == "0" else f"meshwright, rank {rank}"
    print(f"{prefix}: {text}", file=sys.stderr)
