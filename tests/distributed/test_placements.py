"""Placements that our rules allow beside PyTorch's own oracle, for some operators of its samples; all of them are in
``make bench-placements``."""

from __future__ import annotations

import ctypes
import os
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import placements_truth
from tests.distributed.placement_rules import form, splits
from tests.distributed.placement_truth import Truth, calls, names, validator, written
from tests.distributed.placements import Verdict, drawn, judged

aten = torch.ops.aten
SEED, COUNT = 75, 8
UNSAFE = ("pool", "pad", "interpolate", "loss", "conv", "linalg", "lu", "embedding", "fold", "dist", "ctc")
"""Parts of names of operators that read beyond their tensors if parts do not belong together: not in this process."""
NAMES = [name for name in drawn(3 * COUNT, SEED) if not any(part in name for part in UNSAFE)][:COUNT]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings(), validator() as device_mesh:
        warnings.simplefilter("ignore")
        yield device_mesh
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_rules_allow_what_is_true(name: str, mesh: DeviceMesh) -> None:
    for call in calls(name, 1):
        verdict = judged(call, mesh, plain=True)
        assert not verdict.wrong
        assert not verdict.missing
        assert not verdict.needs, verdict.unruled


def test_operators_have_samples() -> None:
    assert len(names()) > 600
    assert len(NAMES) == COUNT


def test_the_validator_finds_what_is_known_of_a_product(mesh: DeviceMesh) -> None:
    """The first look rejects nothing that the validator calls valid: these are the seven of its own documentation."""
    (call,) = [call for call in calls("mm", 1) if call.target is aten.mm.default]
    combinations = {
        written(combination) for combination in Truth(call, mesh).valid() if "P(avg)" not in written(combination)
    }
    assert combinations == {
        "S(0), R -> S(0)", "R, S(1) -> S(1)", "S(1), S(0) -> P(sum)", "P(sum), R -> P(sum)", "R, P(sum) -> P(sum)",
    }  # fmt: skip


def test_a_wrong_split_is_found(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax whose rule forgets its decomposition."""
    (call,) = [call for call in calls("softmax", 1) if call.target is aten._softmax.default][:1]
    operator_form = form(call)
    assert all(not split.error for split in splits(call, operator_form))
    monkeypatch.setattr("tests.distributed.lockstep.Wires.swap", lambda self, group, turn, value: [value] * group.size)
    assert any(split.error for split in splits(call, operator_form))


CRASHES: dict[str, tuple[Callable[[], Any], str]] = {
    "aborts": (os.abort, "SIGABRT"),
    "reads no memory": (lambda: ctypes.string_at(0), "SIGSEGV"),
    "exits": (lambda: os._exit(0), "exit code 0"),
    "fails": (lambda: os._exit(3), "exit code 3"),
    "aborts after its answer": (lambda: Finalize(None, os.abort, exitpriority=1), "SIGABRT"),
    "hangs": (lambda: time.sleep(1000), "did not end"),
    "ends well": (lambda: None, ""),
}


def planted(call: Any, mesh: Any, *, every_part: bool, plain: bool) -> Verdict:
    """Crash as the call says, on parts that do not belong together."""
    if every_part or plain:
        CRASHES[call][0]()
    return Verdict(call, true=5 * every_part, right=1)


@pytest.mark.parametrize("crash", CRASHES)
def test_an_operator_that_crashes_is_judged_by_our_own_splits(
    crash: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placements_truth.placements, "judged", planted)
    if crash == "hangs":
        monkeypatch.setattr(placements_truth, "PATIENCE_S", 5.0)
    calls: Any = {crash: [crash, crash], "ends well too": ["ends well"]}
    summaries = {summary.target: summary for summary in placements_truth.judged(calls, mesh)}
    how = CRASHES[crash][1]
    assert [
        (summary.stopped, summary.true, summary.right, summary.wrong)
        for summary in map(summaries.get, calls)
        if summary
    ] == [(how, 0 if how else 10, 2, []), ("", 5, 1, [])]
    notes = placements_truth.findings(list(summaries.values()))[1].notes
    assert (f"our splits only: {crash}" in notes) == bool(how)
    assert (f"{crash} (our splits only: {how})" in placements_truth.table(list(summaries.values()))) == bool(how)


def test_a_crash_under_our_own_splits_is_wrong(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements_truth.placements, "judged", planted)
    calls: Any = {"aborts": ["aborts"]}
    (summary,) = placements_truth.judged(calls, mesh, plain=True)
    assert (summary.stopped, summary.wrong) == ("SIGABRT", ["our own splits end the operator's process: SIGABRT"])
    assert placements_truth.findings([summary])[0].verdict == "fail"
