"""The layouts of ``make gpu`` on ranks of the CPU: each equals one process, and its dry run on GPUs is clean."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import _symmetric_memory

from benchmarks.gpu import foretold, layouts, several
from benchmarks.gpu.__main__ import SECONDS
from benchmarks.gpu.context import Context
from benchmarks.gpu.findings import lines_of
from benchmarks.gpu.parts import PARTS
from meshwright.ir.result import Check
from tests.distributed import oracle
from tests.distributed.pool import Ranks

NEW = ("experts", "tp, products in pieces", "tp, products in shared memory")


def context_at(folder: Path, name: str = "layouts") -> Context:
    return Context(name, folder, 600.0, rehearse=True)


def errors(folder: Path, names: tuple[str, ...], most: int) -> dict[str, Any]:
    known = layouts.layouts(most)
    return {name: layouts.error_of(context_at(folder), known[name]) for name in names}


def test_layouts_have_the_ranks_that_are_there_and_all_kinds_of_parallelism() -> None:
    for most in (2, 4, 8):
        known = layouts.layouts(most)
        assert set(layouts.by_ranks(known)) <= {2, 4, 8}
        assert max(layouts.by_ranks(known)) == most
        chosen = [checked.layout for checked in known.values()]
        for axis in ("dp", "tp", "pp", "cp", "ep"):
            assert any(getattr(layout, axis) > 1 for layout in chosen)
        assert any(layout.sequence_parallel for layout in chosen)
        assert any(checked.pieces and not checked.shared for checked in known.values())
        shared = [checked for checked in known.values() if checked.shared]
        assert shared
        pieces = [checked for checked in known.values() if checked.pieces]
        assert all(isinstance(each.layout.tp, int) and each.pieces % each.layout.tp == 0 for each in pieces)
    assert set(layouts.layouts(2)) < set(layouts.layouts(4)) < set(layouts.layouts(8))


def test_their_limits_fit_into_the_part() -> None:
    """Also if every check lasts until its limit, and one GPU's parts before it do."""
    (part,) = (part for part in PARTS if part.name == "ranks")
    for most in (2, 4, 8):
        of_ranks = layouts.by_ranks(layouts.layouts(most)).values()
        assert sum(several.CHECK_S + several.EACH_S * len(names) for names in of_ranks) <= part.most_s
    before = PARTS[: PARTS.index(part)]
    assert sum(each.most_s for each in before) + part.least_s <= SECONDS


def test_they_equal_one_process(ranks: Ranks, tmp_path: Path) -> None:
    for error_by_layout in ranks(2, errors, tmp_path, NEW, 2):
        assert error_by_layout.keys() == set(NEW)
        assert all(error <= oracle.TOLERANCE for error in error_by_layout.values())


@pytest.mark.product
def test_those_of_4_and_8_ranks_equal_one_process(ranks: Ranks, tmp_path: Path) -> None:
    for most in (4, 8):
        for number, names in layouts.by_ranks(layouts.layouts(most)).items():
            for error_by_layout in ranks(number, errors, tmp_path, tuple(names), most):
                assert all(error <= oracle.TOLERANCE for error in error_by_layout.values()), error_by_layout


def test_plans_that_are_measured_are_dry_run(ranks: Ranks, tmp_path: Path) -> None:
    """A rehearsal measures no bytes: its dry runs are compared with nothing, and must be clean."""
    kept = ranks(2, measured, tmp_path)[0]
    context_at(tmp_path, "ranks-parity-2").keep(**kept)
    context = context_at(tmp_path, "foretold")
    foretold.several_layouts(context, 2)
    (line,) = (line.finding for line in lines_of(tmp_path / "foretold.jsonl"))
    assert isinstance(line, Check)
    assert (line.passed, line.total, line.verdict) == (len(kept), len(kept), "pass"), line.notes
    assert line.notes["tp"] == "not measured"
    assert all(name.removesuffix(several.MEASURED) in line.notes for name in kept)


def measured(folder: Path) -> dict[str, Any]:
    known = layouts.layouts(2)
    return {f"{name}{several.MEASURED}": layouts.measured(context_at(folder), known[name]) for name in NEW[::2]}


