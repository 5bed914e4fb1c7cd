"""The flight recorder of a rank: its last 1,000 operations, which others read while it lives and when it is gone."""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from meshwright.cli import run
from meshwright.comm import pytorch_flight
from meshwright.comm.stacks import SignalledStacks, demand, last_stack, main_stack
from meshwright.comm.transport.connections import TcpConnection, connections, described
from meshwright.comm.transport.flight_recorder import FlightRecorder
from meshwright.comm.transport.process import box
from meshwright.errors import FileFormatError
from meshwright.ir import flight
from meshwright.ir.flight import EVENTS, GROUPS, Notes, Seen


def recorder(path: Path | None = None, rank: int = 1) -> FlightRecorder:
    return FlightRecorder(rank, 4, box(), path)


def test_operations_are_read_as_they_were_recorded() -> None:
    flight_recorder = recorder()
    group = flight_recorder.group("3", range(4))
    event = flight_recorder.begin(group, 1, b"all_reduce of 4 x float32 (axis dp)", 16, 77)
    flight_recorder.wait(event)
    assert flight_recorder.waits_since() > 0
    read = flight_recorder.read()
    assert (read.rank, read.num_ranks, read.process, read.host) == (1, 4, os.getpid(), socket.gethostname())
    assert read.groups["3"].ranks == (0, 1, 2, 3)
    assert read.groups["3"].begun == 1
    (operation,) = read.awaited
    assert (operation.sequence, operation.what, operation.num_bytes, operation.signature) == (
        1, "all_reduce of 4 x float32 (axis dp)", 16, 77,
    )  # fmt: skip
    flight_recorder.end(event)
    assert not flight_recorder.waits_since()
    assert flight_recorder.read().awaited == ()
    assert flight_recorder.read().last is not None


def test_an_operation_that_failed_is_neither_done_nor_awaited() -> None:
    flight_recorder = recorder()
    event = flight_recorder.begin(flight_recorder.group("0", (0, 1)), 1, b"barrier")
    flight_recorder.wait(event)
    flight_recorder.fail(event)
    (operation,) = flight_recorder.read().events
    assert operation.done_s < 0
    assert not operation.is_awaited
    assert flight_recorder.read().last is None


def test_the_last_thousand_are_kept_and_groups_count_on() -> None:
    flight_recorder = recorder()
    rare, often = flight_recorder.group("rare", (0, 1)), flight_recorder.group("often", (0, 1))
    old = flight_recorder.begin(rare, 1, b"once")
    for number in range(1, EVENTS + 201):
        flight_recorder.end(flight_recorder.begin(often, number, f"number {number}".encode()))
    flight_recorder.end(old)  # its place is another's by now
    read = flight_recorder.read()
    assert [event.sequence for event in read.events] == list(range(201, EVENTS + 201))
    assert all(event.done_s > 0 for event in read.events)
    assert (read.groups["rare"].begun, read.groups["often"].begun) == (1, EVENTS + 200)


def test_texts_and_groups_that_do_not_fit_are_shortened() -> None:
    flight_recorder = recorder()
    for number in range(GROUPS + 5):
        flight_recorder.begin(flight_recorder.group(f"group {number}", (0, number)), 1, b"x" * 1000)
    read = flight_recorder.read()
    assert len(read.groups) == GROUPS
    assert read.groups["others"].ranks == ()
    assert {len(event.what) for event in read.events} == {flight.TEXT_BYTES}
    flight_recorder.note(Notes(stack=("a",) * 3, links=("b" * 100,) * 1000))
    assert flight_recorder.read().notes.stack == ("a",) * 3
    assert 0 < len(flight_recorder.read().notes.links) < 1000


def test_other_memory_is_refused() -> None:
    with pytest.raises(FileFormatError, match="not the memory of a flight recorder"):
        flight.read(bytes(flight.SIZE))
    with pytest.raises(FileFormatError, match="not the memory of a flight recorder"):
        flight.read(b"")


def test_the_record_stays_when_the_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "ranks" / "0.flight"
    if (child := os.fork()) == 0:
        flight_recorder = recorder(path, 0)
        for number in range(1, 4):
            event = flight_recorder.begin(flight_recorder.group("0", (0, 1)), number, f"step {number}".encode())
            flight_recorder.wait(event)
            if number < 3:
                flight_recorder.end(event)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    read = flight.read(path.read_bytes())
    assert [event.what for event in read.events] == ["step 1", "step 2", "step 3"]
    assert [event.what for event in read.awaited] == ["step 3"]


def test_a_directory_that_cannot_be_written_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        flight_recorder = recorder(tmp_path / "file" / "1.flight")
    assert "the flight recorder lives only as long as the ranks" in caplog.text
    assert flight_recorder.read().rank == 1


# --- meshwright explain ----------------------------------------------------------------------------------------------


def test_the_command_explains_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "ranks"
    first, second = recorder(folder / "0.flight", 0), recorder(folder / "1.flight", 1)
    for each in (first, second):
        each.end(each.begin(each.group("0", (0, 1)), 1, b"broadcast (axis dp)"))
    first.wait(first.begin(first.group("0", (0, 1)), 2, b"all_reduce of 4 x float32 (axis dp, gradients of w)"))
    second.leave("it has failed with KeyError: 'x'")
    assert run(["explain", str(tmp_path), "--events", "5"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(
        "rank 1: its process has ended: it has failed with KeyError: 'x'; the last that it did was"
    )
    assert "for #2 all_reduce of 4 x float32 (axis dp, gradients of w); rank 1 has not begun it" in output
    assert output.count("#1 broadcast (axis dp)") == 3
    assert run(["explain", str(tmp_path), "--json"]) == 0
    assert '"causes": [' in capsys.readouterr().out


def test_a_directory_without_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(tmp_path)]) == 2
    assert "no rank has left a flight recorder here" in capsys.readouterr().err
    (tmp_path / "0.flight").write_bytes(b"nothing")
    assert run(["explain", str(tmp_path)]) == 2
    assert "0.flight" in capsys.readouterr().err


