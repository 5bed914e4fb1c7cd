"""``meshwright bench consistency``: rules in equal wall time, with emulated slow replicas; refusals."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from meshwright.bench.lint import lint
from meshwright.cli import run as cli
from meshwright.ir.result import Accuracy, Comparison, Result

SMALL = [
    "--replicas", "2", "--seeds", "1", "--seconds", "1.5", "--step-ms", "30", "--model.layers", "1", "--model.width",
    "32", "--data.max_bytes", "100000", "--data.sequence_length", "16", "--data.batch_size", "8",
]  # fmt: skip
RULES = ["--rule", "sync", "--rule", "server(async)", "--rule", "local(4)"]


def test_rules_are_compared_in_equal_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "rules.html"
    assert cli(["bench", "consistency", *RULES, "--slow", "1:3.0", "--json", "--page", str(page), *SMALL]) == 0
    decoded = msgspec.json.decode(capsys.readouterr().out, type=Result)
    assert lint(decoded) == ()
    assert shlex.split(decoded.command)[:3] == ["meshwright", "bench", "consistency"]
    assert "emulated" in decoded.timed
    compared = [each for each in decoded.findings if isinstance(each, Comparison)]
    assert [(each.ours, each.baseline) for each in compared] == 2 * [("server(async)", "sync"), ("local(4)", "sync")]
    assert ["slow 1:3.0" in each.target for each in compared] == [False, False, True, True]
    stale = [{int(steps) for steps in each.notes["staleness"]} for each in compared]
    assert max(stale[2]) > 2, "nobody waits for the slow replica"
    assert max(stale[3]) <= 4, "replicas wait for each other after four steps"
    losses = [each for each in decoded.findings if isinstance(each, Accuracy)]
    assert len(losses) == 6
    assert all(len(each.notes["losses"]) == 1 for each in losses)
    text = page.read_text()
    assert text.count("<svg") == 2 * (2 + 3)
    assert "server(async)" in text
    assert decoded.command.replace('"', "&#34;").replace("'", "&#39;") in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rule", "nope"], "no rule 'nope'"), (["--replicas", "1"], "1 replicas"),
        (["--replicas", "3"], "does not divide"), (["--seconds", "0"], "0 s"), (["--seeds", "0"], "0 seeds"),
        (["--slow", "9:2.0"], "no replica 9"), (["--slow", "2"], "cannot be read as a slow replica"),
        (["--layout.replicas", "2"], "names replicas"), (["--schedule.name", "cosine"], "number of steps"),
        (["--data.held_out", "0"], "held out"), (["--step-ms", "10", "--data.batch_size", "4"], "micro-batches"),
        (["--rule", "gossip(edges=0-1 2-3)"], "connected"), (["--rule", "partial(9)"], "9"),
    ],
)  # fmt: skip
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "consistency", *arguments]) != 0
    assert words in capsys.readouterr().err
