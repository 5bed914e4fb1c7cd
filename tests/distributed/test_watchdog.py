"""Waits that last are explained: who is missing, in which operation, and what the others wait for; waits that would
never end are ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright import api
from meshwright.comm import backend, groups, member  # noqa: F401 - backend gives the collective operators their kernels
from meshwright.comm.watchdog import Watchdog
from meshwright.emulation.network import LINK, run_in_boxes
from meshwright.errors import LostRankError, RankError
from meshwright.ops import collectives
from tests.distributed.pool import Ranks, RanksFailedError

BACKENDS = ["native", "butterfly"]
"""Collectives of gloo, and ours."""


def watchdog(folder: Path | None = None) -> Watchdog:
    """Start to watch, as ``parallelize`` does."""
    member.attend(folder)
    world = dist.group.WORLD
    assert world is not None
    member_watchdog = member.member(world).watchdog
    assert member_watchdog is not None
    return member_watchdog


def group_of(ranks: list[int], algorithm: str, seconds: float = 60.0) -> str:
    """A group whose ranks wait so long for each other."""
    group = dist.new_group(ranks, timeout=timedelta(seconds=seconds))
    if algorithm != "native" and dist.get_rank() in ranks:
        for lane in groups.collectives(group)._each:
            lane.timeout_s = seconds  # type: ignore[attr-defined]
    return group.group_name


def reduce(group: str, algorithm: str, label: str, num: int = 5) -> None:
    value = torch.zeros(num)
    collectives.WAIT(collectives.ALL_REDUCE(value, "sum", group, algorithm, label=label))


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.01)


def lines_with(dog: Watchdog, *words: str) -> tuple[str, ...]:
    """The report about this rank's wait, as soon as these words are in it."""
    while True:
        lines = dog.lines()
        if all(each in "".join(lines) for each in words):
            return lines
        time.sleep(0.01)


def store_flag(name: str) -> None:
    """Tell the other ranks that something has happened, without a collective."""
    groups.process_group(dist.group.WORLD.group_name).get_group_store().set(name, "1")  # type: ignore[union-attr]


def await_flag(name: str) -> None:
    store = groups.process_group(dist.group.WORLD.group_name).get_group_store()  # type: ignore[union-attr]
    until(lambda: bool(store.check([name])))


# --- a rank that does not come ---------------------------------------------------------------------------------------


def miss(algorithm: str) -> str:
    """Rank 1 computes instead of coming; rank 0 gives up."""
    watchdog()
    group = group_of([0, 1], algorithm, 1.0)
    reduce(group, algorithm, "gradients of first")
    if dist.get_rank() == 1:
        await_flag("given up")
        return ""
    with pytest.raises(LostRankError) as error:
        reduce(group, algorithm, "gradients of second")
    store_flag("given up")
    return str(error.value)


@pytest.mark.parametrize("algorithm", BACKENDS)
def test_the_error_of_a_timeout_says_what_the_missing_rank_does(ranks: Ranks, algorithm: str) -> None:
    message = ranks(2, miss, algorithm, timeout=60)[0]
    assert "rank 1: it " in message, message
    assert "the last that it did was #1 all_reduce of 5 x float32 (gradients of first)" in message
    assert "for #2 all_reduce of 5 x float32 (gradients of second); rank 1 has not begun it" in message


def compute_for_long(algorithm: str) -> tuple[str, ...]:
    """Rank 1 is in a function of its own, and comes when rank 0 has seen that."""
    dog, group = watchdog(), group_of([0, 1], algorithm)
    if dist.get_rank() == 1:
        await_flag("seen")
        reduce(group, algorithm, "late")
        return ()
    dog._report_s = 0.5
    lines: list[tuple[str, ...]] = []

    def look() -> None:
        lines.append(lines_with(dog, "in await_flag"))
        store_flag("seen")

    thread = threading.Thread(target=look)
    thread.start()
    reduce(group, algorithm, "late")
    thread.join()
    return lines[-1]


@pytest.mark.parametrize("algorithm", BACKENDS)
def test_the_stack_of_a_slow_rank_is_seen_while_others_wait(ranks: Ranks, algorithm: str) -> None:
    lines = ranks(2, compute_for_long, algorithm, timeout=60)[0]
    assert lines[0].startswith("rank 1: it "), lines
    assert any("rank 1 is at" in line and "in await_flag" in line for line in lines), lines


