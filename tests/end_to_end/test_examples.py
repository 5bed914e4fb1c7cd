"""The examples run as their docstrings say: as one process, and some of them on two ranks (one under torchrun)."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.pool import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> str:
    """What `python examples/NAME` prints; in this process, because importing torch takes longer than the examples."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def run_on(ranks: Ranks, num_ranks: int, name: str, *arguments: str) -> str:
    """What an example prints on ranks that are there already."""
    return "".join(ranks(num_ranks, _run_on_rank, name, arguments))


def _run_on_rank(name: str, arguments: tuple[str, ...]) -> str:
    printed, before = io.StringIO(), (sys.argv, sys.path)
    sys.argv, sys.path = [name, *arguments], [str(EXAMPLES), *sys.path]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv, sys.path = before
    return printed.getvalue()


def run_under_torchrun(num_ranks: int, name: str, *arguments: str) -> str:
    """What `torchrun --nproc-per-node NUM_RANKS examples/NAME` prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


def split_of(output: str, module: str) -> str:
    """The column `split` of a module in the table that `plan.explain()` prints."""
    rows = re.findall(rf"^  {re.escape(module)} +(.*?)(?:  .*)?$", output, re.MULTILINE)
    assert rows, f"no module {module} in\n{output}"
    return str(rows[0])


def test_examples_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lengths) > 4
    assert {name: length for name, length in lengths.items() if length >= 80} == {}


def test_pictures_are_denoised_in_parts_as_in_one_process(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL", reason="scikit-learn reads its photographs with pillow")
    alone = run_here(monkeypatch, capsys, "denoise_pictures.py", "--size", "64", "--steps", "3")
    shared = run_on(ranks, 4, "denoise_pictures.py", "--size", "64", "--steps", "3")
    assert "data parallelism ends at dp=1: 1 sample does not divide over 4 ranks" in shared
    assert "rank 0 makes rows 0 to 32, columns 0 to 32" in shared
    assert losses(shared) == pytest.approx(losses(alone), abs=2e-5)


def test_exclusive_or(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one_layer, two_layers = run_here(monkeypatch, capsys, "exclusive_or.py").splitlines()
    assert int(re.findall(r"accuracy (\d+)%", one_layer)[0]) <= 75
    assert "accuracy 100%" in two_layers


def test_exclusive_or_cannot_be_learned_without_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        run_here(monkeypatch, capsys, "exclusive_or.py", "--steps", "1")


def test_lenet_in_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_here(monkeypatch, capsys, "lenet_digits.py", "--steps", "50", "--goal", "0.8")
    assert split_of(output, "dense.*") == "whole"
    assert float(re.findall(r"held-out digits right: (\d+\.\d)%", output)[0]) >= 80.0


@pytest.mark.parametrize("by_torchrun", [False, pytest.param(True, marks=pytest.mark.product)])
def test_lenet_splits_convolutions_by_batch_and_dense_layers_by_features_on_the_same_ranks(
    ranks: Ranks, by_torchrun: bool
) -> None:
    arguments = 2, "lenet_digits.py", "--steps", "50", "--goal", "0.8"
    output = run_under_torchrun(*arguments) if by_torchrun else run_on(ranks, *arguments)
    assert "dp=1 x tp=2, 2 ranks" in output
    assert split_of(output, "convolutions.*") == "batch@tp"
    assert split_of(output, "dense.0") == "f1@tp"  # by columns: the features that it makes (f are those that it reads)
    assert split_of(output, "dense.2") == "f@tp"  # by rows: the same features
    assert float(re.findall(r"held-out digits right: (\d+\.\d)%", output)[0]) >= 80.0


def test_lenet_that_learned_too_little_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match="is less than 97%"):
        run_here(monkeypatch, capsys, "lenet_digits.py", "--steps", "1")


def test_resnet_loses_the_same_on_two_ranks_as_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ranks: Ranks
) -> None:
    """So batch norm sees the global batch: with the statistics of each half, the tenth loss differs by 0.007."""
    serial = run_here(monkeypatch, capsys, "resnet_digits.py", "--steps", "10")
    parallel = run_on(ranks, 2, "resnet_digits.py", "--steps", "10")
    assert "part 1 of 2: 32 digits" in parallel
    assert len(losses(serial)) == 1
    assert losses(parallel) == pytest.approx(losses(serial), abs=1e-3)


def test_hugging_face_gpt2_in_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_here(monkeypatch, capsys, "hugging_face_gpt2.py", "--steps", "20")
    first, last = losses(output)
    assert last < first
    assert 3.0 < float(re.findall(r"held-out bits per byte: (\d+\.\d+)", output)[0]) < 7.0


def test_hugging_face_gpt2_splits_heads_and_hidden_features_over_two_ranks(ranks: Ranks) -> None:
    output = run_on(ranks, 2, "hugging_face_gpt2.py", "--dp", "1", "--tp", "2", "--steps", "2")
    assert split_of(output, "transformer.h.*.attn.c_attn") == "h@tp"
    assert split_of(output, "transformer.h.*.mlp.c_fc") == "f@tp"
    assert len(losses(output)) == 1
