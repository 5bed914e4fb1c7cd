"""``meshwright bench codec``: codecs beside dense gradients, in bytes and losses; refusals."""

from __future__ import annotations

import shlex

import msgspec
import pytest

from meshwright.bench.lint import lint
from meshwright.cli import run as cli
from meshwright.ir.codec import codec_of
from meshwright.ir.result import Accuracy, Comparison, Result

SMALL = [
    "--steps", "4", "--seeds", "2", "--repetitions", "5", "--model.layers", "1", "--model.width", "32",
    "--data.max_bytes", "200000", "--data.sequence_length", "32",
]  # fmt: skip


def test_codecs_are_compared_with_dense_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "codec", "--codec", "qsgd(4)", "--codec", "topk(100%)", "--json", *SMALL]) == 0
    decoded = msgspec.json.decode(capsys.readouterr().out, type=Result)
    assert lint(decoded) == ()
    assert shlex.split(decoded.command)[:3] == ["meshwright", "bench", "codec"]
    steps = [each for each in decoded.findings if isinstance(each, Comparison)]
    assert [(each.ours, each.baseline) for each in steps] == [("qsgd(4)", "dense"), ("topk(100%)", "dense")]
    assert all(len(series.seconds) == 5 for each in steps for series in each.series.values())
    sent = steps[0].notes["sent_bytes"]
    elements = sent["dense"] // 4  # with 2 ranks: 2 (P-1)/P is 1
    assert sent["qsgd(4)"] == pytest.approx(codec_of("qsgd(4)").message_bytes(elements, 4), rel=0.01)
    losses = [each.notes["losses"] for each in decoded.findings if isinstance(each, Accuracy)]
    dense, dense_in_time, coded, _, exact, _ = losses
    assert all(len(each) == 2 for each in losses)
    assert exact == pytest.approx(dense, rel=1e-4), "all elements are sent"
    assert coded != dense
    assert dense == dense_in_time


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no codec"), (["--codec", "nope"], "no codec 'nope'"), (["--codec", "fp16", "--boxes", "3"], "3 boxes"),
        (["--codec", "fp16", "--gbit", "0"], "0 Gbit/s"), (["--codec", "fp16", "--layout.tp", "2"], "a codec, tp"),
    ],
)  # fmt: skip
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "codec", *arguments]) != 0
    assert words in capsys.readouterr().err