def stop(algorithm: str) -> tuple[str, ...]:
    """Rank 1 is stopped by a signal until rank 0 has seen that."""
    dog, group = watchdog(), group_of([0, 1], algorithm)
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    if dist.get_rank() == 1:
        store.set("number", f"{os.getpid()}")
        os.kill(os.getpid(), signal.SIGSTOP)
        reduce(group, algorithm, "stopped")
        return ()
    number, lines = int(store.get("number")), list[tuple[str, ...]]()

    def look() -> None:
        try:
            lines.append(lines_with(dog, "is stopped by a signal"))
        finally:
            os.kill(number, signal.SIGCONT)

    thread = threading.Thread(target=look)
    thread.start()
    reduce(group, algorithm, "stopped")
    thread.join()
    return lines[-1]


@pytest.mark.parametrize("algorithm", BACKENDS)
def test_a_stopped_rank_is_told_from_a_dead_one_and_may_go_on(ranks: Ranks, algorithm: str) -> None:
    lines = ranks(2, stop, algorithm, timeout=60)[0]
    assert lines[0].startswith("rank 1: its process is stopped by a signal (kill -CONT "), lines
    assert any("rank 0 has waited" in line and "all_reduce of 5 x float32 (stopped)" in line for line in lines), lines


def die(algorithm: str, folder: Path) -> None:
    """Rank 1 is killed before a collective."""
    watchdog(folder)
    group = group_of([0, 1], algorithm)
    reduce(group, algorithm, "first")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(LostRankError) as error:
        reduce(group, algorithm, "second")
    assert error.value.where == "rank 1", error.value
    assert "rank 1: its process has ended; the last that it did was #1 all_reduce" in str(error.value), error.value


@pytest.mark.parametrize("algorithm", BACKENDS)
def test_a_killed_rank_is_named_and_its_record_stays(ranks: Ranks, algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as error:
        ranks(2, die, algorithm, tmp_path / "ranks", timeout=60)
    assert list(error.value.failures) == [1], error.value
    explanation = api.explain_run(tmp_path)
    assert explanation.ranks[1].condition == "ended"
    assert [event.what for event in explanation.ranks[1].flight.events][-1] == "all_reduce of 5 x float32 (first)"


def cut(sockets_of: str) -> str:
    """Rank 1 cuts the connections of gloo while rank 0 waits, and goes on with something else."""
    watchdog()
    group = group_of([0, 1], "native")
    reduce(group, "native", "first")
    if dist.get_rank() == 1:
        await_flag("waits")
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as each:
                if each.family == socket.AF_INET and each.getpeername()[1] != int(sockets_of):
                    each.shutdown(socket.SHUT_RDWR)
        await_flag("given up")
        return ""
    threading.Timer(0.5, store_flag, ("waits",)).start()
    with pytest.raises(LostRankError) as error:
        reduce(group, "native", "second")
    store_flag("given up")
    return str(error.value)


def test_a_cut_connection_is_told_from_a_dead_rank(ranks: Ranks) -> None:
    ranks(2, dist.barrier)
    assert ranks._store is not None  # its connections stay
    message = ranks(2, cut, str(ranks._store.port), timeout=60)[0]
    assert "Connection closed by peer" in message, message
    assert "rank 1: it " in message, message
    assert "its process has ended" not in message, message
    assert "for #2 all_reduce of 5 x float32 (second); rank 1 has not begun it" in message


def cut_the_link(folder: Path) -> tuple[str, ...]:
    """Rank 1 cuts the link of its box, until rank 0 has seen that."""
    world, cut, seen = dist.group.WORLD, folder / "cut", folder / "seen"
    assert world is not None
    dog = member.member(world).watchdog
    assert dog is not None
    reduce(world.group_name, "native", "first")
    lines: list[tuple[str, ...]] = []

    def look() -> None:
        if world.rank() == 0:
            lines.append(lines_with(dog, "all ranks have come", "is cut or loses packets"))
            seen.touch()
        else:
            until(seen.exists)
            subprocess.run(["ip", "link", "set", LINK, "up"], check=True)

    if world.rank() == 1:
        subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
        cut.touch()
    until(cut.exists)
    thread = threading.Thread(target=look)
    thread.start()
    reduce(world.group_name, "native", "second")
    thread.join()
    return lines[0] if lines else ()


@pytest.mark.usefixtures("networks")
def test_a_cut_link_between_boxes_is_told_from_a_slow_rank(tmp_path: Path) -> None:
    lines = run_in_boxes(cut_the_link, tmp_path, boxes=(0, 1), rates_bits_per_s=(1e8, 1e8), directory=tmp_path / "run")
    assert "all ranks have come, and what they send does not arrive: look at the links between" in lines[0], lines
    assert any("for #2 all_reduce of 5 x float32 (second)" in line for line in lines), lines


# --- ranks that differ -----------------------------------------------------------------------------------------------


def call_in_another_order(algorithm: str) -> str:
    """Two groups of the same ranks; rank 1 begins with the second. The default timeout is half an hour."""
    watchdog()
    pair = [group_of([0, 1], algorithm, 1800.0) for _ in range(2)]
    if dist.get_rank() == 1:
        pair.reverse()
    try:
        for group in pair:
            reduce(group, algorithm, f"of {pair.index(group)}")
    except RankError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("algorithm", BACKENDS)
def test_another_order_of_groups_is_named_long_before_a_timeout(ranks: Ranks, algorithm: str) -> None:
    for rank, message in enumerate(ranks(2, call_in_another_order, algorithm, timeout=60)):
        if "has given up because of it" not in message:
            assert "they wait for each other in a circle: rank 0 waits for rank 1 in #1 all_reduce" in message, message
            assert message.startswith("ranks 0 and 1: "), (rank, message)


def call_something_else(kind: str, folder: Path | None = None) -> str:
    """Rank 1 calls another operation than rank 0, as the second of the group."""
    watchdog(folder)
    group = group_of([0, 1], "native", 1800.0)
    reduce(group, "native", "first")
    try:
        if dist.get_rank() == 1 and kind == "operation":
            collectives.WAIT(collectives.ALL_GATHER(torch.zeros(7), group, 2, "native"))
        elif kind == "order" and dist.get_rank() == 1:
            await_flag("rank 0 has begun")
            for label, num in (("third", 300_000), ("second", 2)):
                reduce(group, "native", label, num)
        elif kind == "order":
            begun = collectives.ALL_REDUCE(torch.zeros(2), "sum", group, "native", label="second")
            store_flag("rank 0 has begun")
            collectives.WAIT(begun)
        elif dist.get_rank() == 1 and kind == "shape":
            reduce(group, "native", "second", 3)
        else:
            for label, num in (("second", 2), ("third", 300_000)):
                reduce(group, "native", label, num)
    except RankError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [("operation", "all_gather of 14 x float32"), ("shape", "all_reduce of 3 x float32 (second)")],
)
def test_ranks_that_differ_are_named_where_gloo_would_wait(ranks: Ranks, kind: str, theirs: str) -> None:
    for text in ranks(2, call_something_else, kind, timeout=60):
        assert text.startswith(f"rank 1: it is in #2 {theirs}, where rank 0 is in #2 all_reduce of 2 x float32"), text


