"""Mailboxes between real processes: what arrives, who waits, and what all see when participants are killed and join."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import mail
from meshwright.comm.mail import ZmqMailbox
from meshwright.comm.mailbox import Letter, View
from meshwright.comm.transport.zeromq import DTYPES
from meshwright.comm.views import ViewLog
from meshwright.emulation.network import LINK, EmulatedNetwork, NetworkBox, enter
from meshwright.errors import LaunchError, LostRankError, RankError
from tests.distributed.pool import HOST, PRELOAD

CONTEXT = multiprocessing.get_context("forkserver")
WAIT_S = 60.0
NEAR_AND_FAR = pytest.mark.parametrize("far", [False, True], ids=["in_a_box", "between_boxes"])


class Participants:
    """Processes with a mailbox each. They meet in a store that the test process hosts."""

    def __init__(self, prefix: str) -> None:
        CONTEXT.set_forkserver_preload(PRELOAD)
        self._host = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.prefix, self.store = prefix, dist.PrefixStore(prefix, self._host)
        self.processes: dict[str, Any] = {}
        self.pipes: dict[str, Connection] = {}

    def start(self, key: str, body: Callable[..., Any], *args: Any, far: bool = False, **options: Any) -> int:
        """Start a process that calls ``body(mailbox, *args)``; return its process id. ``options`` are the mailbox's; by
        default ``key`` is its name. ``far``: as if each process were in a box of its own."""
        ours, theirs = CONTEXT.Pipe()
        options = {"name": key, "wait_s": WAIT_S} | options
        process = CONTEXT.Process(
            target=_live, args=(theirs, self.prefix, self._host.port, body, args, far, options), daemon=True
        )
        process.start()
        theirs.close()
        self.processes[key], self.pipes[key] = process, ours
        assert process.pid is not None
        return process.pid

    def result(self, key: str) -> Any:
        """What the body returned; None if its process was killed."""
        assert self.pipes[key].poll(2 * WAIT_S), f"{key} does not answer"
        try:
            error, value = pickle.loads(self.pipes[key].recv_bytes())
        except EOFError:
            return None
        assert not error, f"{key}: {error}"
        self.processes[key].join()
        return value

    def results(self) -> dict[str, Any]:
        return {key: self.result(key) for key in self.processes}

    def kill(self, key: str) -> None:
        self.processes[key].kill()
        self.processes[key].join()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


def _live(
    pipe: Connection,
    prefix: str,
    port: int,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    far: bool,
    options: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    try:
        if far:
            mail.box = lambda: options["name"]
        store = dist.PrefixStore(prefix, dist.TCPStore(HOST, port, is_master=False))
        mailbox = ZmqMailbox(store, **options)
        answer = ("", body(mailbox, *args))
        mailbox.leave()
    except BaseException:  # noqa: BLE001 - the test is told
        answer = (traceback.format_exc(), None)
    pipe.send_bytes(pickle.dumps(answer))


@pytest.fixture
def participants(request: pytest.FixtureRequest) -> Iterator[Participants]:
    members = Participants(request.node.name)
    yield members
    members.close()


def until(done: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def letters(mailbox: ZmqMailbox, number: int) -> list[Letter]:
    """The next letters that come."""
    received: list[Letter] = []
    mailbox.receive_until(lambda: len(received) == number, received.append, f"{number} letters", WAIT_S)
    return received


def views_until(mailbox: ZmqMailbox, done: Callable[[View], bool]) -> list[View]:
    """The views that follow, until ``done``. Letters that come meanwhile are dropped."""
    views = [mailbox.view]
    while not done(views[-1]):
        mailbox.receive(WAIT_S)
        assert mailbox.view.epoch - views[-1].epoch in (0, 1), "views are seen in order, one by one"
        if mailbox.view.epoch != views[-1].epoch:
            views.append(mailbox.view)
    return views


# --- what arrives -----------------------------------------------------------------------------------------------------

NUM, NAMES = 150, ["replica 0", "replica 1", "server 0.0"]
SIZES = [0, 1, 7, 1000, 20_000, 100_000]


def send_first_then_receive(mailbox: ZmqMailbox) -> dict[str, list[int]]:
    """All send all their letters before they receive any, with little room: nobody may wait forever."""
    generator = random.Random(mailbox.name)
    others = [name for name in NAMES if name != mailbox.name]
    for number in range(NUM):
        for other in generator.sample(others, 2):
            tensor = torch.full((generator.choice(SIZES),), number, dtype=torch.float64)
            mailbox.send(other, "count", (number,), (tensor,), other)
            tensor.fill_(-1)  # it may be overwritten
    numbers: dict[str, list[int]] = {other: [] for other in others}
    for letter in letters(mailbox, NUM * len(others)):
        assert letter.kind == "count"
        assert letter.text == mailbox.name
        assert letter.tensors[0].numel() in SIZES
        assert bool((letter.tensors[0] == letter.numbers[0]).all())
        letter.tensors[0].add_(1)
        numbers[letter.sender].append(letter.numbers[0])
    return numbers


@NEAR_AND_FAR
def test_letters_arrive_in_order_and_once(participants: Participants, far: bool) -> None:
    for name in NAMES:
        participants.start(name, send_first_then_receive, names=NAMES, far=far, most_letters=4, most_bytes=2**20)
    for name, result in participants.results().items():
        assert result == {other: list(range(NUM)) for other in NAMES if other != name}


def is_refused(mailbox: ZmqMailbox) -> str:
    try:
        mailbox.send("replica 1", "a letter")  # raises if the refusal comes that early
        mailbox.leave()  # waits for replies
    except LostRankError as error:
        mailbox.close()
        return str(error)
    return "no error"


def refuses(mailbox: ZmqMailbox) -> list[Letter]:
    received: list[Letter] = []
    mailbox.receive_until(lambda: "replica 0" not in mailbox.view.members, received.append, "its end", WAIT_S)
    return received


def test_a_participant_with_another_token_is_refused(participants: Participants) -> None:
    names = ["replica 0", "replica 1"]
    participants.start("replica 0", is_refused, names=names, token="another")
    participants.start("replica 1", refuses, names=names, token="the token of this job")
    message, letters_taken = participants.results().values()
    assert message.startswith(
        "replica 1: it refuses the connection: its job has another token\n  -> start all processes"
    )
    assert letters_taken == []


def numbered(dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this type with 40,000 random bytes; of bool, zeros and ones."""
    generator = torch.Generator().manual_seed(1)
    size = 80_000 if dtype != torch.bool else 40_000
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator).view(dtype)


