"""The mailbox between real processes. ZeroMQ carries letters between boxes; inside a box, shared memory carries their
tensors.

    sender                                             receiver
    send ── copies the tensors into a block ──▶
            Head, with the block's name     ──DEALER──▶ ROUTER ── copies out of the block ──▶ receive
            lends the block again           ◀──────── Reply: so many letters taken

Between boxes, the tensors follow the head in the same message. A letter is *under way* until the receiver has taken it.
The receiver takes letters into its own memory in ``receive``, and also while it waits in ``send`` and ``leave``. So
participants that send to each other at the same time do not wait for each other for ever.
"""

import atexit
import math
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from meshwright.comm.mailbox import WAIT_S, Letter, Mailbox, View
from meshwright.comm.membership import REMEDY, Location, Membership, silence
from meshwright.comm.transport.incoming import Incoming
from meshwright.comm.transport.outgoing import Outgoing
from meshwright.comm.transport.process import box
from meshwright.comm.transport.shared_blocks import LEAST_BYTES, SharedBlock, SharedBlocks
from meshwright.comm.transport.zeromq import NAMES, Hello, connection, zmq
from meshwright.errors import LostRankError, RankError

SILENCE_S = 5.0
"""The default time, in seconds, after which a participant in another box counts as dead if it shows no sign of life."""
MOST_BYTES, MOST_LETTERS = 2**28, 64
"""Upper limits on the bytes and letters under way to one participant. A larger letter is sent alone."""

MOST_SLEEP_S = 3600.0


