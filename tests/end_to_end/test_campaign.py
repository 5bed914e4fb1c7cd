"""The campaign of faults: its own checks find what is planted, and a few of its faults."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.campaign import checks, journal, site
from benchmarks.campaign.__main__ import findings, inflict, memory_disk
from benchmarks.campaign.checks import Problem
from benchmarks.campaign.journal import Entry
from benchmarks.campaign.kinds import KINDS
from benchmarks.campaign.site import Site, references
from benchmarks.campaign.warm import Request, Starter
from meshwright import api
from meshwright.ir.result import Check
from tests.end_to_end.test_survive import small_run

MESSAGE = "meshwright: runs/x/plan.json: the plan of this run is damaged: it ends early\n  -> remove it"


def texts(problems: Iterator[Problem]) -> list[str]:
    return [problem.text for problem in problems]


# --- what is planted is found ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of the steps 6, 8 and 9."""
    directory: Path = tmp_path_factory.mktemp("trained") / "run"
    api.train(small_run(directory, keep=3, evaluate_every=0))
    return directory


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-r", str(trained), str(tmp_path)], check=True)
    return tmp_path / "run"


def test_a_lost_checkpoint_is_found(run: Path) -> None:
    checkpoints = run / "checkpoints"
    assert not [*checks.lost_checkpoints(checkpoints, 9)]
    (path,) = (checkpoints / "step-00000008").glob("data-*/*.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (problem,) = checks.lost_checkpoints(checkpoints, 9)
    assert problem.category == "lost"
    assert "step-00000008" in problem.text
    assert not [*checks.lost_checkpoints(checkpoints, 9, damaged={8})], "the fault itself has damaged it"
    (checkpoints / "step-00000009" / "manifest.json").unlink()
    assert texts(checks.lost_checkpoints(checkpoints, 9, damaged={8})) == [
        "step 9 was saved, and the latest whole checkpoint is of step 6"
    ]


def test_a_run_that_went_on_from_too_early_is_found() -> None:
    output = "step 6 is loaded from x\ngoing on at step 6 of 9\n"
    assert not [*checks.lost_steps(output, 6)]
    assert texts(checks.lost_steps(output, 7)) == ["step 7 was saved, and the run went on from step 6"]
    again = "rank 1 was killed\n  -> all ranks start again from the beginning; the output is in x"
    assert texts(checks.lost_steps(again, 2)) == ["step 2 was saved, and the run began again"]


def test_a_wrong_loss_is_found(run: Path) -> None:
    expected = site.losses_in(run)
    path, other = run / "metrics.jsonl", expected | {4: expected[4] * (1 + 2**-52)}
    assert len(expected) == 9
    assert not [*checks.wrong_losses(run, expected, 0.0)]
    assert texts(checks.wrong_losses(run, other, 0.0)) == [
        f"step 4: the loss is {expected[4]!r} instead of {other[4]!r}"
    ], "a bit is enough"
    assert not [*checks.wrong_losses(run, other, 1e-9)]
    rows = [row for row in path.read_text().splitlines(keepends=True) if '"loss"' in row and "held_out" not in row]
    for wrong, gaps in ((rows[:3] + rows[4:], True), (rows[:4] + rows[3:], False), (rows[:-1], True)):
        path.write_text("".join(wrong))
        (problem,) = checks.wrong_losses(run, expected, 0.0)
        assert problem.category == "wrong"
        assert bool([*checks.wrong_losses(run, expected, float("inf"))]) != gaps
    nan = json.loads(rows[4]) | {"loss": float("nan")}
    path.write_text("".join([*rows[:4], json.dumps(nan) + "\n", *rows[5:]]))
    assert [*checks.wrong_losses(run, expected, float("inf"))], "it must be a number"
    path.write_text("".join(rows) + rows[-1][:9])
    assert [*checks.wrong_losses(run, expected, 0.0)], "half a row"


@pytest.mark.parametrize(
    ("output", "code", "problem"),
    [
        (MESSAGE, 2, ""),
        ("", 2, "exit code 2 without a message"),
        (MESSAGE.partition("\n")[0], 2, "the message has no remedy"),
        ("meshwright: it does not work\n  -> do something", 2, "the message names no place"),
        (MESSAGE, 1, "exit code 1 instead of 0, 2, 75"),
        (f"Traceback (most recent call last):\n{MESSAGE}", 2, "a traceback is shown"),
        (MESSAGE + "\nmore" * 30, 2, "the message has 32 rows of 100 columns, and a screen has 24"),
        (MESSAGE + " x" * 2000, 2, "the message has 42 rows of 100 columns, and a screen has 24"),
        ("meshwright: unexpected KeyError: 3\n  -> this is a defect; its traceback is in /tmp/x", 2,
         "the command calls its own end a defect"),
        ("stopped by SIGTERM; step 7 of 9 is saved: the same command goes on from there", 75, ""),
        ("", 75, "nothing says why it ends, and that it can go on"),
        ("all is well", 0, ""),
        (MESSAGE, -11, "exit code -11 instead of 0, 2, 75"),
    ],
)  # fmt: skip
def test_an_unexplained_end_is_found(output: str, code: int, problem: str) -> None:
    assert texts(checks.unexplained(output, code, {0, 2, 75})) == ([problem] if problem else [])


def test_words_that_an_end_must_have() -> None:
    assert texts(checks.unexplained(MESSAGE, 2, {2}, "no space left")) == ["nothing says 'no space left'"]
    assert not [*checks.unexplained(MESSAGE, 2, {2}, r"plan\.json.*damaged")]


def test_leftovers_are_found(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    assert not [*checks.left_files({"temporary file": folder}), *checks.left_in_run(run)]
    (folder / "pymp-x").mkdir()
    assert texts(checks.left_files({"temporary file": folder})) == ["temporary file: pymp-x"]
    (run / ".plan.json.abc").touch()
    stray = run / "checkpoints" / "step-00000009" / "data-00000000"
    stray.mkdir()
    assert texts(checks.left_in_run(run)) == [
        "in the run's folder: .plan.json.abc",
        "in the run's folder: checkpoints/step-00000009/data-00000000, which no manifest names",
    ]
    process = subprocess.Popen(["sleep", "60"])
    deadline = time.monotonic() + 60
    while b"sleep" not in Path(f"/proc/{process.pid}/cmdline").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)  # it may not have begun the program yet
    (left,) = checks.left_processes([process.pid])
    assert left.text.startswith(f"process {process.pid} (sleep 60; ")
    process.kill()
    process.wait()
    assert not [*checks.left_processes([process.pid])]
    mounts = f"36 35 98:0 / {run}/disk rw - tmpfs tmpfs rw\n37 35 98:0 / /elsewhere rw - tmpfs tmpfs rw\n"
    assert texts(checks.left_mounts(run, mounts)) == [f"a file system is mounted at {run}/disk"]
    table = """  sl  local_address rem_address   st
   0: 0100007F:733C 00000000:0000 0A 00000000:00000000
   1: 0100007F:733C 0100007F:8000 06 00000000:00000000
"""
    assert texts(checks.left_ports(table)) == ["port 29500 listens"], "06: it waits for late packets, as TCP does"


# --- commands --------------------------------------------------------------------------------------------------------


def leaves_a_process() -> None:
    """A command whose child lives on."""
    if not os.fork():
        os.setsid()
        time.sleep(600)


def raises() -> None:
    raise KeyError("nobody expects it")


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    with Starter({"OMP_NUM_THREADS": "1"}) as context:
        yield context


def command(starter: Starter, folder: Path, main: str) -> Site:
    run_site = Site(starter, folder / main, "one", {}, random.Random(0), num_boxes=0)
    run_site.start(verb=(), main=f"{__name__}:{main}")
    return run_site


def test_a_process_that_is_left_behind_is_found(
    starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "LEFT_S", 0.2)
    run_site = command(starter, tmp_path, "leaves_a_process")
    assert run_site.end() == 0
    assert starter.living(), "its parent is gone, and it is still known"
    run_site.settle()
    (problem,) = run_site.problems
    assert problem.category == "left"
    run_site.until_nothing_lives()
    assert not starter.living()


def test_an_end_that_nobody_explains_is_found(starter: Starter, tmp_path: Path) -> None:
    run_site = command(starter, tmp_path, "raises")
    assert run_site.judge({0, 2}) == 1
    assert [problem.text for problem in run_site.problems] == [
        "exit code 1 instead of 0, 2", "a traceback is shown", "exit code 1 without a message",
    ]  # fmt: skip


def test_a_limit_and_a_signal(starter: Starter, tmp_path: Path) -> None:
    output = tmp_path / "output"
    process = starter.start(
        Request(("clusters",), str(output), main=f"{__name__}:leaves_a_process", limits={"RLIMIT_NOFILE": 77})
    )
    deadline = time.monotonic() + 60
    while starter.code(process) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    (left,) = starter.living()
    assert "77" in Path(f"/proc/{left}/limits").read_text()
    os.kill(left, signal.SIGKILL)
    while starter.living() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not starter.living()


@pytest.fixture(scope="module")
def expected(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    folder = tmp_path_factory.mktemp("references")
    return references(starter, folder, folder / "references.json", ["one"])


@pytest.mark.parametrize("kind", ["launcher-killed", "bit-flip-manifest", "model-exception"])
def test_a_fault(
    starter: Starter, expected: dict[str, dict[int, float]], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, kind, KINDS[kind]._replace(runs=("one",)))
    entry = inflict(starter, tmp_path, 0, 0, (kind,), expected, boxes=False)
    assert (entry.kind, entry.run, entry.missed, entry.problems) == (kind, "one", "", ())
    assert not [*tmp_path.iterdir()]
    wrong = {"one": {step: loss + (step == 97) for step, loss in expected["one"].items()}}
    assert expected["one"].keys() == set(range(1, site.STEPS + 1))
    assert wrong["one"] != expected["one"]


def test_a_wrong_loss_of_a_fault_is_found(
    starter: Starter, expected: dict[str, dict[int, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "preempted", KINDS["preempted"]._replace(runs=("one",)))
    wrong = {"one": {step: loss + (step == 97) for step, loss in expected["one"].items()}}
    entry = inflict(starter, tmp_path, 0, 0, ("preempted",), wrong, boxes=False)
    assert [problem.category for problem in entry.problems] == ["wrong"]
    assert entry.problems[0].text.startswith("step 97: the loss is ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_disks_of_a_killed_campaign_are_unmounted(tmp_path: Path) -> None:
    place = tmp_path / "work"
    for path in (place, place / "1-1" / "disk"):
        path.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "left", str(path)], check=True)
    with ExitStack() as stack:
        assert memory_disk(tmp_path, stack) == place
        assert not [*place.iterdir()]
        assert [*checks.left_mounts(tmp_path, Path("/proc/self/mountinfo").read_text())] == [
            Problem("left", f"a file system is mounted at {place}")
        ]
    assert not [*checks.left_mounts(tmp_path, Path("/proc/self/mountinfo").read_text())]


# --- order and journal -----------------------------------------------------------------------------------------------


def test_every_round_has_every_kind_and_a_seed_draws_the_same() -> None:
    names = tuple(KINDS)
    first = [journal.drawn(3, number, names) for number in range(2 * len(names))]
    assert sorted(name for name, _, _ in first[: len(names)]) == sorted(names)
    assert sorted(name for name, _, _ in first[len(names) :]) == sorted(names)
    again = [journal.drawn(3, number, names) for number in range(2 * len(names))]
    assert [(name, run, draw.random()) for name, run, draw in first] == [
        (name, run, draw.random()) for name, run, draw in again
    ]
    assert [name for name, _, _ in first] != [journal.drawn(4, number, names)[0] for number in range(2 * len(names))]
    assert len(KINDS) >= 20
    assert all(kind.inflict.__doc__ for kind in KINDS.values())


def test_half_a_line_of_the_journal_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    entries = [Entry(number, 0, "nan", "tensors", problems=(Problem("left", "x"),) * number) for number in range(2)]
    journal.append(path, entries[0])
    with path.open("ab") as file:
        file.write(b'{"number": 1, "se')
    assert journal.read(path) == entries[:1]
    journal.append(path, entries[1])
    assert journal.read(path) == entries


def test_a_problem_fails_its_findings() -> None:
    entries = [Entry(0, 0, "nan", "tensors", seconds=3.0), Entry(1, 0, "rank-killed", "dp2", seconds=4.0)]
    good = [each for each in findings(entries, {}) if isinstance(each, Check)]
    assert [each.target for each in good if each.verdict == "fail"] == [
        "the campaign: at least 1000 faults of at least 20 kinds"
    ]
    bad = [*entries, Entry(2, 0, "rank-killed", "dp2", problems=(Problem("lost", "step 3"),), seconds=4.0)]
    failed = [each.target for each in findings(bad, {}) if each.verdict == "fail"]
    assert failed[1:] == [
        "after each fault: no lost checkpoints",
        "rank-killed: A rank is killed at a step that is drawn.",
    ]
    missed = findings([*entries, Entry(2, 0, "nan", "tensors", missed="it ended")], {})
    assert any(each.verdict == "fail" and "the moment" in each.target for each in missed)