def send_all_types(mailbox: ZmqMailbox) -> int:
    everything = tuple(map(numbered, DTYPES.values()))
    for _ in range(3):
        mailbox.send("server 0.0", "all", (-(2**63), 0, 2**63 - 1), everything, "\N{GREEK SMALL LETTER ALPHA}")
        for tensor in everything:
            mailbox.send("server 0.0", "each", (), (tensor[:5], tensor[:0]))
            mailbox.send("server 0.0", "strided", (), (tensor[::3],))
    return mailbox.sent_bytes


def receive_all_types(mailbox: ZmqMailbox) -> None:
    everything = tuple(map(numbered, DTYPES.values()))
    for _ in range(3):
        (letter,) = letters(mailbox, 1)
        assert letter[:3] == ("replica 0", "all", (-(2**63), 0, 2**63 - 1))
        assert letter.text == "\N{GREEK SMALL LETTER ALPHA}"
        wanted: list[tuple[torch.Tensor, ...]] = [everything]
        received = [letter.tensors]
        for tensor in everything:
            wanted += [(tensor[:5], tensor[:0]), (tensor[::3],)]
            received += [each.tensors for each in letters(mailbox, 2)]
        for given, contents in zip(wanted, received, strict=True):
            for expected, other in zip(given, contents, strict=True):
                assert expected.dtype == other.dtype
                assert torch.equal(expected.contiguous().view(torch.uint8), other.view(torch.uint8))


@NEAR_AND_FAR
def test_tensors_of_all_types_arrive_bit_for_bit(participants: Participants, far: bool) -> None:
    names = ["replica 0", "server 0.0"]
    participants.start(names[0], send_all_types, names=names, far=far)
    participants.start(names[1], receive_all_types, names=names, far=far)
    sizes = [(tensor.nbytes, tensor[:5].nbytes + tensor[::3].nbytes) for tensor in map(numbered, DTYPES.values())]
    assert participants.results()[names[0]] == 3 * sum(map(sum, sizes))


LARGE = 2**24


