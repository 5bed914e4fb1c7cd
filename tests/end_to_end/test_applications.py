"""The applications in ``examples`` on two ranks, at small size: split as they say, and better than a trivial answer."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from meshwright.runtime.launch_replicas import run_replicas
from tests.distributed.pool import Ranks
from tests.end_to_end.example_runs import EXAMPLES, reached, run_here, run_on, split_of


class Case(NamedTuple):
    """A program, options that make it small, the first quality that it prints, and the split of one of its modules.
    ``lower``: less is better."""

    program: str
    options: str
    what: str
    module: str
    split: str
    lower: bool = False


CASES = [
    Case("tangled_meshes", "--steps 60 --size 64 --goal 10", "F1 of tangled cells", "0", "y@sy"),
    Case("function_names", "--steps 25 --files 30 --goal 0 --goal-tokens 0", "next tokens", "head", "batch@dp"),
    Case("gshard_text", "--steps 25 --goal 4.9", "held-out text", "layers.*.experts", "v@tp", lower=True),
    Case("date_formats", "--steps 100 --goal 5", "held-out dates right", "decoder", "batch@dp"),
    Case("googlenet_digits", "--steps 60 --goal 30", "held-out digits right", "head", "batch@dp"),
    Case("alexnet_2012", "--steps 130 --goal 15", "held-out digits right", "convolutions.3", "channel@tp"),
    Case("softmax_regression", "--steps 20 --goal 60", "held-out digits right", "layers.*", "batch@dp"),
    Case("exclusive_or", "", "points right", "layers.*", "batch@dp"),
    Case("sobel_edges", "--steps 60 --goal 0.3", "error of the photograph's edges", "(model)", "y@sy", lower=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.program)
def test_two_ranks_do_better_than_a_trivial_answer(ranks: Ranks, case: Case) -> None:
    output = run_on(ranks, 2, f"{case.program}.py", *case.options.split())
    quality, baseline = reached(output, case.what)
    assert (quality < baseline) if case.lower else (quality > baseline)
    assert split_of(output, case.module) == case.split


def member() -> str:
    """What a member of the ensemble of two prints; one rank is a member."""
    printed = io.StringIO()
    sys.path.insert(0, str(EXAMPLES))
    with contextlib.redirect_stdout(printed):
        program = runpy.run_path(str(EXAMPLES / "forecast_ensemble.py"))
        print("\n".join(map(str, program["main"](2, steps=150, samples=1000))))
    return printed.getvalue()


def test_an_ensemble_of_two_ranks_forecasts_better_than_a_member(tmp_path: Path) -> None:
    output = run_replicas(member, num_replicas=2, num_ranks=1, directory=tmp_path, restarts=0)
    ensemble_score, member_score = reached(output, "log score of the ensemble")
    same_score, climate_score = reached(output, "log score of one member")
    assert climate_score < member_score < ensemble_score
    assert same_score == member_score


def test_one_rank_trains_all_members(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_here(
        monkeypatch, capsys, "forecast_ensemble.py", "--steps", "150", "--samples", "1000", "--goal", "-2"
    )
    ensemble_score, member_score = reached(output, "log score of the ensemble")
    assert member_score < ensemble_score


# --- what is missing or wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "missing", "message"),
    [
        ("softmax_regression.py", "sklearn.datasets", "scikit-learn, which has the digits, is not installed"),
        ("sobel_edges.py", "sklearn.datasets", "no photograph: "),
        ("hugging_face_gpt2.py", "transformers", "transformers, which has GPT-2, is not installed"),
    ],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, missing: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    extra = "hf" if missing == "transformers" else "demo"
    with pytest.raises(SystemExit, match=rf"^{re.escape(message)}(.|\n)*pip install 'meshwright\[{extra}\]'$"):
        run_here(monkeypatch, capsys, program)


def test_missing_sources_of_the_library_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("meshwright.runtime.corpus.sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match="the standard library has only 0 bytes of Python sources"):
        run_here(monkeypatch, capsys, "function_names.py")


def test_one_rank_is_told_how_to_start_two(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_here(monkeypatch, capsys, "exclusive_or.py")
    hint = f"one rank: nothing is split; on two: torchrun --nproc-per-node 2 {EXAMPLES / 'exclusive_or.py'}"
    assert output.splitlines()[0] == hint


def test_a_number_of_ranks_without_a_layout_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match=r"^tangled_meshes.py: 3 ranks\n.*start 1 or 2 or 4: torchrun"):
        run_here(monkeypatch, capsys, "tangled_meshes.py", "--size", "64")


def test_the_page_of_examples_lists_every_program() -> None:
    page = (EXAMPLES / "README.md").read_text()
    programs = {path.name for path in EXAMPLES.glob("*.py") if '"__main__"' in path.read_text()}
    assert set(re.findall(r"^\| \[`(\w+\.py)`\]\(\1\)", page, re.MULTILINE)) == programs
