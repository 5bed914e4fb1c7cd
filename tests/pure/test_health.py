"""How a run is doing, from its folder and over HTTP: states of runs and ranks, tokens, the terminal."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.cli import run as cli
from meshwright.cli.watch import BARS, _curve
from meshwright.errors import FileFormatError, LaunchError
from meshwright.report.health import RunHealth, read_health
from meshwright.report.health_server import HealthServer, ask_health

NOW_S = 1_000_000.0
TOKEN = "the token"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run of two ranks in step 3 of 10, in this process."""
    path = tmp_path / "gpt"
    (path / "ranks").mkdir(parents=True)
    (path / "run.toml").write_text("[train]\nsteps = 10\n")
    rows: list[dict[str, Any]] = [{"step": step, "step_s": 2.0, "loss": 5.0 - step} for step in (1, 2)]
    rows.insert(1, {"step": 1, "held_out": {"loss": 4.5}})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo')
    hold(path, os.getpid())
    for rank in range(2):
        status(path, rank, "at step 3", quiet_s=1.0)
    return path


def hold(directory: Path, process: int, host: str = "") -> None:
    content = {"host": host or socket.gethostname(), "process": process, "since": "2026-01-01 00:00:00"}
    (directory / ".train.lock").write_text(json.dumps(content))


def status(directory: Path, rank: int, doing: str, quiet_s: float) -> None:
    path = directory / "ranks" / f"{rank}.status"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(doing.ljust(80))
    os.utime(path, (NOW_S - quiet_s, NOW_S - quiet_s))


def ended_process() -> int:
    process = os.fork()
    if not process:
        os._exit(0)
    os.waitpid(process, 0)
    return process


def test_a_run_that_trains(directory: Path) -> None:
    health = read_health(directory, NOW_S)
    assert (health.name, health.state, health.step, health.steps) == ("gpt", "running", 2, 10)
    assert (health.step_s, health.left_s, health.losses) == (2.0, 16.0, (4.0, 3.0))
    assert (health.metrics, health.held_out) == ({"step_s": 2.0, "loss": 3.0}, {"loss": 4.5})
    assert health.where == f"process {os.getpid()} on {socket.gethostname()}"
    assert [(rank.rank, rank.state, rank.doing, rank.step, rank.quiet_s) for rank in health.ranks] == [
        (0, "ok", "at step 3", 3, 1.0), (1, "ok", "at step 3", 3, 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("doing", "quiet_s", "expected"),
    [
        ("at step 3", 29.0, "ok"), ("at step 3", 31.0, "quiet"), ("at step 1", 1.0, "behind"), ("at step 2", 1.0, "ok"),
        ("while capturing and planning", 1.0, "ok"), ("", 1.0, "ok"),
    ],
)  # fmt: skip
def test_states_of_a_rank(directory: Path, doing: str, quiet_s: float, expected: str) -> None:
    status(directory, 1, doing, quiet_s)
    assert [rank.state for rank in read_health(directory, NOW_S).ranks] == ["ok", expected]


def test_slow_steps_are_not_quiet(directory: Path) -> None:
    (directory / "metrics.jsonl").write_text('{"step": 2, "step_s": 10.0, "loss": 1.0}\n')
    status(directory, 1, "at step 3", 99.0)
    assert read_health(directory, NOW_S).ranks[1].state == "ok"
    status(directory, 1, "at step 3", 101.0)
    assert read_health(directory, NOW_S).ranks[1].state == "quiet"


def test_ends_of_a_run(directory: Path) -> None:
    hold(directory, ended_process())
    stopped = read_health(directory, NOW_S)
    assert (stopped.state, stopped.left_s, {rank.state for rank in stopped.ranks}) == ("stopped", None, {"ended"})
    failure = {"kind": "ValueError", "problem": "too large"}
    (directory / "ranks" / "1.failure").write_text(json.dumps(failure))
    failed = read_health(directory, NOW_S)
    assert (failed.state, failed.ranks[1].state, failed.ranks[1].problem) == (
        "failed",
        "failed",
        "ValueError: too large",
    )
    (directory / "run.toml").write_text("[train]\nsteps = 2\n")
    assert read_health(directory, NOW_S).state == "finished"


def test_a_run_on_another_host_is_judged_by_its_files(directory: Path) -> None:
    hold(directory, 1, "another-host")
    assert read_health(directory, NOW_S).state == "running"
    for rank in range(2):
        status(directory, rank, "at step 3", 500.0)
    assert read_health(directory, NOW_S).state == "stopped"


def test_a_run_that_starts_and_ranks_of_replicas(directory: Path) -> None:
    (directory / "metrics.jsonl").unlink()
    (directory / "run.toml").unlink()
    status(directory / "replica-1", 0, "at step 9", 1.0)
    health = read_health(directory, NOW_S)
    assert (health.state, health.steps, health.metrics) == ("starting", None, {})
    assert [(rank.replica, rank.rank, rank.state) for rank in health.ranks] == [
        (0, 0, "ok"),
        (0, 1, "ok"),
        (1, 0, "ok"),
    ]


def test_damaged_files_are_no_errors(directory: Path) -> None:
    (directory / "metrics.jsonl").write_bytes(b'\xff\n[]\n{"step": "x"}\n{"step": 1, "loss": "y", "step_s": 1}\n')
    (directory / "run.toml").write_text("[train")
    (directory / ".train.lock").write_text("")
    (directory / "ranks" / "0.failure").write_text("{")
    status(directory, 1, "at \x1b[31mstep 4\x07", 1.0)
    health = read_health(directory, NOW_S)
    assert (health.steps, health.losses, health.state) == (None, (), "failed")
    assert health.ranks[0].problem == "it has failed"
    assert health.ranks[1].doing == "at  [31mstep 4", "no escape sequence reaches a terminal"


def test_other_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="no run has written here\n  -> give the directory of a run"):
        read_health(tmp_path)
    with pytest.raises(FileFormatError, match="there is no such directory"):
        read_health(tmp_path / "none")