def send_large(mailbox: ZmqMailbox) -> int:
    for number in range(12):
        mailbox.send("replica 1", "large", (number,), (torch.full((LARGE,), float(number)),))
    letters(mailbox, 1)
    return mailbox._blocks._num_made


def receive_large(mailbox: ZmqMailbox) -> None:
    for number, letter in enumerate(letters(mailbox, 12)):
        assert sum(tensor.nbytes for tensor in letter.tensors) == 4 * LARGE
        assert bool((letter.tensors[0] == number).all())
    mailbox.send("replica 0", "thanks")


@NEAR_AND_FAR
def test_large_letters_reuse_their_blocks(participants: Participants, far: bool) -> None:
    names = ["replica 0", "replica 1"]
    participants.start(names[0], send_large, names=names, far=far, most_bytes=8 * LARGE)
    participants.start(names[1], receive_large, names=names, far=far)
    assert participants.results()[names[0]] <= (0 if far else 2)


def write_to_itself(mailbox: ZmqMailbox) -> None:
    tensor = torch.ones(3)
    mailbox.send(mailbox.name, "note", (1,), (tensor,))
    mailbox.send("nobody", "note")
    tensor.zero_()
    assert torch.equal(letters(mailbox, 1)[0].tensors[0], torch.ones(3))
    with pytest.raises(RankError, match=r"not float32\[2, 2\] on cpu"):
        mailbox.send(mailbox.name, "note", (), (torch.ones(2, 2),))
    mailbox.leave()
    mailbox.send(mailbox.name, "note")
    assert mailbox.receive() is None


def test_a_participant_alone_may_write_to_itself(participants: Participants) -> None:
    participants.start("replica 0", write_to_itself, names=["replica 0"])
    participants.results()


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "meshwright.comm.transport.zeromq")
    with pytest.raises(LaunchError, match=r"pip install 'meshwright\[replicas\]'"):
        importlib.import_module("meshwright.comm.transport.zeromq")


# --- who waits --------------------------------------------------------------------------------------------------------


def send_ten(mailbox: ZmqMailbox, flags: Path) -> tuple[str, ...]:
    for number in range(10):
        mailbox.send("replica 1", "count", (number,), (torch.ones(50_000),))
        flags.joinpath(str(number)).touch()
    return views_until(mailbox, lambda view: "replica 1" not in view.members)[-1].members


def take_late(mailbox: ZmqMailbox, flags: Path, dies: bool) -> None:
    until(flags.joinpath("2").exists)
    time.sleep(0.3)
    assert len(list(flags.iterdir())) == 3, "three letters have room"
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    assert [letter.numbers[0] for letter in letters(mailbox, 10)] == list(range(10))


@NEAR_AND_FAR
@pytest.mark.parametrize("dies", [False, True], ids=["takes_late", "dies"])
def test_a_sender_waits_for_room_but_not_for_the_dead(
    participants: Participants, tmp_path: Path, far: bool, dies: bool
) -> None:
    names = ["replica 0", "replica 1"]
    participants.start(names[0], send_ten, tmp_path, names=names, far=far, most_letters=3)
    participants.start(names[1], take_late, tmp_path, dies, names=names, far=far)
    assert participants.results()[names[0]] == ("replica 0",)


def send_and_leave(mailbox: ZmqMailbox) -> None:
    for number in range(20):
        mailbox.send("replica 1", "count", (number,), (torch.full((2**18,), float(number)),))


def receive_after_a_while(mailbox: ZmqMailbox) -> View:
    time.sleep(0.2)
    for number, letter in enumerate(letters(mailbox, 20)):
        assert bool((letter.tensors[0] == number).all())
    return views_until(mailbox, lambda view: len(view.members) == 1)[-1]


@NEAR_AND_FAR
def test_letters_before_a_leave_arrive(participants: Participants, far: bool) -> None:
    names = ["replica 0", "replica 1"]
    participants.start(names[0], send_and_leave, names=names, far=far)
    participants.start(names[1], receive_after_a_while, names=names, far=far)
    assert participants.results()[names[1]] == View(1, ("replica 1",), {"replica 1": 0})
    assert ViewLog(participants.store).read(1).change == "replica 0: it has left"


def wait_for_nobody(mailbox: ZmqMailbox) -> str:
    with pytest.raises(LostRankError) as caught:
        mailbox.receive_until(lambda: False, lambda letter: None, "a letter", 0.1)
    return str(caught.value)


