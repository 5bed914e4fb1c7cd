"""Messages between two ranks of a group: sends and receives with tags, and from any rank.

A message is cut into parts that fit the slots of a lane of shared memory; each part carries the message's tag and the
number of parts. Parts move whenever a thread of this rank calls ``move``: a thread that waits, or a background thread
that runs while messages are under way for which no thread waits.

    send     tensor ──▶ queue of the peer ──▶ lane                          complete when all parts are in the lane
    receive  lane ──▶ the first receive that was posted for this peer and tag, or, if another tag is awaited, a copy

Nothing is taken from a lane while no receive is posted for its peer, so a sender that is ahead waits. While one is
posted for another tag, every message that no receive wants is copied and kept, however many come.

In a group that spans boxes, gloo carries all messages.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.process_group.links import GroupConnections
from meshwright.comm.process_group.message import TAG_BITS, MessageWork, PeerLane, closed, late, refuse, word_of
from meshwright.comm.process_group.work import GroupError
from meshwright.comm.transport.base import MESSAGE_BYTES
from meshwright.comm.transport.shared_memory import SharedMemory

SLOTS = 4
"""The slots of a lane for messages."""
SHORTEST_S, LONGEST_S = 0.0002, 0.002
"""Seconds that the background thread sleeps between two moves: longer each time while nothing moves."""
CHECK_S, MEET_S = 0.5, 0.01
"""Seconds between two checks that the peers still live, and that no rank has come with a message for any receiver."""


class Messages:
    """A group's messages. ``check`` raises an error if the group may not be used. ``profiled_as`` is how names of
    events begin in profiles."""

    def __init__(self, links: GroupConnections, check: Callable[[str], None], name: str, profiled_as: str) -> None:
        self._links, self._check, self._name, self.timeout_s = links, check, name, links.timeout_s
        self._profiled_as = profiled_as
        self._changed = threading.Condition(threading.RLock())
        self._peers = {rank: PeerLane() for rank in range(links.size) if rank != links.rank}
        self._posted: list[MessageWork] = []
        self._ended: list[MessageWork] = []
        self._thread: threading.Thread | None = None
        self._closed = ""  # why the group takes no more messages

    # --- starting ----------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, rank: int, tag: int) -> dist.Work:
        """Send a tensor. The returned work is complete when the tensor may be overwritten."""
        self._check("send")
        if self._links.gloo is not None:
            return self._links.gloo.send([tensor.contiguous()], rank, tag)
        peer, message = self._peer(rank), self._message("send", tensor, rank, tag)
        with self._changed:
            peer.outgoing.append(message)
            self._connect(rank)
        return self._begun(message)

    def receive(self, tensor: Tensor, rank: int | None, tag: int) -> dist.Work:
        """Receive into a tensor, from a rank or, if it is None, from any."""
        self._check("recv")
        if self._links.gloo is not None:
            gloo = self._links.gloo
            return gloo.recv_anysource([tensor], tag) if rank is None else gloo.recv([tensor], rank, tag)
        if rank is not None:
            self._peer(rank)
        message = self._message("recv", tensor, rank, tag)
        with self._changed:
            for sender in self._peers if rank is None else (rank,):
                if self._take_kept(message, sender):
                    break
            else:
                self._posted.append(message)
                if rank is not None:
                    self._connect(rank)
        return self._begun(message)

    def _message(self, what: str, tensor: Tensor, rank: int | None, tag: int) -> MessageWork:
        side = "to" if what == "send" else "from"
        whom = "any rank" if rank is None else f"rank {self._links.ranks[rank]}"
        text = f"{what} of {tensor.nbytes} bytes {side} {whom}, tag {tag}, in {self._name}"
        message = MessageWork(text, tensor, rank, tag, time.monotonic() + self.timeout_s, self)
        message.profile(f"{self._profiled_as}:{what}" + ("AnySource" if rank is None else ""), (tensor,))
        return message

    def _begun(self, message: MessageWork) -> MessageWork:
        self.move()
        if not message.done:
            self.hand_over()
        return message

    def _peer(self, rank: int) -> PeerLane:
        peer = self._peers.get(rank)
        if peer is None:
            raise GroupError(
                f"rank {rank} of {self._links.size} is this rank or no rank", where=self._name, remedy="name another"
            )
        return peer

    def _connect(self, rank: int) -> None:
        """Let a thread share memory with a peer, which does so when it first sends or receives."""
        peer = self._peers[rank]
        if peer.lane is None and not peer.connecting and peer.error is None:
            peer.connecting = True
            threading.Thread(target=self._share, args=(rank,), name=f"meets rank {rank}", daemon=True).start()

    def _share(self, rank: int) -> None:
        peer, links = self._peers[rank], self._links
        try:
            lane = SharedMemory.connect(
                links.store, "messages", links.ranks[links.rank], links.ranks[rank], self.timeout_s, SLOTS
            )
            assert lane is not None, "ranks of one box share memory already"
            with self._changed:
                peer.lane = lane
                if self._closed:
                    self._leave(lane)
        except Exception as error:  # noqa: BLE001 - whoever waits for a message raises it
            peer.error = error
        with self._changed:
            peer.connecting = False
            self._changed.notify_all()
        self.move()

    # --- moving ------------------------------------------------------------------------------------------------------

    def move(self) -> bool:
        """Put and take all parts that find room or have come. Returns whether anything moved."""
        with self._changed, torch.inference_mode():
            moved = False
            if self._closed:
                self._fail_all(closed(self._closed, self._name))
            for rank, peer in self._peers.items():
                if peer.error is not None:
                    self._fail(rank, peer.error)
                elif peer.lane is not None:
                    moved |= self._put(peer, peer.lane) | self._take(rank, peer, peer.lane)
        self._announce()
        return moved

    def _announce(self) -> None:
        """Announce the messages that have ended. The caller holds no lock."""
        with self._changed:
            ended, self._ended = self._ended, []
            if ended:
                self._changed.notify_all()
        for message in ended:
            message.announce()

    def _put(self, peer: PeerLane, lane: SharedMemory) -> bool:
        moved = False
        while peer.outgoing:
            message = peer.outgoing[0]
            size, word = message.memory.numel(), word_of(message.tag, message.memory.numel())
            while message.offset < size or not message.begun:
                if not lane.put_at_once(message.memory[message.offset : message.offset + MESSAGE_BYTES], word):
                    return moved
                message.offset, message.begun, moved = message.offset + MESSAGE_BYTES, True, True
            peer.outgoing.popleft()
            self._end(message)
        return moved

    def _take(self, rank: int, peer: PeerLane, lane: SharedMemory) -> bool:
        moved = False
        while lane.has_come():
            num_bytes, word = lane.head()
            if peer.taken is None and not self._begin_to_take(rank, peer, word):
                return moved
            message = peer.taken
            assert message is not None
            part = lane.take(num_bytes, torch.uint8, word)
            if message.offset + num_bytes <= message.memory.numel():
                message.memory[message.offset : message.offset + num_bytes].copy_(part)
            lane.release()
            message.offset, peer.left, moved = message.offset + num_bytes, peer.left - 1, True
            if not peer.left:
                peer.taken = None
                self._end_taken(rank, peer, message)
        return moved

    def _begin_to_take(self, rank: int, peer: PeerLane, word: int) -> bool:
        """Find where the next message of a peer goes; False if it must stay in the lane, as no receive is posted."""
        tag, parts = word >> TAG_BITS, word & (2**TAG_BITS - 1)
        candidates = [message for message in self._posted if message.peer in (rank, None)]
        if not candidates:
            return False
        target = next((message for message in candidates if message.tag & (2**TAG_BITS - 1) == tag), None)
        if target is None:
            memory = torch.empty(parts * MESSAGE_BYTES, dtype=torch.uint8)
            target = MessageWork("kept", memory, rank, tag, float("inf"), self)
        else:
            self._posted.remove(target)
            target.peer = rank
        peer.taken, peer.left = target, parts
        return True

    def _end_taken(self, rank: int, peer: PeerLane, message: MessageWork) -> None:
        if message.what == "kept":
            peer.kept.append((message.tag, message.memory[: message.offset]))
            for posted in list(self._posted):
                if posted.peer in (rank, None) and self._take_kept(posted, rank):
                    self._posted.remove(posted)
            return
        problem = self._problem(message, rank, message.offset)
        if problem is None and message.memory.data_ptr() != message.tensor.data_ptr():
            message.tensor.data.copy_(message.memory.view(message.tensor.dtype).view(message.tensor.shape))
        self._end(message, problem)

    def _take_kept(self, message: MessageWork, sender: int) -> bool:
        """Complete a receive from the messages that were kept."""
        kept = self._peers[sender].kept if sender in self._peers else []
        for index, (tag, memory) in enumerate(kept):
            if tag == message.tag & (2**TAG_BITS - 1):
                del kept[index]
                message.peer = sender
                problem = self._problem(message, sender, memory.numel())
                if problem is None:
                    message.tensor.data.copy_(memory.view(message.tensor.dtype).view(message.tensor.shape))
                self._end(message, problem)
                return True
        return False

    def _problem(self, message: MessageWork, sender: int, num_bytes: int) -> BaseException | None:
        if num_bytes == message.memory.numel():
            return None
        return GroupError(
            f"it sent {num_bytes} bytes where {message.memory.numel()} were expected, in {message.what}",
            where=f"rank {self._links.ranks[sender]}",
            remedy="sender and receiver must name tensors of one size",
        )

    def _end(self, message: MessageWork, error: BaseException | None = None) -> None:
        message.mark(error)
        self._ended.append(message)

    def _fail(self, rank: int, error: BaseException) -> None:
        """End all messages to and from a rank with an error. If parts of a message stay behind, all later messages of
        this rank fail, too: their parts would be taken for the rest of that message."""
        peer = self._peers[rank]
        if peer.error is None and (peer.taken is not None or any(message.begun for message in peer.outgoing)):
            peer.error = error
        gone = [*peer.outgoing, *(message for message in self._posted if message.peer == rank)]
        if peer.taken is not None and peer.taken.what != "kept":
            gone.append(peer.taken)
        peer.outgoing.clear()
        peer.taken = None
        self._posted = [message for message in self._posted if message.peer != rank]
        for message in gone:
            self._end(message, error)

    def _fail_all(self, error: BaseException) -> None:
        """End all messages with an error."""
        for rank in self._peers:
            self._fail(rank, error)
        from_any, self._posted = self._posted, []
        for message in from_any:
            self._end(message, error)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait_for(self, message: MessageWork) -> None:
        """Return when a message is complete."""
        pause, check_at = SHORTEST_S, time.monotonic() + self._look_after()
        while not message.done:
            if self.move():
                pause = SHORTEST_S
                continue
            lane = self._lane_to_sleep_on(message)
            if lane is None:
                with self._changed:
                    if not message.is_marked() and not self._ended:
                        self._changed.wait(pause)
                pause = min(2 * pause, LONGEST_S)
            else:
                self._sleep(message, lane)
            if time.monotonic() >= check_at:
                self._look()
                check_at = time.monotonic() + self._look_after()

    def _lane_to_sleep_on(self, message: MessageWork) -> SharedMemory | None:
        """The lane on which this thread may sleep; None if it is not connected, or another thread sleeps on it."""
        with self._changed:
            peer = None if message.peer is None else self._peers[message.peer]
            if peer is None or peer.lane is None or peer.has_waiter or message.done:
                return None
            peer.has_waiter = True
            return peer.lane

    def _sleep(self, message: MessageWork, lane: SharedMemory) -> None:
        """Sleep until the peer has put or taken a part."""
        assert message.peer is not None
        try:
            lane.timeout_s = max(0.0, message.deadline - time.monotonic())
            if message.what.startswith("send"):
                lane.wait_for_room()
            else:
                lane.wait_for_message(message.what)
        except Exception as error:  # noqa: BLE001 - every wait for a message of this peer raises it
            with self._changed:
                self._fail(message.peer, error)
            self._announce()
        finally:
            with self._changed:
                self._peers[message.peer].has_waiter = False

    def _look_after(self) -> float:
        """Seconds until the next ``_look``."""
        return MEET_S if any(message.peer is None for message in self._posted) else CHECK_S

    def _look(self) -> None:
        """End messages that are late, or whose peer has ended; meet ranks that have something for any receiver."""
        now, links = time.monotonic(), self._links
        with self._changed:
            for_any = any(message.peer is None for message in self._posted)
            for rank, peer in self._peers.items():
                key = f"messages/{links.ranks[rank]}/{links.ranks[links.rank]}"
                if for_any and peer.lane is None and links.store.check([key]):
                    self._connect(rank)
                lane = peer.lane
                if lane is not None and lane.has_ended() and not lane.has_come():
                    self._fail(rank, lane.blame(lane.peer).error(f"a message in {self._name} is due"))
                for message in [*peer.outgoing, *([peer.taken] if peer.taken is not None else [])]:
                    if now > message.deadline and not message.done:
                        if message.begun or message is peer.taken:
                            self._fail(rank, late(message))
                        else:
                            peer.outgoing.remove(message)
                            self._end(message, late(message))
            for message in [message for message in self._posted if now > message.deadline]:
                self._posted.remove(message)
                self._end(message, late(message))
        self._announce()

    # --- the background thread ---------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Let a background thread complete what is under way."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"messages of {self._name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        pause, check_at = LONGEST_S, 0.0
        while True:
            with self._changed:
                if self._closed:
                    return
                if not self._posted and not any(peer.outgoing or peer.taken for peer in self._peers.values()):
                    self._changed.wait()
                    continue
            time.sleep(pause)
            try:
                pause = SHORTEST_S if self.move() else min(2 * pause, LONGEST_S)
                if time.monotonic() >= check_at:
                    self._look()
                    check_at = time.monotonic() + self._look_after()
            except Exception as error:  # noqa: BLE001 - whoever waits for a message raises it
                with self._changed:
                    self._fail_all(error)
                self._announce()

    def close(self, why: str = "the group was destroyed") -> None:
        """Take what has come, let all other messages fail, stop the background thread, and tell the peers that this
        rank takes and sends no more messages."""
        self.move()
        with self._changed:
            self._closed = why
            for peer in self._peers.values():
                if peer.lane is not None:
                    self._leave(peer.lane)
            self._changed.notify_all()
        self.move()

    def _leave(self, lane: SharedMemory) -> None:
        lane.leave()
        lane.look = partial(refuse, self._closed, self._name)  # a thread may sleep on the lane
