"""The launchers of several hosts: which of them are there, and which take part in the next attempt.

    first host    attempt 1: hosts 0 1 2 │ host 2 is silent: attempt 2: hosts 0 1 │ host 3 has come: attempt 3: 0 1 3
    others        take part, or wait as spares for an attempt that needs them

The launcher of the first host keeps a store and decides. All launchers show signs of life there, and report how their
ranks ended. When a host is lost, all ranks are stopped, and the run goes on with the hosts that are left: as many as
the run can use. When a host comes, or comes again, the ranks are asked to save, and go on with it.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from meshwright.errors import FailedRankError, LaunchError, LostRankError, MeshwrightError, RankError
from meshwright.runtime import meeting_point
from meshwright.runtime.launchers import Meeting

log = logging.getLogger("meshwright")

Fits = Callable[[int], bool]
"""Whether a run can use exactly so many ranks."""
BEAT_S, SILENT_S = 0.5, 5.0
"""Seconds between two signs of life of a launcher, and seconds without any after which its host counts as lost."""
GROW_S = 10.0
"""Seconds that an attempt lasts at least before it is ended for the sake of a host that has come; each time twice as
many."""
MEET_AGAIN_S = 60.0
"""Seconds in which the hosts of an attempt other than the first must meet: they were there a moment ago."""
LOOK_S = 0.05
REMEDY = "give the same command again on every host: it goes on from the last checkpoint"


class LauncherHost(msgspec.Struct, frozen=True):
    """A launcher: the name of its host, and the number of its ranks."""

    name: str
    num_ranks: int


class Ended(msgspec.Struct, frozen=True):
    """How the ranks of a host ended. ``problem`` is empty if they succeeded. ``is_lost``: they have lost others;
    ``is_final``: it would happen again."""

    problem: str = ""
    where: str = ""
    remedy: str = ""
    doing: str = ""
    is_lost: bool = False
    is_final: bool = False


class Attempt(msgspec.Struct, frozen=True):
    """The hosts of an attempt; or, with ``over``, why there is no further attempt: ``complete``, or a problem."""

    hosts: tuple[int, ...] = ()
    over: str = ""


COMPLETE = "complete"


class RollCall:
    """One launcher among those of several hosts.

    Attributes:
        attempt: the number of the attempt that runs, from 1 on.
        ask: set when the ranks of this host are to save and to end.
        kill: set when they are to be killed, because other ranks are lost.
    """

    def __init__(self, meeting: Meeting, num_ranks: int, fits: Fits | None) -> None:
        self._meeting, self._fits = meeting, fits
        self._leads = meeting.is_host
        self.attempt = 0
        self.ask, self.kill = threading.Event(), threading.Event()
        limit = timedelta(seconds=meeting.timeout_s)
        try:
            if self._leads:
                server = meeting_point.kept_store(meeting.address, meeting.port, limit, "nodes.port")
            else:
                server = dist.TCPStore(meeting.address, meeting.port, is_master=False, timeout=limit)
        except (dist.DistError, ValueError) as error:
            raise meeting_point.not_met(meeting, error) from error
        self._server = server
        self._store: Any = dist.PrefixStore(f"roll call/{meeting.name}", server)
        self._beaten: Any = dist.PrefixStore(f"roll call/{meeting.name}", server.clone())  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self._number = 0 if self._leads else int(self._store.add("count", 1))
        self._store.set(f"host/{self._number}", _text(LauncherHost(socket.gethostname(), num_ranks)))
        self._members: tuple[int, ...] = ()
        self._beats: dict[int, tuple[int, float]] = {}
        self._begun_s, self._grow_s = time.monotonic(), GROW_S
        self._leader_is_lost = self._is_over = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._live, name="shows signs of life", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show no more signs of life. If the run is over, the first host first waits until the others know."""
        deadline = time.monotonic() + SILENT_S
        while self._is_over and time.monotonic() < deadline:
            if all(self._has(f"bye/{number}") for number in self._living()[1:]):
                break
            time.sleep(LOOK_S)
        self._done.set()
        self._thread.join()

    # --- attempts ----------------------------------------------------------------------------------------------------

    def begin(self) -> Meeting:
        """Wait for the next attempt in which this host takes part, and return where its launchers meet.

        Raises:
            LaunchError: not all hosts came to the first attempt.
            LostRankError: the first host is gone.
            FailedRankError: the run has failed without this host.
            SystemExit: the run is over, without this host.
        """
        if self._leads and self.attempt == 0:
            self._publish(Attempt(tuple(self._all_come()[: self._meeting.num_hosts])))
        while True:
            attempt = self._next()
            if attempt.over:
                if attempt.over == COMPLETE:
                    raise SystemExit(0)
                raise FailedRankError(attempt.over, remedy=REMEDY)
            if self._number in attempt.hosts:
                self.ask.clear()
                self.kill.clear()
                self._begun_s = time.monotonic()
                self._members = attempt.hosts
                met = self._meeting.again(self.attempt)
                met = msgspec.structs.replace(met, num_hosts=len(attempt.hosts), is_kept=True)
                return met if self.attempt == 1 else msgspec.structs.replace(met, timeout_s=MEET_AGAIN_S)

    def end(
        self, error: MeshwrightError | None, again: Callable[[RankError], bool], tidy: Callable[[], object]
    ) -> bool:
        """Report how the ranks of this host ended. Return False if there is a further attempt. On the first host,
        ``again`` decides this after an error, and ``tidy`` is called before the next attempt.

        Raises:
            MeshwrightError: there is no further attempt, because of this error.
        """
        members, self._members = self._members, ()
        is_lost = self.attempt > 1 and isinstance(error, LaunchError)  # a host was lost before they met
        self._set(f"ended/{self.attempt}/{self._number}", _text(_ended(error, is_lost=is_lost)))
        if error is not None:  # hosts that still meet for this attempt do so in vain
            with self._lock, self._asked():
                meeting_point.called_off(self._server, self._meeting.again(self.attempt).name)
        if self._leads:
            return self._decide(members, error, again, tidy)
        following = self._next(look=True)
        if not following.over:
            return False
        if error is None and following.over == COMPLETE:
            return True
        if error is not None and not is_lost and not isinstance(error, LostRankError):
            raise error
        raise FailedRankError(following.over, remedy=REMEDY) from error

    def _decide(
        self,
        members: Sequence[int],
        error: MeshwrightError | None,
        again: Callable[[RankError], bool],
        tidy: Callable[[], object],
    ) -> bool:
        regroups = self.ask.is_set()
        if error is not None:
            self._set("stop", f"{self.attempt}")
        ends = self._await_ends(members)
        failed = [(number, ended) for number, ended in ends.items() if ended.problem]
        mistake = next((each for each in failed if each[1].is_final), None)
        if mistake is not None and not regroups:
            self._publish(Attempt(over=mistake[1].problem))
            if error is not None and mistake[0] == self._number:
                raise error
            raise self._as_error(*mistake)
        if not regroups and error is None and not failed:
            self._publish(Attempt(over=COMPLETE))
            return True
        if not regroups:
            own = next((each for each in failed if not each[1].is_lost), failed[0])
            first = self._as_error(*own)
            if not again(first):
                self._publish(Attempt(over=first.problem))
                raise first
        try:
            hosts = self._chosen(self._living())
        except LaunchError as none:
            self._publish(Attempt(over=none.problem))
            raise
        if set(hosts) != set(members):
            names = ", ".join(self._host(number).name for number in hosts)
            log.warning("the run goes on with %d host%s: %s", len(hosts), "s"[: len(hosts) > 1], names)
        tidy()
        self._publish(Attempt(hosts))
        return False

    def _publish(self, attempt: Attempt) -> None:
        self._is_over = bool(attempt.over)
        self._set(f"attempt/{self.attempt + 1}", _text(attempt))
        self._set("newest", f"{self.attempt + 1}")

    def _next(self, *, look: bool = False) -> Attempt:
        """Wait for the attempt after this one. With ``look``, it remains the next."""
        following = self.attempt + 1
        if self.attempt == 0 and not self._leads and self._has("newest"):  # this host comes late
            following = int(self._get("newest"))
        while not self._has(f"attempt/{following}"):
            if self._leader_is_lost:
                raise LostRankError(
                    "the launcher of the first host is gone", where=self._meeting.address, remedy=REMEDY
                )
            time.sleep(LOOK_S)
        if not look:
            self.attempt = following
        attempt = msgspec.json.decode(self._get(f"attempt/{following}"), type=Attempt)
        if attempt.over:
            self._set(f"bye/{self._number}", "")
        return attempt

    # --- what the first host knows -----------------------------------------------------------------------------------

    def _all_come(self) -> list[int]:
        """Wait for all hosts.

        Raises:
            LaunchError: they do not come within the time limit.
        """
        deadline = time.monotonic() + self._meeting.timeout_s
        while len(living := self._living()) < self._meeting.num_hosts:
            if time.monotonic() > deadline:
                raise meeting_point.not_met(self._meeting, RuntimeError("not all came"))
            time.sleep(LOOK_S)
        return living

    def _await_ends(self, members: Sequence[int]) -> dict[int, Ended]:
        """Wait until the ranks of all members have ended; a lost host counts as ended."""
        ended: dict[int, Ended] = {}
        while len(ended) < len(members):
            living = self._living()
            for number in members:
                key = f"ended/{self.attempt}/{number}"
                if number not in ended and self._has(key):
                    ended[number] = msgspec.json.decode(self._get(key), type=Ended)
                elif number not in ended and number not in living:
                    problem = f"no sign of life of this host for {SILENT_S:g} s"
                    ended[number] = Ended(problem, doing="while others trained")
            time.sleep(LOOK_S)
        return ended

    def _living(self) -> list[int]:
        """The hosts that show signs of life, this one first."""
        now, count = time.monotonic(), int(self._add("count", 0))
        for number in range(1, count + 1):
            if self._has(f"host/{number}"):
                beat = int(self._add(f"beat/{number}", 0))
                if number not in self._beats or self._beats[number][0] != beat:
                    self._beats[number] = beat, now
        return [0, *(number for number, (_, since) in sorted(self._beats.copy().items()) if now - since < SILENT_S)]

    def _chosen(self, living: Sequence[int]) -> tuple[int, ...]:
        """As many of the living hosts as the run can use.

        Raises:
            LaunchError: it can use no number of them.
        """
        for count in range(len(living), 0, -1):
            num_ranks = sum(self._host(number).num_ranks for number in living[:count])
            if self._fits is None or self._fits(num_ranks):
                return tuple(living[:count])
        raise LaunchError(f"the run cannot use the ranks of {len(living)} hosts", where="nodes", remedy=REMEDY)

    def _host(self, number: int) -> LauncherHost:
        return msgspec.json.decode(self._get(f"host/{number}"), type=LauncherHost)

    def _as_error(self, number: int, ended: Ended) -> RankError:
        where = ended.where or (self._host(number).name if number else "")
        error = (LostRankError if ended.is_lost else FailedRankError)(ended.problem, where=where, remedy=ended.remedy)
        error.doing = ended.doing
        return error

    # --- signs of life -----------------------------------------------------------------------------------------------

    def _live(self) -> None:
        leader = -1, time.monotonic()
        while not self._done.wait(BEAT_S):
            try:
                if self._leads:
                    self._watch()
                    self._beaten.add("beat/0", 1)
                    continue
                self._beaten.add(f"beat/{self._number}", 1)
                beat = int(self._beaten.add("beat/0", 0))
                if beat != leader[0]:
                    leader = beat, time.monotonic()
                elif time.monotonic() - leader[1] > SILENT_S:
                    raise RuntimeError("silent")
                if self._members and self._beaten.check(["stop"]) and int(self._beaten.get("stop")) >= self.attempt:
                    self.kill.set()
            except (RuntimeError, LostRankError):
                self._leader_is_lost = True
                self.kill.set()
                return

    def _watch(self) -> None:
        """On the first host: stop an attempt that has lost a host, and end one that can go on with more hosts."""
        members = self._members
        if not members:
            return
        living = self._living()
        for number in members:
            key = f"ended/{self.attempt}/{number}"
            failed = self._has(key) and msgspec.json.decode(self._get(key), type=Ended).problem
            if failed or number not in living:
                self._set("stop", f"{self.attempt}")
                self.kill.set()
                return
        if time.monotonic() - self._begun_s > self._grow_s and not self.ask.is_set():
            with suppress(LaunchError):
                if len(self._chosen(living)) > len(members):
                    log.warning("a host has come: the ranks save, and go on with it")
                    self._grow_s *= 2
                    self.ask.set()

    # --- the store, of which one thread at a time may use a connection -----------------------------------------------

    def _has(self, key: str) -> bool:
        with self._lock, self._asked():
            return bool(self._store.check([key]))

    def _get(self, key: str) -> bytes:
        with self._lock, self._asked():
            return bytes(self._store.get(key))

    def _set(self, key: str, value: str) -> None:
        with self._lock, self._asked():
            self._store.set(key, value)

    def _add(self, key: str, count: int) -> int:
        with self._lock, self._asked():
            return int(self._store.add(key, count))

    @contextmanager
    def _asked(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostRankError(
                "the launcher of the first host does not answer", where=self._meeting.address, remedy=REMEDY
            ) from error


def _ended(error: MeshwrightError | None, *, is_lost: bool) -> Ended:
    """A report of this error. ``is_lost``: it only follows from the loss of other ranks."""
    if error is None:
        return Ended()
    return Ended(
        error.problem,
        error.where,
        error.remedy,
        error.doing if isinstance(error, RankError) else "",
        is_lost=is_lost or isinstance(error, LostRankError),
        is_final=not is_lost and not isinstance(error, FailedRankError | LostRankError),
    )


def _text(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()