def test_waiting_ends(participants: Participants) -> None:
    participants.start("replica 0", wait_for_nobody, names=["replica 0"])
    assert participants.result("replica 0").startswith("replica 0: a letter has not come within 0.1 s")


def test_a_participant_that_does_not_come_is_named(participants: Participants) -> None:
    participants.start("replica 0", wait_for_nobody, names=["replica 0", "replica 1"], wait_s=0.2)
    with pytest.raises(AssertionError, match=r"replica 1: it has not come within 0.2 s"):
        participants.result("replica 0")


# --- who lives --------------------------------------------------------------------------------------------------------


def learn_of_its_death(mailbox: ZmqMailbox, sends: bool) -> str:
    def go_on() -> None:
        while True:
            mailbox.receive(WAIT_S)
            if sends:
                mailbox.send("replica 1", "more")

    with pytest.raises(LostRankError) as caught:
        go_on()
    return str(caught.value)


def outlive(mailbox: ZmqMailbox, others: tuple[str, ...]) -> list[View]:
    return views_until(mailbox, lambda view: not set(view.members) & set(others))


def test_whoever_was_declared_dead_learns_it(participants: Participants) -> None:
    names = ["replica 0", "replica 1"]
    participants.start(names[0], learn_of_its_death, False, names=names)
    participants.start(names[1], outlive, ("replica 0",), names=names)
    log = ViewLog(participants.store)
    until(lambda: log.newest()[0] == 0)
    log.remove("replica 0", 0, "the launcher has lost it")
    results = participants.results()
    assert results[names[0]].startswith(
        "replica 0: it was declared dead by other participants: the launcher has lost it\n"
    )
    assert [view.epoch for view in results[names[1]]] == [0, 1]


def test_a_silent_participant_of_another_box_counts_as_dead(participants: Participants) -> None:
    """It is stopped, not killed: only its silence tells. When it goes on, it learns that others go on without it."""
    names = ["replica 0", "replica 1", "replica 2"]
    silent = participants.start(names[0], learn_of_its_death, True, names=names, far=True, silence_s=1.0)
    for name in names[1:]:
        participants.start(name, outlive, ("replica 0",), names=names, far=True, silence_s=1.0)
    until(lambda: participants.store.check([f"place/{name}/0/0" for name in names]))
    time.sleep(0.3)
    os.kill(silent, signal.SIGSTOP)
    for name in names[1:]:
        assert participants.result(name)[-1].epoch >= 1
    os.kill(silent, signal.SIGCONT)
    assert "no sign of life for 1 s, or the connection to it has broken" in participants.result(names[0])


def wait_without_a_store(mailbox: ZmqMailbox, directory: Path) -> str:
    (directory / mailbox.name).touch()
    return learn_of_its_death(mailbox, False)


def test_without_the_store_all_fail(participants: Participants, tmp_path: Path) -> None:
    names = ["replica 0", "replica 1"]
    for name in names:
        participants.start(name, wait_without_a_store, tmp_path, names=names)
    until(lambda: all((tmp_path / name).exists() for name in names))
    del participants.store, participants._host
    for result in participants.results().values():
        assert "the store in which views lie does not answer" in result


@NEAR_AND_FAR
def test_a_replica_dies_as_a_whole(participants: Participants, far: bool) -> None:
    """Of replica 1, rank 1 is killed: both ranks of replica 0 see it go, and its rank 0 gives up."""
    names = ["replica 0", "replica 1"]
    for column in range(2):
        common: dict[str, Any] = {"names": names, "column": column, "num_columns": 2, "far": far}
        participants.start(f"0.{column}", outlive, ("replica 1",), name="replica 0", **common)
        body, args = (learn_of_its_death, (False,)) if column == 0 else (outlive, (("replica 0",),))
        participants.start(f"1.{column}", body, *args, name="replica 1", **common)
    until(lambda: participants.store.check([f"place/replica {r}/0/{c}" for r in range(2) for c in range(2)]))
    participants.kill("1.1")
    results = participants.results()
    assert results["0.0"] == results["0.1"]
    assert results["0.0"][-1] == View(1, ("replica 0",), {"replica 0": 0})
    assert "declared dead" in results["1.0"]


