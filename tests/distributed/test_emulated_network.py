"""Emulated networks: ranks of a box share memory, others only a link of the rate asked for; nothing stays behind."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.comm.collectives import Collectives
from meshwright.comm.groups import collectives, from_rank_0
from meshwright.cost.collective import Group, Network
from meshwright.emulation.network import LINK, EmulatedNetwork, run_in_boxes, why_not
from meshwright.errors import LaunchError, RankError
from meshwright.ir.cluster import Cluster
from meshwright.models import MLP, classification_loss
from meshwright.runtime import calibrate
from meshwright.runtime.between import MeasuredSizes
from meshwright.runtime.calibrate import Effort
from meshwright.schedules.collectives.choice import candidates, in_pieces
from tests.distributed.oracle import TOLERANCE, error_of

emulated = pytest.mark.usefixtures("networks")

SENT = 2**20
RATE_BITS_PER_S = 2e8


def sent_over_links(names: list[str]) -> tuple[list[list[str]], dict[str, list[int]], float]:
    """By rank the lanes to the others; by algorithm, the bytes that each rank's box sent; seconds of the last."""
    world = dist.group.WORLD
    assert world is not None
    ours, bytes_by_algorithm, seconds = collectives(world), dict[str, list[int]](), 0.0
    value = torch.ones(SENT // 4)
    for name in names:
        dist.barrier()
        before = _sent_bytes()
        dist.barrier()  # nobody of this box has begun before all have read it
        begun = time.perf_counter()
        ours.all_reduce(value.fill_(dist.get_rank() + 1), "sum", name).wait()
        seconds = time.perf_counter() - begun
        dist.barrier()
        each: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(each, _sent_bytes() - before)
        bytes_by_algorithm[name] = each
        assert torch.equal(value, torch.full_like(value, sum(range(1, dist.get_world_size() + 1))))
    lanes: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(lanes, [type(ours._lanes[peer]).__name__ for peer in sorted(ours._lanes)])
    return lanes, bytes_by_algorithm, seconds


def _sent_bytes() -> int:
    """What this box has sent over its link."""
    (line,) = [line for line in Path("/proc/thread-self/net/dev").read_text().splitlines() if f"{LINK}:" in line]
    return int(line.split()[9])


@emulated
def test_boxes_share_a_link_and_their_ranks_memory(tmp_path: Path) -> None:
    """Ranks by turns in the one box and the other: a ring crosses at every hop, levels only with each rank's share."""
    names = ["ring", "star+ring@0.2|1.3"]
    lanes, sent, seconds = run_in_boxes(
        sent_over_links, names, boxes=(0, 1, 0, 1), rates_bits_per_s=(RATE_BITS_PER_S,) * 2, directory=tmp_path
    )
    assert lanes[0] == ["TorchLane", "SharedMemory", "TorchLane"]
    assert lanes[3] == ["TorchLane", "SharedMemory", "TorchLane"]
    for each in sent["ring"]:
        assert 3 * SENT <= each < 3.2 * SENT
    for each in sent["star+ring@0.2|1.3"]:
        assert SENT <= each < 1.1 * SENT
    assert seconds > 8 * (SENT - 2 * 262_144) / RATE_BITS_PER_S, "but for what a link may send at once"


def calibrated_there() -> tuple[Cluster | None, str, float, list[str]]:
    """What calibration finds of small messages; by what a step of dp over all ranks is reduced, how far off it is, and
    which all-reduces ran."""
    effort = Effort(
        laps=2, sides=(8, 16), flat_sides=(32, 64), elements=(2**14, 2**15), scale=0.1,
        between=MeasuredSizes(bytes=(64, 4096), repeats=2, most_s=0.01),
    )  # fmt: skip
    measured = calibrate.measure(effort, lambda what: None)
    shared = from_rank_0(lambda: measured)
    assert shared is not None
    rows = tuple(  # so that it is known what wins
        msgspec.structs.replace(row, time_s=1e-9) if row.algorithm == "star+butterfly@2x2" else row
        for row in shared.collectives
    )
    torch.manual_seed(0)
    model = MLP((6, 16, 4)).double()
    batch = {"inputs": torch.randn(8, 6, dtype=torch.float64), "label": torch.arange(8) % 4}
    plain, names = copy.deepcopy(model), list[str]()
    trainer = mw.parallelize(
        model, classification_loss, batch, plan=mw.Layout(dp=4), device="cpu",
        cluster=msgspec.structs.replace(shared, collectives=rows),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    usual = Collectives.all_reduce

    def noted(self: Collectives, value: Any, op: str, algorithm: str, label: str) -> Any:
        names.append(algorithm)
        return usual(self, value, op, algorithm, label)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "all_reduce", noted)
        loss = trainer.step(batch)
    error = error_of(loss, classification_loss(plain, batch)[0].detach())
    return measured, trainer.plan.algorithms["dp"], error, names


@emulated
@pytest.mark.timeout(600)
def test_boxes_are_calibrated_and_training_goes_along_their_levels(tmp_path: Path) -> None:
    cluster, algorithm, error, names = run_in_boxes(
        calibrated_there, boxes=(0, 0, 1, 1), rates_bits_per_s=(1e9, 1e9), directory=tmp_path
    )
    assert cluster is not None
    assert [(level.name, level.fan_out) for level in cluster.levels] == [("box", 2), ("network", 2)]
    groups = {(row.level, row.ranks, row.fan_outs) for row in cluster.collectives if row.operation == "all_reduce"}
    assert groups == {("box", 2, ()), ("network", 2, ()), ("network", 4, (2, 2))}
    assert {row.level for row in cluster.collectives if row.operation == "send"} == {"box", "network"}
    network = Network(cluster)
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        measured = {
            row.algorithm for row in cluster.collectives if (row.operation, row.fan_outs) == (operation, (2, 2))
        }
        wanted = {name for name in candidates(operation, 4, "2x2") if not in_pieces(name)}
        assert measured == wanted
        assert f"{operation} " in network.algorithms(Group(4)) or network.algorithms(Group(4)) == "native"
    assert algorithm.startswith("all_reduce star+butterfly@2x2; ")
    assert names
    assert set(names) == {"star+butterfly@2x2"}
    assert error <= TOLERANCE


def fails() -> None:
    raise RankError("it fails here")


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the environment of all processes that this test starts has in it: tests beside it make networks too."""
    monkeypatch.setenv("MESHWRIGHT_TEST", str(tmp_path))
    return f"MESHWRIGHT_TEST={tmp_path}"


def _networks(mark: str) -> set[str]:
    """The network namespaces, other than this task's, of tasks of this process and of processes with the mark."""
    namespaces = set()
    for process in Path("/proc").glob("[0-9]*"):
        for task in process.glob("task/*"):
            try:
                if process.name == str(os.getpid()) or mark.encode() in (task / "environ").read_bytes().split(b"\0"):
                    namespaces.add(os.readlink(task / "ns/net"))
            except OSError:  # it has ended
                continue
    return namespaces - {os.readlink("/proc/self/ns/net")}


@emulated
def test_nothing_is_left_after_an_error(tmp_path: Path, mark: str) -> None:
    with pytest.raises(RankError, match="it fails here"):
        run_in_boxes(fails, boxes=(0, 1), rates_bits_per_s=(1e9, 5e8), directory=tmp_path)
    with pytest.raises(LaunchError, match="tc qdisc"), EmulatedNetwork((1e9, -1)):
        pass
    assert not _left(mark)


def _left(mark: str) -> set[str]:
    """The networks that there still are when those who end have had ten seconds."""
    deadline = time.monotonic() + 10
    while (left := _networks(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


PROGRAM = """
import os, sys, time
from meshwright.emulation.network import EmulatedNetwork, enter
with EmulatedNetwork((1e9, 1e9, 1e9)) as network:
    child = os.fork()
    if not child:
        enter(network.places[2])
    print(os.readlink("/proc/self/ns/net"), flush=True)
    time.sleep(60)
"""


@emulated
def test_nothing_is_left_of_a_program_that_is_killed(mark: str) -> None:
    """A namespace lives on while a rank is in it, and ends with that."""
    started = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, process_group=0)
    assert started.stdout is not None
    first, second = started.stdout.readline().strip(), started.stdout.readline().strip()
    assert first != second
    assert len(_networks(mark)) == 4, "three boxes and the switch"
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    started.stdout.close()
    assert not _left(mark)


def test_every_box_has_a_rank_and_a_rate(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"ranks in the boxes \[0, 2\], and 2 rates"):
        run_in_boxes(fails, boxes=(0, 2), rates_bits_per_s=(1e9, 1e9), directory=tmp_path)


def test_a_machine_without_the_tools_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.emulation.network.shutil.which", lambda name: None)
    assert "need ip and tc" in why_not()
