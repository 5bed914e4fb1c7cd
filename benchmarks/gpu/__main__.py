"""What holds on the GPUs of this machine: tests, parity, speed beside PyTorch, predictions beside measurements.

Run as ``make gpu`` (or ``python3 -m benchmarks.gpu``, which needs no make) on a machine with one GPU or several. It
takes at most 9 minutes (``--seconds``). Parts run one after the other in processes of their own, the most valuable
first; each has a limit, and a part that fails does not stop the next. After each part the results so far are written to
``--output``: gpu-DEVICE.json, .md, .log (all that parts have printed), and .toml (the calibrated cluster).

``--rehearse`` runs every part on the CPU with small sizes, to see that its code runs; nothing is judged by it.
This module imports the standard library until it has found the packages that the parts need (``needs.py``).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from benchmarks.gpu import needs
from benchmarks.gpu.parts import PARTS, Part

RESULTS = needs.ROOT / "benchmarks" / "results"
SECONDS, REHEARSAL_S = 540.0, 3600.0
FINISH_S = 3.0
"""Seconds that are left for the summary."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, write their results, and print a summary. The exit code: 2 if packages are missing, 1 if a finding
    or a part failed."""
    begun = time.monotonic()
    parser = argparse.ArgumentParser(prog="make gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=0.0, help=f"stop after so many seconds; default: {SECONDS:.0f}"
    )
    parser.add_argument("--output", type=Path, default=None, help="the folder of the results")
    parser.add_argument("--wheels", type=Path, default=needs.FOLDER, help="a folder of wheels of missing packages")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, help="these parts only; files are named after them")
    parser.add_argument("--rehearse", action="store_true", help="small sizes on the CPU")
    options = parser.parse_args(arguments)
    seconds, slack = (REHEARSAL_S, 10) if options.rehearse else (SECONDS, 1)
    seconds = options.seconds or seconds
    scratch = Path(tempfile.mkdtemp(prefix="meshwright-gpu-"))
    site = scratch / "site"
    if left := needs.unpack(options.wheels, site):
        print(needs.explained(left), file=sys.stderr)
        return 2
    paths = [str(needs.ROOT / "src"), str(needs.ROOT), str(site)]
    sys.path[:0] = paths
    from benchmarks.gpu.results import Results

    output = options.output or (scratch if options.rehearse else RESULTS)
    output.mkdir(parents=True, exist_ok=True)
    results = Results(output, scratch, needs.commit(), rehearsed=options.rehearse, only=options.only or ())
    environment = dict(os.environ) | {
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH", "")])]),
        "PYTHONUNBUFFERED": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "XDG_CACHE_HOME": str(scratch / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"), "TRITON_CACHE_DIR": str(scratch / "triton"),
    }  # fmt: skip
    deadline = begun + seconds - FINISH_S
    for part in PARTS:
        left_s = deadline - time.monotonic()
        if options.only and part.name not in {*options.only, "machine"}:
            continue
        if part.several and results.num_gpus < 2 and not options.rehearse:
            continue
        if left_s < part.least_s:
            results.missed(part, f"not run: of {seconds:.0f} seconds {max(0.0, left_s):.0f} were left")
            continue
        print(f"==> {part.name}: {part.what}", flush=True)
        start = time.monotonic()
        with results.log.open("ab") as log:
            why = run(part, min(part.most_s * slack, left_s), scratch, environment, log, rehearse=options.rehearse)
        taken_s = time.monotonic() - start
        results.take(part, why, taken_s)
        print(f"    {part.name} took {taken_s:.0f} s{f': {why}' if why else ''}", flush=True)
        results.write()
    print(results.summary(), flush=True)
    return results.exit_code


def run(
    part: Part, limit_s: float, scratch: Path, environment: dict[str, str], log: IO[bytes], *, rehearse: bool
) -> str:
    """Run a part in a process of its own, for at most ``limit_s``. Return why it did not end well; empty if it did."""
    log.write(f"\n==> {part.name}: {part.what}\n".encode())
    log.flush()
    command = [sys.executable, "-m", "benchmarks.gpu.part", part.name, str(scratch), f"{time.time() + limit_s:.1f}"]
    process = subprocess.Popen(
        [*command, *["--rehearse"] * rehearse], cwd=needs.ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    except BaseException:
        log.write(b"interrupted\n")
        raise
    finally:
        _end(process)
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part's process and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