def test_layouts_that_fail_do_not_take_others_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that die at the second layout are started again for those after it."""
    context, started = context_at(tmp_path, "ranks"), []

    def start(context: Context, ranks: int, what: str, limit_s: float) -> str:
        names = what.removeprefix("parity:").split(";")
        started.append(names)
        notes = context_at(tmp_path, f"ranks-parity-{ranks}")
        notes.keep(**dict.fromkeys(names[: names.index("b")] if "b" in names else names, 1e-12))
        return "ranks [1] ended with an error" if "b" in names else ""

    monkeypatch.setattr(several, "start", start)
    outcomes = several._checked(context, 2, ["a", "b", "c, d", "e"])
    assert started == [["a", "b", "c, d", "e"], ["c, d", "e"]]
    assert outcomes == {"a": 1e-12, "b": "ranks [1] ended with an error", "c, d": 1e-12, "e": 1e-12}
    finding = several.parity(outcomes | {"f": layouts.APART}, 2)
    assert (finding.verdict, finding.passed, finding.total) == ("fail", 3, 4)
    assert several.parity({"a": 1e-12, "f": layouts.APART}, 2).verdict == "pass"


def test_waits_are_counted_by_layout() -> None:
    waits = "called a synchronizing CUDA operation"
    finding = several.without_waits({"a": {"waits": ""}, "b": {"waits": waits}, "c": None}, 2)
    assert (finding.verdict, finding.passed, finding.total) == ("fail", 1, 3)
    assert finding.notes == {"a": "none", "b": waits, "c": "not measured"}
    assert several.without_waits({"a": {"waits": ""}}, 2).verdict == "pass"


def test_a_wait_of_a_step_is_told_and_the_step_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's debug mode for synchronization warns at such an operation. Other ranks take part in the step, so that
    an error would leave them stuck."""
    context, modes, ends = context_at(tmp_path), list[str](), list[str]()

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if mode == "warn":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)

    class Waits:
        def step(self, batch: Any) -> None:
            for _ in range(2):
                warnings.warn("called a synchronizing CUDA operation\n(Triggered internally)", stacklevel=1)
            ends.append("waits")

    class Goes:
        def step(self, batch: Any) -> None:
            ends.append("goes")

    trainers: list[Any] = [Waits(), Goes()]
    assert layouts.waits_of(context, trainers[1], {}) == "", "a CPU has none"
    assert (ends, modes) == ([], [])
    context.device = torch.device("cuda", 0)
    waited, none = [layouts.waits_of(context, each, {}) for each in trainers]
    assert re.fullmatch(r"called a synchronizing CUDA operation \(.*test_gpu_layouts\.py:\d+\)", waited)
    assert (none, ends, modes) == ("", ["waits", "goes"], ["warn", "default"] * 2)


def test_memory_that_gpus_share_is_measured(ranks: Ranks, tmp_path: Path) -> None:
    """PyTorch keeps a workspace for each group, which its allocator does not count."""
    names = ("tp", "tp, products in shared memory")
    for bytes_by_layout in ranks(2, bytes_measured, tmp_path, names):
        assert bytes_by_layout == {"tp": 0, "tp, products in shared memory": 4096 + 512}


def bytes_measured(folder: Path, names: tuple[str, ...]) -> dict[str, int]:
    workspaces = {"a": torch.empty(1024), "b": torch.empty(512, dtype=torch.uint8), "c": None}
    with mock.patch.dict(_symmetric_memory._group_name_to_workspace_tensor, workspaces):
        known = layouts.layouts(2)
        return {name: layouts.measured(context_at(folder), known[name])["bytes"] for name in names}


def processes(*programs: str) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-S", "-c", program]) for program in programs]


@pytest.mark.parametrize(
    ("programs", "limit_s", "message"),
    [
        (("", ""), 60.0, ""),
        (("import time; time.sleep(60)", "raise SystemExit(3)"), 60.0,
         "rank 1 ended with exit code 3, ranks [0] were still at work 0 s after it"),
        (("import time; time.sleep(60)", "import time; time.sleep(60)"), 0.1,
         "ranks [0, 1] were still at work at the limit of 0 s"),
    ],
    ids=["well", "error", "limit"],
)  # fmt: skip
def test_ranks_are_watched_together(
    monkeypatch: pytest.MonkeyPatch, programs: tuple[str, ...], limit_s: float, message: str
) -> None:
    """One rank's error ends the wait for the others, whichever rank it is."""
    monkeypatch.setattr(several, "AFTER_S", 0.1)
    started = processes(*programs)
    try:
        assert several.ended(started, limit_s) == message
    finally:
        for process in started:
            process.kill()
            process.wait()