def test_prometheus_text(directory: Path) -> None:
    lines = read_health(directory, NOW_S).prometheus().splitlines()
    assert 'meshwright_step{run="gpt"} 2' in lines
    assert 'meshwright_held_out_loss{run="gpt"} 4.5' in lines
    quiet = [line for line in lines if "quiet" in line]
    assert quiet == [
        "# TYPE meshwright_rank_quiet_seconds gauge",
        'meshwright_rank_quiet_seconds{run="gpt",replica="0",rank="0"} 1',
        'meshwright_rank_quiet_seconds{run="gpt",replica="0",rank="1"} 1',
    ]


# --- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(directory: Path) -> Iterator[HealthServer]:
    health_server = HealthServer("127.0.0.1", 0, TOKEN, lambda: read_health(directory, NOW_S))
    thread = threading.Thread(target=health_server.run)
    thread.start()
    yield health_server
    health_server.close()
    thread.join()


def answered(address: str, path: str, authorization: str | None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", path, headers={} if authorization is None else {"Authorization": authorization})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def test_a_server_tells_what_the_folder_tells(server: HealthServer, directory: Path) -> None:
    expected = read_health(directory, NOW_S)
    assert ask_health(server.address, TOKEN) == expected
    assert answered(server.address, "/metrics", f"Bearer {TOKEN}") == (200, expected.prometheus())
    assert answered(server.address, "/../run.toml", f"Bearer {TOKEN}")[0] == 404


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN} "[:-2]]
)
def test_without_the_token_nothing_is_told(server: HealthServer, given: str | None) -> None:
    for path in ("/health", "/metrics", "/none"):
        assert answered(server.address, path, given) == (401, "the token is missing or wrong\n")


def test_errors_of_asking(server: HealthServer, directory: Path) -> None:
    with pytest.raises(
        LaunchError, match=rf"^{server.address}: the token is missing or wrong\n  -> give the token that"
    ):
        ask_health(server.address, "wrong")
    for file in (".train.lock", "run.toml"):
        (directory / file).unlink()
    (directory / "ranks").rename(directory / "moved")
    with pytest.raises(LaunchError, match=r"answers 503: .*no run has written here"):
        ask_health(server.address, TOKEN)
    with pytest.raises(LaunchError, match="cannot be used: Address already in use"):
        HealthServer(
            "127.0.0.1", int(server.address.rpartition(":")[2]), TOKEN, lambda: RunHealth(name="", state="failed")
        )
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(LaunchError, match=f"^127.0.0.1:{port}: no answer: .*refused\n  -> run `meshwright watch RUN"):
        ask_health(f"127.0.0.1:{port}", TOKEN)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_a_run(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hold(directory, ended_process())
    assert cli(["watch", str(directory), "--once"]) == 0
    output = capsys.readouterr().out
    assert "gpt: stopped, step 2 of 10" in output
    assert "loss 3  step_s 2\nheld out: loss 4.5\nloss █▁ of the last 2 steps\n" in output
    assert "rank  state  does" in output
    assert "ended  at step 3" in output
    assert cli(["watch", str(directory), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=RunHealth).step == 2
    (directory / "ranks" / "1.failure").write_text('{"kind": "ValueError", "problem": "too [bold]large"}')
    assert cli(["watch", str(directory), "--once"]) == 1
    assert "ValueError: too [bold]large" in capsys.readouterr().out


def test_the_command_asks_an_address(
    server: HealthServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_TOKEN", TOKEN)
    assert cli(["watch", server.address, "--once"]) == 0
    assert "gpt: running, step 2 of 10, 16 s left" in capsys.readouterr().out
    assert cli(["watch", server.address, "--once", "--token", "wrong"]) == 2
    assert "the token is missing or wrong" in capsys.readouterr().err


def test_wrong_calls_of_the_command(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["watch", "runs/none"]) == 2
    assert cli(["watch", str(directory), "--serve", "9464"]) == 2
    error = capsys.readouterr().err
    assert "runs/none: there is no such directory" in error
    assert "--serve: '9464' is no address and port\n  -> write 127.0.0.1:9464" in error


def test_curves() -> None:
    assert _curve(tuple(map(float, range(8)))) == BARS
    assert _curve((1.0, float("nan"), float("inf"), 1.0)) == "▁  ▁"
    assert len(_curve(tuple(map(float, range(50))))) == 25