class ZmqMailbox(Mailbox):
    """The mailbox of one rank of a participant. Only one thread may use it.

    Participants meet through ``store``, a store of torch.distributed whose host must outlive them. All participants in
    ``names`` begin together: they are the members of the first view. A participant that was restarted, or is made
    without ``names``, joins the participants that are already there.

    Args:
        store: the same store, with the same prefix, for all ranks of all participants.
        name: the participant's name.
        names: the names of all participants of the first view; None: join.
        life: how often this participant was started before. It must be larger than in any earlier life of this name.
        column, num_columns: the rank in this participant, and the number of its ranks. Ranks with equal columns send
            letters to each other. The participant is a member as a whole: if one of its ranks dies, it is removed from
            the view.
        host: the address of this box for other boxes.
        token: the token of the job; participants with another one are refused.
        silence_s: the time after which a participant in another box counts as dead if it shows no sign of life.
        wait_s: how long to wait for others to appear, and to take letters.
        most_bytes, most_letters: upper limits on the bytes and letters under way to each participant.

    Raises:
        LostRankError: another participant does not appear. In every method: others have declared this participant dead,
            or the store does not answer.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        names: Sequence[str] | None,
        *,
        life: int = 0,
        column: int = 0,
        num_columns: int = 1,
        host: str = "127.0.0.1",
        token: str = "",
        silence_s: float = SILENCE_S,
        wait_s: float = WAIT_S,
        most_bytes: int = MOST_BYTES,
        most_letters: int = MOST_LETTERS,
    ) -> None:
        self.name, self.sent_bytes, self._token = name, 0, token
        self._silence_s, self._wait_s = silence_s, wait_s
        self._most_bytes, self._most_letters = most_bytes, most_letters
        secret = secrets.token_hex(8)
        self._blocks = SharedBlocks(f"meshwright-{secret}", name)
        self._probe = SharedBlock(LEAST_BYTES, f"meshwright-{secret}-probe", name)
        self._context = zmq.Context()
        try:
            self._incoming = Incoming(self._context, host, secret, token)
            self._place = Location(self._incoming.near, self._incoming.far, box(), os.getpid(), secret)
            self._membership = Membership(store, self._place, name, life, column, num_columns, wait_s)
            if names is None or life:
                self._membership.join()
            else:
                self._membership.begin(names)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._peers: dict[str, Outgoing] = {}
        self._last_joined: dict[str, int] = {}
        self._num_seen = 0
        self._left = self._has_raised = False
        self._advance()
        atexit.register(self._end_with_program)

    # --- the view ----------------------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """The newest view that ``receive`` has announced. It changes only there."""
        return self._view

    def _advance(self) -> None:
        """Move to the next view: connect with its new members, and forget letters of earlier lives."""
        membership = self._membership
        entry = membership.entries[self._num_seen]
        self._view = entry.view(membership.joined + self._num_seen)
        self._num_seen += 1
        self._last_joined.update(self._view.joined)
        for peer in list(self._peers.values()):
            self._lives(peer)
        for name, joined in self._view.joined.items():
            known = self._peers.get(name)
            if name != self.name and membership.newest.has(name, joined) and (known is None or known.joined != joined):
                self._greet(name, joined)

    def _greet(self, name: str, joined: int) -> None:
        place = self._membership.place(name, joined)
        if place is None:
            return
        near = place.box == self._place.box
        socket, events = connection(self._context, place.near if near else place.far, self._silence_s, watched=not near)
        if events is not None:  # inside a box, the watcher thread watches the process
            self._membership.watch(name, joined, events, self._silence_s)
        probe = self._probe.handle if near else None
        hello = Hello(self.name, self._membership.joined, place.secret, os.getpid(), probe, self._token)
        self._peers[name] = Outgoing(name, joined, socket, hello, self._blocks)

    def _lives(self, peer: Outgoing) -> bool:
        """Whether a participant is in the newest view. If not, forget it."""
        lives = self._membership.newest.has(peer.name, peer.joined)
        if not lives and self._peers.get(peer.name) is peer:
            self._peers.pop(peer.name).close()
        return lives

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(
        self, to: str, kind: str, numbers: Sequence[int] = (), tensors: Sequence[Tensor] = (), text: str = ""
    ) -> None:
        """Send a letter, as described in the base class. While it waits, it takes letters of all participants."""
        if self._left:
            return
        self._check()
        for tensor in tensors:
            if tensor.dim() != 1 or tensor.device.type != "cpu" or tensor.dtype not in NAMES:
                description = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"
                raise RankError(
                    f"letters carry one-dimensional tensors on the CPU, not {description}", where=f"letter {kind}"
                )
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if to == self.name:
            self.sent_bytes += num_bytes
            copies = tuple(tensor.detach().clone() for tensor in tensors)
            self._incoming.letters.append((self._membership.joined, Letter(to, kind, tuple(numbers), copies, text)))
            return
        peer = self._peers.get(to)
        if peer is None or not self._wait_for(peer, self._most_letters, self._most_bytes - num_bytes):
            return
        self.sent_bytes += num_bytes
        for other in self._peers.values():  # they may give blocks back
            other.take_replies()
        peer.send(kind, tuple(numbers), tensors, text, num_bytes)

    def _wait_for(self, peer: Outgoing, few: int, few_bytes: int = 0) -> bool:
        """Wait until no letters are under way to ``peer``, or fewer than ``few`` letters with at most ``few_bytes`` in
        total. Returns False if the peer is gone. While waiting, take letters from all participants."""
        deadline = time.monotonic() + self._wait_s
        while self._lives(peer):
            if peer.take_replies():
                deadline = time.monotonic() + self._wait_s
            if peer.num_letters == 0 or (peer.num_letters < few and peer.num_bytes <= few_bytes):
                return True
            self._check()
            while self._incoming.take():
                pass
            if not self._sleep(deadline, peer.socket):
                problem = f"it has taken none of {peer.num_letters} letters for {self._wait_s:g} s"
                raise LostRankError(problem, where=peer.name, remedy=REMEDY)
        return False

    # --- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, wait_s: float = 0.0) -> Letter | None:
        """Receive a letter, as described in the base class. A new view is announced before waiting letters are
        returned."""
        deadline = time.monotonic() + wait_s
        while not self._left:
            self._check()
            if self._num_seen < len(self._membership.entries):
                self._advance()
                return None
            letter = self._next()
            if letter is not None:
                return letter
            if not self._incoming.take() and not self._sleep(deadline):
                return None
        return None

    def _next(self) -> Letter | None:
        """The first letter that has arrived and that the present view permits."""
        letters, index = self._incoming.letters, 0
        while index < len(letters):
            joined, letter = letters[index]
            if joined > self._view.epoch:  # the view in which its sender joined has not been announced yet
                index += 1
                continue
            del letters[index]
            if joined == self._last_joined.get(letter.sender):  # otherwise the letter belongs to an earlier life
                return letter
        return None

    def _sleep(self, deadline: float, *sockets: Any) -> bool:
        """Sleep until there is news. Returns False if the deadline has passed."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        poller = zmq.Poller()
        for source in (self._incoming.socket, self._membership.bell, *sockets):
            poller.register(source, zmq.POLLIN)
        poller.poll(math.ceil(1000 * min(left_s, MOST_SLEEP_S)))
        silence(self._membership.bell)
        return True

    # --- the end -----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Wait until all letters under way are taken, and until all ranks of this participant want to leave. If this
        takes too long, or if letters are lost because this participant was declared dead, leave anyway and raise a
        LostRankError, unless another method has already raised it."""
        if self._left:
            return
        if self._has_raised:
            self.close()
            return
        try:
            self._check()
            for peer in list(self._peers.values()):
                self._wait_for(peer, few=0)
            if not self._membership.ready_to_leave():
                self._wait_to_be_removed()
        finally:
            self.close("it has left")

    def _wait_to_be_removed(self) -> None:
        """Wait until the last rank of this participant is ready to leave. Take letters while waiting."""
        deadline = time.monotonic() + self._wait_s
        while not self._membership.trouble and self._membership.is_member:
            while self._incoming.take():
                pass
            if not self._sleep(deadline):
                problem = f"its ranks do not leave together within {self._wait_s:g} s"
                raise LostRankError(problem, where=self.name, remedy=REMEDY)

    def close(self, why: str = "it has given up") -> None:
        """Stop immediately, as if this participant had died. Letters under way may be lost."""
        if self._left:
            return
        self._left = True
        atexit.unregister(self._end_with_program)
        self._leave_view(why)
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._context.destroy(linger=0)
        self._membership.close()

    def _end_with_program(self) -> None:
        """Stop the threads that wait in the store, because they must end before the interpreter does. A thread may
        still use the mailbox, so its sockets stay open."""
        self._leave_view("its program has ended without leaving")

    def _leave_view(self, why: str) -> None:
        with suppress(RuntimeError):  # the store may be gone already
            self._membership.leave(f"{self.name}: {why}")
        self._membership.stop()

    def _check(self) -> None:
        try:
            self._membership.check()
        except LostRankError:
            self._has_raised = True
            raise
