"""The examples run as their docstrings say: as one process, and some of them on two ranks (one under torchrun)."""

import os
import re
import subprocess
import sys

import pytest

from tests.distributed.pool import Ranks
from tests.end_to_end.example_runs import EXAMPLES, reached, run_here, run_on, split_of


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


def test_examples_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lengths) > 16
    assert {name: length for name, length in lengths.items() if length > 120} == {}


def test_pictures_are_denoised_in_parts_as_in_one_process(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("PIL", reason="scikit-learn reads its photographs with pillow")
    alone = run_here(monkeypatch, capsys, "denoise_pictures.py", "--size", "64", "--steps", "3")
    shared = run_on(ranks, 4, "denoise_pictures.py", "--size", "64", "--steps", "3")
    assert "data parallelism ends at dp=1: 1 sample does not divide over 4 ranks" in shared
    assert "rank 0 makes rows 0 to 32, columns 0 to 32" in shared
    assert losses(shared) == pytest.approx(losses(alone), abs=2e-5)


def test_exclusive_or_needs_two_layers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    two_layers, one_layer = reached(run_here(monkeypatch, capsys, "exclusive_or.py"), "points right")
    assert two_layers == 100
    assert one_layer <= 75


def test_exclusive_or_cannot_be_learned_without_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="missed:\npoints right: "):
        run_here(monkeypatch, capsys, "exclusive_or.py", "--steps", "1")


LENET = "lenet_digits.py", "--steps", "50", "--goal", "80"


def test_lenet_in_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_here(monkeypatch, capsys, *LENET)
    assert split_of(output, "dense.*") == "whole"
    assert reached(output, "held-out digits right")[0] >= 80.0


@pytest.mark.parametrize("by_torchrun", [False, pytest.param(True, marks=pytest.mark.product)])
def test_lenet_splits_convolutions_by_batch_and_dense_layers_by_features_on_the_same_ranks(
    ranks: Ranks, by_torchrun: bool
) -> None:
    output = run_under_torchrun(2, *LENET) if by_torchrun else run_on(ranks, 2, *LENET)
    assert "dp=1 x tp=2, 2 ranks" in output
    assert split_of(output, "convolutions.*") == "batch@tp"
    assert split_of(output, "dense.0") == "f1@tp"  # by columns: the features that it makes (f are those that it reads)
    assert split_of(output, "dense.2") == "f1@tp"
    assert split_of(output, "dense.4") == "f@tp"  # by rows: the features that the layer before it made
    assert reached(output, "held-out digits right")[0] >= 80.0


def test_lenet_that_learned_too_little_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"missed:\nheld-out digits right: .* \(goal: at least 96; always"):
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
    output = run_here(monkeypatch, capsys, "hugging_face_gpt2.py", "--steps", "40", "--goal", "4.9")
    bits, by_frequency = reached(output, "held-out text")
    assert bits < by_frequency < 5.5
    first, *_, last = losses(output)
    assert last < first


def test_hugging_face_gpt2_splits_heads_and_hidden_features_over_two_ranks(ranks: Ranks) -> None:
    output = run_on(ranks, 2, "hugging_face_gpt2.py", "--tp", "2", "--steps", "2", "--goal", "9")
    assert split_of(output, "transformer.h.*.attn.c_attn") == "h@tp"
    assert split_of(output, "transformer.h.*.mlp.c_fc") == "f@tp"
    assert len(losses(output)) == 2
