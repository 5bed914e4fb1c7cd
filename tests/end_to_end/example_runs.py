"""Runs programs of ``examples`` as their docstrings say, in processes that are there already."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.distributed.pool import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 280.0
"""Of a program on ranks: some are captured for seconds, which are minutes on a busy machine."""


def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> str:
    """What `python examples/NAME` prints; in this process, because importing torch takes longer than the examples."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def run_on(ranks: Ranks, num_ranks: int, name: str, *arguments: str) -> str:
    """What an example prints on ranks that are there already."""
    return "".join(ranks(num_ranks, _run_on_rank, name, arguments, timeout=TIMEOUT_S))


def _run_on_rank(name: str, arguments: tuple[str, ...]) -> str:
    printed, before = io.StringIO(), (sys.argv, sys.path)
    sys.argv, sys.path = [name, *arguments], [str(EXAMPLES), *sys.path]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv, sys.path = before
    return printed.getvalue()


def split_of(output: str, module: str) -> str:
    """The column `split` of a module in the table that `plan.explain()` prints."""
    rows = re.findall(rf"^  {re.escape(module)} +(.*?)(?:  .*)?$", output, re.MULTILINE)
    assert rows, f"no module {module} in\n{output}"
    return str(rows[0])


def reached(output: str, what: str) -> tuple[float, float]:
    """The quality that an application says it reached, and that of its trivial or untrained baseline."""
    number = r"(-?[\d.e+-]+)"
    matches = re.findall(rf"^{re.escape(what)}: {number}[^(]*\(goal: at .*; .*: {number}\)$", output, re.MULTILINE)
    assert len(matches) == 1, f"{what!r} stands {len(matches)} times in\n{output}"
    quality, baseline = matches[0]
    return float(quality), float(baseline)
