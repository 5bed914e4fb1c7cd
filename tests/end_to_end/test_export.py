"""The commands `meshwright export` and `meshwright advise`: what they print and write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli import run as cli

CLUSTER = ["--cluster", "h100-dgx-ndr400x8"]
SMALL = ["--model.layers", "1", "--model.width", "32", "--data.sequence_length", "16", "--data.max_bytes", "100000"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_layout_is_written_and_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--layout", "tp=2,pp=2,recompute=full,micro_batch=2"]
    assert cli(["export", "llama3-8b", "--to", "megatron", *CLUSTER, "--ranks", "8", *layout, "-o", "made"]) == 0
    text = capsys.readouterr().out
    assert "start it: torchrun --nnodes 1 --nproc-per-node 8" in text
    assert "predicted as exported" in text
    assert cli(["advise", "made/megatron.args", "--from", "megatron", *CLUSTER, "--ranks", "8", "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert {key: advice["setup"][key] for key in ("dp", "tp", "pp", "micro_batch", "recompute")} == {
        "dp": 2, "tp": 2, "pp": 2, "micro_batch": 2, "recompute": "full",
    }  # fmt: skip
    assert advice["best"]["prediction"]["step_s"] < advice["prediction"]["step_s"]


def test_a_captured_plan_names_its_gaps_and_their_cost(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--layout.dp",
        "1",
        "--layout.pp",
        "2",
        "--layout.microbatches",
        "4",
        "--model.layers",
        "2",
        *SMALL[2:],
    ]
    assert cli(["plan", "gpt", "--ranks", "2", *arguments, "-o", "plan.json"]) == 0
    capsys.readouterr()
    assert cli(["export", "plan.json", "--to", "accelerate"]) == 0
    text = capsys.readouterr().out
    assert "accelerate cannot express: pp2\n    instead: dp2, zero=3" in text
    assert "the exported form is not predicted: name the run file too" in text
    assert (
        cli(["export", "plan.json", "gpt", "--to", "accelerate", *arguments[6:], "--model.layers", "2", "--json"]) == 0
    )
    output = json.loads(capsys.readouterr().out)
    assert output["predicted"]["step_s"] != output["planned"]["step_s"]


def test_keys_of_the_run_file_follow_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["export", "gpt", "--to", "deepspeed", "--layout.dp", "2", "--layout.zero", "1", *SMALL]) == 0
    assert '"stage": 1' in capsys.readouterr().out


def test_what_cannot_be_exported_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, problem in (
        (["export", "llama3-8b", "--to", "torchtitn", *CLUSTER], "did you mean `torchtitan`?"),
        (["export", "llama3-8b", "--to", "megatron"], "no cluster is named"),
        (["export", "llama3-8b", "--to", "fsdp2", *CLUSTER], "fsdp2 is code for a module"),
        (["export", "missing.json", "--to", "megatron"], "missing.json: cannot read the file"),
        (["export", "llama3-8b", "RUN.toml", "--to", "megatron", *CLUSTER], "RUN.toml: llama3-8b is described by its"),
        (["export", "llama3-8b", "--to", "megatron", *CLUSTER, "--layout.dp", "2"], "--layout.dp: llama3-8b is"),
        (["export", "plan.json", "--to", "megatron", "--ranks", "8"], "--ranks: plan.json is exported without its run"),
        (["export", "gpt", "--to", "fsdp2", "--base", "llama3:llama3_8b"], "--base: fsdp2 has no base"),
        (["advise", "missing.toml", *CLUSTER], "missing.toml: cannot read the file"),
    ):
        assert cli(arguments) == 2
        assert problem in capsys.readouterr().err
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    assert cli(["advise", "ds.json", *CLUSTER, "--ranks", "8"]) == 2
    assert "name the model: --model llama3-8b" in capsys.readouterr().err