def write_and_wait(mailbox: ZmqMailbox, directory: Path, life: int) -> None:
    mailbox.send("replica 0", "life", (life,), (torch.full((50_000,), float(life)),))
    (directory / f"sent {life}").touch()
    mailbox.receive_until(lambda: False, lambda letter: None, "the end", WAIT_S)


def read_lives(mailbox: ZmqMailbox, go: Path, last: int) -> list[tuple[str, int, int]]:
    """What is seen, in order: views (with the epoch in which replica 1 joined) and letters of lives."""
    until(go.exists)
    entries = []
    while ("letter", last, mailbox.view.epoch) not in entries:
        epoch = mailbox.view.epoch
        letter = mailbox.receive(WAIT_S)
        if letter is not None:
            assert bool((letter.tensors[0] == letter.numbers[0]).all())
            entries.append(("letter", letter.numbers[0], epoch))
        else:
            entries.append(("view", mailbox.view.joined.get("replica 1", -1), mailbox.view.epoch))
    return entries


@NEAR_AND_FAR
def test_letters_of_a_former_life_stay_away(participants: Participants, tmp_path: Path, far: bool) -> None:
    """Replica 0 reads only after replica 1 has died twice, so all letters wait for it."""
    names = ["replica 0", "replica 1"]
    participants.start(names[0], read_lives, tmp_path / "go", 2, names=names, far=far)
    for life in range(3):
        begins = {"names": names} if life == 0 else {"names": None, "life": life}
        participants.start(f"life {life}", write_and_wait, tmp_path, life, far=far, name="replica 1", **begins)
        until((tmp_path / f"sent {life}").exists)
        if life < 2:
            participants.kill(f"life {life}")
    (tmp_path / "go").touch()
    entries = participants.result(names[0])
    assert [seen[1:] for seen in entries if seen[0] == "view"] == [(-1, 1), (2, 2), (-1, 3), (4, 4)]
    for _, life, epoch in [seen for seen in entries if seen[0] == "letter"]:
        assert epoch in {0: (0, 1), 1: (2, 3), 2: (4,)}[life]


def greet_the_restarted(mailbox: ZmqMailbox) -> int:
    received: list[Letter] = []
    mailbox.receive_until(lambda: mailbox.view.joined.get("replica 2", 0) > 0, received.append, "the restarted", WAIT_S)
    for name in mailbox.view.members:
        mailbox.send(name, "hello")
    mailbox.receive_until(lambda: len(received) == 3, received.append, "greetings", WAIT_S)
    return mailbox.view.joined["replica 2"]


def test_a_participant_is_restarted_before_all_have_come(participants: Participants) -> None:
    names = ["replica 0", "replica 1", "replica 2"]
    participants.start(names[0], greet_the_restarted, names=names)
    participants.start("life 0", greet_the_restarted, name=names[2], names=names)
    until(lambda: participants.store.check(["view/0", "place/replica 0/0/0", "place/replica 2/0/0"]))
    participants.kill("life 0")
    participants.start("life 1", greet_the_restarted, name=names[2], names=names, life=1)
    until(lambda: participants.store.check(["place/replica 2/1/0"]))
    participants.start(names[1], greet_the_restarted, names=names)
    results = participants.results()
    assert results.pop("life 0") is None
    assert list(results.values()) == [2, 2, 2]


# --- kills at random --------------------------------------------------------------------------------------------------

MEMBERS = [f"replica {number}" for number in range(4)]