def survive_another_order(folder: Path) -> None:
    """Gloo ends rank 0, which receives more than it expects."""
    message = call_something_else("order", folder)
    assert message.startswith("rank 0: "), message
    assert "#2 all_reduce of 2 x float32 (second)" in message
    assert "#2 all_reduce of 300000 x float32 (third)" in message


def test_ranks_that_differ_are_named_where_gloo_ends_one_of_them(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as error:
        ranks(2, survive_another_order, tmp_path, timeout=60)
    assert list(error.value.failures) == [0], error.value


def wait_for_a_message(lanes: str) -> str:
    """Each rank waits for a message of the other one."""
    watchdog()
    me = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if lanes == "gloo":
            patch.setattr(groups, "_connected", lambda group, name, peers, slots: dict.fromkeys(peers))
        channel = groups.channels({1 - me})[1 - me]
    try:
        channel.receive(torch.zeros(4), "stage 1, micro-batch 0, 1RECV_F0").wait()
    except RankError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("lanes", ["shared memory", "gloo"])
def test_ranks_that_wait_for_each_others_messages_are_named(ranks: Ranks, lanes: str) -> None:
    for message in ranks(2, wait_for_a_message, lanes, timeout=60):
        assert message.startswith("ranks 0 and 1: they wait for each other in a circle"), message
        assert "message of 4 x float32 from rank 1 to rank 0 (stage 1, micro-batch 0, 1RECV_F0)" in message


def in_boxes_of_their_own() -> str:
    """Ranks see each other's records only through the store."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "box", lambda: f"box {dist.get_rank()}")
        watchdog()
    return call_in_another_order("native")


def test_ranks_of_other_boxes_are_asked(ranks: Ranks) -> None:
    for message in ranks(2, in_boxes_of_their_own, timeout=60):
        assert "they wait for each other in a circle" in message, message