# --- PyTorch's own recorder ------------------------------------------------------------------------------------------

DUMP = {
    "entries": [
        {
            "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "process_group": ["3", "undefined"],
            "profiling_name": "nccl:all_reduce", "input_sizes": [[4, 2], []], "input_dtypes": ["Float"],
            "state": state, "retired": retired, "time_created_ns": number * 10**9,
        }
        for number, state, retired in ((1, "completed", True), (2, "scheduled", True), (3, "started", False))
    ]
}  # fmt: skip


def test_what_only_pytorch_knows_is_compared_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_flight, "dump_flight_recorder", lambda: json.dumps(DUMP))
    (operation,) = pytorch_flight.pending()
    assert str(operation) == "PyTorch's recorder: group 3 #3: nccl:all_reduce of 4x2 1 float, started"
    first, second = recorder(rank=0), recorder(rank=1)
    second.note(Notes(stack=("train.py:7 in load",)))
    seen = {0: Seen(first.read(), "runs"), 1: Seen(second.read(), "runs")}
    assert list(pytorch_flight.report(operation, 0, seen, 43.0)) == [
        "rank 0 is in group 3 #3 since 40.0 s:",
        "  rank 0: group 3 #3: nccl:all_reduce of 4x2 1 float, started",
        "  rank 1 has not begun it, or is not in its group: it runs, and has not communicated",
        "  rank 1 is at\n      train.py:7 in load",
    ]
    second.note(Notes(pytorch=(str(operation).replace("all_reduce", "broadcast"),)))
    lines = list(pytorch_flight.report(operation, 0, seen | {1: Seen(second.read(), "runs")}, 43.0))
    assert lines[0] == "ranks 0 and 1 are in group 3 #3 since 40.0 s:"
    assert lines[2] == "  rank 1: group 3 #3: nccl:broadcast of 4x2 1 float, started"


def test_pytorch_that_records_nothing_has_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch_flight, "dump_flight_recorder", lambda: "")
    assert pytorch_flight.pending() == ()


# --- stacks and connections ------------------------------------------------------------------------------------------


def compute(path: Path) -> NoReturn:
    SignalledStacks(path)
    while True:
        pass


def test_a_process_that_computes_writes_its_stack_when_it_gets_the_signal(tmp_path: Path) -> None:
    path = tmp_path / "0.stacks"
    if (child := os.fork()) == 0:
        compute(path)
    try:
        while not demand(child):
            time.sleep(0.01)
        deadline = time.monotonic() + 60.0
        while not ((stack := last_stack(path)) and "in compute" in stack[-1]):  # it is written in pieces
            assert time.monotonic() < deadline, stack
            time.sleep(0.01)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_process_without_the_handler_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as process:
        assert not demand(process.pid)
        assert process.communicate("\n")[0] is None
    assert process.returncode == 0


def test_a_rank_says_where_its_main_thread_is() -> None:
    assert any("in test_a_rank_says_where_its_main_thread_is" in line for line in main_stack())


def test_a_connection_that_its_other_end_has_closed_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        theirs, _ = server.accept()
        own = f"{client.getsockname()[1]} 127.0.0.1:{server.getsockname()[1]}"
        assert not connections()[own].is_closed
        theirs.sendall(b"x" * 1000)
        assert client.recv(1000, socket.MSG_WAITALL) == b"x" * 1000
        assert connections()[own].received_bytes >= 1000
        theirs.close()
        assert client.recv(1) == b""
        now = connections()
        assert now[own].is_closed
        assert f"the connection to {now[own].peer} was closed by its other end" in described({}, now, 1.0)


def test_slow_links_are_told_from_cut_ones() -> None:
    before = {
        "slow": TcpConnection("10.0.0.1:5", False, 3, 0, 0.0, 1_000_000, 0),
        "cut": TcpConnection("10.0.0.2:5", False, 0, 0, 1.0, 500, 500),
        "idle": TcpConnection("10.0.0.3:5", False, 0, 0, 9.0, 500, 500),
    }
    now = before | {
        "slow": TcpConnection("10.0.0.1:5", False, 3, 0, 0.0, 1_500_000, 0),
        "cut": TcpConnection("10.0.0.2:5", False, 7, 4, 3.0, 500, 500),
    }
    assert described(before, now, 0.5) == (
        (
            "the connection to 10.0.0.2:5 is cut or loses packets: what was sent 5 times was not confirmed; no data "
            "has come for 3.0 s"
        ),
        "the connection to 10.0.0.1:5 moves 1 MB/s: it is slow, not dead",
    )


def test_memory_of_a_rank_that_was_killed_is_read_by_whoever_had_mapped_it() -> None:
    flight_recorder = recorder()
    flight_recorder.begin(flight_recorder.group("0", (0, 1)), 1, b"barrier")
    with mmap.mmap(os.open(f"/proc/self/fd/{flight_recorder.descriptor}", os.O_RDWR), flight.SIZE) as theirs:
        flight_recorder.close()
        del flight_recorder
        assert [event.what for event in flight.read(theirs).events] == ["barrier"]