def talk(mailbox: ZmqMailbox, directory: Path, life: int) -> None:
    """Write to all members, read from all, and check that of each life a first part arrives, in order and once; write
    down all views."""
    generator = random.Random(f"{mailbox.name} {life}")
    counts: dict[tuple[str, int], int] = {}
    sent: dict[tuple[str, int], int] = {}
    with (directory / f"{mailbox.name} {life}").open("w", buffering=1) as views:
        seen = -1
        while not (directory / "stop").exists():
            view = mailbox.view
            if view.epoch != seen:
                assert seen in (-1, view.epoch - 1)
                seen = view.epoch
                views.write(f"{view.epoch} {view.members} {sorted(view.joined.items())}\n")
            others = [name for name in view.members if name != mailbox.name]
            if others and generator.random() < 0.5:
                to = generator.choice(others)
                key = (to, view.joined[to])
                number = sent[key] = sent.get(key, -1) + 1
                value = torch.full((generator.choice([0, 10, 30_000, 300_000]),), number, dtype=torch.int32)
                mailbox.send(to, "talk", (view.joined[mailbox.name], view.joined[to], number), (value,))
            letter = mailbox.receive(generator.choice([0.0, 0.0, 0.05]))
            if letter is not None:
                their_epoch, own_epoch, number = letter.numbers
                assert own_epoch == view.joined[mailbox.name], "a letter to a former life"
                assert mailbox.view.joined.get(letter.sender, their_epoch) == their_epoch, "a letter of a former life"
                assert number == counts.get((letter.sender, their_epoch), -1) + 1
                counts[letter.sender, their_epoch] = number
                assert bool((letter.tensors[0] == number).all())
                lives = [entry for entry in view.joined.items() if entry[0] != mailbox.name]
                if lives and set(lives) <= counts.keys():
                    (directory / f"heard {mailbox.name} {life}").touch()


@NEAR_AND_FAR
@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.product)])
def test_kills_leave_one_sequence_of_views(participants: Participants, tmp_path: Path, far: bool, kills: int) -> None:
    generator = random.Random(far)
    options: dict[str, Any] = {"far": far, "most_letters": 8, "most_bytes": 2**21}
    lives = dict.fromkeys(MEMBERS, 0)
    for name in MEMBERS:
        participants.start(f"{name} 0", talk, tmp_path, 0, name=name, names=MEMBERS, **options)
    until(lambda: all((tmp_path / f"{name} 0").exists() for name in MEMBERS))
    for _ in range(kills):
        time.sleep(generator.choice([0.0, 0.1, 0.3]))
        victim = generator.choice(MEMBERS)
        participants.kill(f"{victim} {lives[victim]}")
        lives[victim] += 1
        life = lives[victim]
        participants.start(f"{victim} {life}", talk, tmp_path, life, name=victim, names=None, life=life, **options)
    until(lambda: all((tmp_path / f"heard {name} {life}").exists() for name, life in lives.items()))
    (tmp_path / "stop").touch()
    for name, life in lives.items():
        participants.result(f"{name} {life}")
    check_views(participants, tmp_path)


def check_views(participants: Participants, directory: Path) -> None:
    """All lives have seen consecutive views of one sequence, each from its own first view on; in the end, all left."""
    log = ViewLog(participants.store)
    newest, entry = log.newest()
    assert not entry.members
    views = [log.read(epoch).view(epoch) for epoch in range(newest + 1)]
    lines = [f"{view.epoch} {view.members} {sorted(view.joined.items())}" for view in views]
    for path in directory.glob("replica*"):
        seen_lines = path.read_text().splitlines()
        first = int(seen_lines[0].split()[0]) if seen_lines else 0
        assert seen_lines == lines[first : first + len(seen_lines)]


def talk_until_removed(mailbox: ZmqMailbox, directory: Path, life: int) -> str:
    try:
        talk(mailbox, directory, life)
    except LostRankError as error:
        return str(error)
    return ""


@NEAR_AND_FAR
@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.product)])
def test_replicas_of_two_ranks_die_and_join_as_wholes(
    participants: Participants, tmp_path: Path, far: bool, kills: int
) -> None:
    """Each time, one rank of a replica is killed. The other gives up by itself, and both are started again."""
    generator = random.Random(far)
    lives = dict.fromkeys(MEMBERS[:3], 0)
    for column in range(2):
        (tmp_path / f"{column}").mkdir()

    def start(name: str, begins: list[str] | None) -> None:
        for column in generator.sample(range(2), 2):
            participants.start(
                f"{name} {lives[name]} {column}", talk_until_removed, tmp_path / f"{column}", lives[name],
                far=far, name=name, names=begins, life=lives[name], column=column, num_columns=2, most_letters=8,
            )  # fmt: skip

    def heard(name: str) -> bool:
        return all((tmp_path / f"{column}" / f"heard {name} {lives[name]}").exists() for column in range(2))

    for name in lives:
        start(name, list(lives))
    for _ in range(kills):
        until(lambda: all(map(heard, lives)))
        victim, column = generator.choice(list(lives)), generator.randrange(2)
        participants.kill(f"{victim} {lives[victim]} {column}")
        assert "declared dead" in participants.result(f"{victim} {lives[victim]} {1 - column}")
        lives[victim] += 1
        start(victim, None)
    until(lambda: all(map(heard, lives)))
    for column in range(2):
        (tmp_path / f"{column}" / "stop").touch()
    for name, life in lives.items():
        for column in range(2):
            assert participants.result(f"{name} {life} {column}") == ""
    check_views(participants, tmp_path / "0")
    check_views(participants, tmp_path / "1")


