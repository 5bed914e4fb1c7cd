"""``meshwright bench codec``: codecs beside dense gradients, in bytes and losses; refusals."""

from __future__ import annotations

import json

import pytest

from meshwright.cli import run as cli
from meshwright.ir.codec import codec_of

SMALL = [
    "--steps", "4", "--seeds", "2", "--repetitions", "5", "--model.layers", "1", "--model.width", "32",
    "--data.max_bytes", "200000", "--data.sequence_length", "32",
]  # fmt: skip


def test_codecs_are_compared_with_dense_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "codec", "--codec", "qsgd(4)", "--codec", "topk(100%)", "--json", *SMALL]) == 0
    dense, coded, exact = json.loads(capsys.readouterr().out)
    assert [row["codec"] for row in (dense, coded, exact)] == ["dense", "qsgd(4)", "topk(100%)"]
    elements = dense["sent_bytes"] // 4  # with 2 ranks: 2 (P-1)/P is 1
    assert coded["sent_bytes"] == pytest.approx(codec_of("qsgd(4)").message_bytes(elements, 4), rel=0.01)
    assert all(len(row["losses"]) == 2 and len(row["step_s"]) == 5 for row in (dense, coded, exact))
    assert exact["losses"] == pytest.approx(dense["losses"], rel=1e-4), "all elements are sent"
    assert coded["losses"] != dense["losses"]
    assert dense["losses"] == dense["losses_in_time"]


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
