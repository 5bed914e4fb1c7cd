"""Launchers of several hosts, as network namespaces without shared memory between them."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright import api, config
from meshwright.emulation.network import EmulatedNetwork, NetworkBox, enter
from meshwright.errors import LaunchError
from meshwright.runtime import manifest, meeting_point
from meshwright.runtime.launchers import Meeting
from tests.end_to_end.test_survive import losses, small_run

RATE = 1e9
HOSTS = ("10.77.0.1", "10.77.0.2")

PROGRAM = """
import sys
from meshwright.emulation.network import Place, enter
from meshwright.cli import run
enter(Place(int(sys.argv[1]), int(sys.argv[2])))
sys.exit(run(sys.argv[3:]))
"""


def launched(place: NetworkBox, path: Path) -> subprocess.Popen[str]:
    words = ["launch", str(path), "--on", "torchrun"]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(place.process), str(place.task), *words], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.clusters
@pytest.mark.usefixtures("networks")
def test_two_hosts_train_as_one_process_and_stop_together(tmp_path: Path) -> None:
    """The second host is warned: both launchers end with the code for later, and losses are those of one process."""
    directory, path, steps = tmp_path / "run", tmp_path / "RUN.toml", 100_000
    run = small_run(directory, steps=steps, evaluate_every=0, checkpoint_every=5)
    config.save(run, path)
    with path.open("a") as file:
        text = path.read_text().partition("[nodes]")[0]
        file.truncate(0)
        file.write(f'{text}[nodes]\ncount = 2\nranks_per_node = 1\naddresses = ["{HOSTS[0]}", "{HOSTS[1]}"]\n')
    with EmulatedNetwork((RATE, RATE)) as network:
        hosts = [launched(place, path) for place in network.places]
        try:
            deadline = time.monotonic() + 120
            while manifest.latest_step(directory / "checkpoints") < 5 and time.monotonic() < deadline:
                if any(host.poll() is not None for host in hosts):
                    break
                time.sleep(0.05)
            hosts[1].terminate()
            outputs = [host.communicate(timeout=120)[0] for host in hosts]
        finally:
            for host in hosts:
                host.kill()
    assert [host.returncode for host in hosts] == [75, 75], "\n".join(outputs)
    assert "starting 1 rank on each of 2 hosts, in " in outputs[0]
    step = manifest.latest_step(directory / "checkpoints")
    api.train(small_run(tmp_path / "whole", steps=step, evaluate_every=0))
    run_losses, expected = losses(directory), losses(tmp_path / "whole")
    assert [number for number, _ in run_losses] == list(range(1, step + 1))
    assert [loss for _, loss in run_losses] == pytest.approx([loss for _, loss in expected], rel=0, abs=1e-9)


def problem_in(place: NetworkBox, address: str, port: int) -> str:
    enter(place)
    error = meeting_point.no_store(address, port, timedelta(seconds=1), "rank 1", RuntimeError("timed out"))
    return str(error)


@pytest.mark.usefixtures("networks")
def test_hosts_that_cannot_see_each_other_are_named() -> None:
    with EmulatedNetwork((RATE, RATE)) as network:
        context = multiprocessing.get_context("fork")
        with context.Pool(1) as pool:  # a process of its own: it stays in the namespace
            closed = pool.apply(problem_in, (network.places[1], HOSTS[0], 4000))
            away = pool.apply(problem_in, (network.places[1], "10.77.0.9", 4000))
    assert closed.startswith(f"rank 1: no store answers at port 4000 of {HOSTS[0]}; the host does\n")
    assert away.startswith(f"rank 1: {socket.gethostname()} cannot reach 10.77.0.9: ")
    assert away.endswith("\n  -> check that the hosts share a network, that no firewall closes its ports, and "
                         "GLOO_SOCKET_IFNAME")  # fmt: skip


def test_an_unknown_name_is_said() -> None:
    error = meeting_point.no_store("no-such.invalid", 1, timedelta(seconds=1), "rank 1", RuntimeError())
    assert str(error).startswith("rank 1: the name 'no-such.invalid' has no address here: ")


def test_ranks_that_did_not_come_are_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in (0, 2):
        meeting_point.come(store, rank, "127.0.0.1")
    with pytest.raises(LaunchError, match=r"not all 4 ranks met within 0\.1 s: ranks 1, 3 did not come \(2 of 4\)"):
        meeting_point.await_all(store, 4, timedelta(seconds=0.1), "rank 0")
    error = meeting_point.not_connected(store, 0, 4, "rank 0", RuntimeError("connect timed out\nmore"))
    assert str(error).startswith("rank 0: the ranks met, but could not connect to each other: connect timed out\n")


def test_a_port_of_the_meeting_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        meeting = Meeting(2, True, "127.0.0.1", port, "name", timeout_s=5.0)
        with pytest.raises(LaunchError, match=rf"nodes\.port: port {port} cannot be used: another program uses it"):
            api.run_ranks(api.launched_rank, num_ranks=1, meeting=meeting)