# --- emulated boxes ---------------------------------------------------------------------------------------------------


def live_in_a_box(
    pipe: Connection, place: NetworkBox, index: int, name: str, names: list[str], body: Callable[..., Any]
) -> None:
    torch.set_num_threads(1)
    try:
        enter(place)
        is_master = name == names[0]
        store = dist.TCPStore("10.77.0.1", 29500, is_master=is_master, wait_for_workers=False)
        mailbox = ZmqMailbox(store, name, names, host=f"10.77.0.{index + 1}", silence_s=1.0, wait_s=WAIT_S)
        answer = ("", body(mailbox, store))
    except BaseException:  # noqa: BLE001 - the test is told
        answer = (traceback.format_exc(), None)
    pipe.send_bytes(pickle.dumps(answer))
    pipe.poll(WAIT_S)  # the store must outlive the others


def cut_the_link(mailbox: ZmqMailbox, store: Any) -> list[View]:
    for name in mailbox.view.members:
        mailbox.send(name, "hello", (), (torch.ones(2**18),))
    thanks = letters(mailbox, 5)  # they have had theirs
    assert sum(int(tensor.sum()) for letter in thanks for tensor in letter.tensors) == 3 * 2**18
    store.wait(["replica 1 knows", "replica 2 knows"])  # replies are sent by another thread
    os.system(f"ip link set {LINK} down")
    return views_until(mailbox, lambda view: len(view.members) == 1)


def greet(mailbox: ZmqMailbox, store: Any) -> dict[str, bool]:
    for name in mailbox.view.members:
        mailbox.send(name, "hello", (), (torch.ones(2**18),))
    assert sum(int(tensor.sum()) for letter in letters(mailbox, 3) for tensor in letter.tensors) == 3 * 2**18
    mailbox.send("replica 0", "thanks")
    for peer in mailbox._peers.values():  # all have replied
        mailbox._wait_for(peer, few=0)
    store.set(f"{mailbox.name} knows", "")
    return {name: peer.opens for name, peer in mailbox._peers.items()}


def in_boxes(rate_bits_per_s: float, *lives: tuple[int, Callable[..., Any]]) -> list[Any]:
    """Start replica i in box ``lives[i][0]`` with a body; return the results."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    names = [f"replica {number}" for number in range(len(lives))]
    with EmulatedNetwork((rate_bits_per_s,) * 2) as network:
        pipes, processes = [], []
        for name, (index, body) in zip(names, lives, strict=True):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=live_in_a_box, args=(theirs, network.places[index], index, name, names, body), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results = []
        for pipe in pipes:
            assert pipe.poll(2 * WAIT_S)
            error, value = pickle.loads(pipe.recv_bytes())
            assert not error, error
            results.append(value)
        for process in processes:
            process.kill()
            process.join()
    return results


@pytest.mark.usefixtures("networks")
def test_emulated_boxes_notice_a_cut_link() -> None:
    views, *opens = in_boxes(1e9, (0, cut_the_link), (1, greet), (1, greet))
    assert [view.epoch for view in views] == [0, 1, 2]
    assert opens == [{"replica 0": False, "replica 2": True}, {"replica 0": False, "replica 1": True}]


def send_slowly(mailbox: ZmqMailbox, _: Any) -> int:
    (other,) = {"replica 0", "replica 1"} - {mailbox.name}
    for _ in range(2):
        mailbox.send(other, "large", (), (torch.ones(2**21),))
    assert all(bool((letter.tensors[0] == 1).all()) for letter in letters(mailbox, 2))
    mailbox.receive()
    return mailbox.view.epoch


@pytest.mark.usefixtures("networks")
def test_a_letter_may_take_longer_than_a_silence() -> None:
    """8 MiB at 40 Mbit/s take 1.7 s, in both directions, and participants count as dead after 1 s without a sign."""
    assert in_boxes(4e7, (0, send_slowly), (1, send_slowly)) == [0, 0]
