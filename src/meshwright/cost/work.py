"""The work of a step on every stage, with its costs, for the simulator and for emulated devices."""

from collections.abc import Iterable, Sequence

import msgspec

from meshwright.cost.host import waits_s
from meshwright.ir.program import CollectiveKind
from meshwright.ir.schedule import Action, ActionKind


class Compute(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="compute"):
    """Kernels that run one after the other on a rank's compute stream, for a total of ``seconds``. The host takes
    ``launch_s`` to launch them (0: device and host are one). ``host_s`` is the part of ``seconds`` in which the device
    waits for launches (``launched``)."""

    what: str
    seconds: float
    flops: float = 0.0
    bytes: int = 0
    launch_s: float = 0.0
    host_s: float = 0.0

    @property
    def device_s(self) -> float:
        """Seconds without waits for the host."""
        return self.seconds - self.host_s

    def __add__(self, other: "Compute") -> "Compute":
        return Compute(
            self.what, self.seconds + other.seconds, self.flops + other.flops, self.bytes + other.bytes,
            self.launch_s + other.launch_s, self.host_s + other.host_s,
        )  # fmt: skip


class CodedElements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The coding of a collective's elements: the text of the codec, the algorithm, the bytes per element, and the
    lengths of coded vectors that are added up (``ir.program.Collective.summed``)."""

    codec: str
    algorithm: str
    item_bytes: int
    summed: tuple[int, ...] = ()


class Communicate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="communicate"):
    """A collective of ``bytes`` (as ``cost.collective.Network`` counts them) along a mesh axis. It starts when every
    rank of its group has reached it. ``blocking``: the next piece waits for its end; otherwise a ``Wait`` waits for it.
    ``members``: the coordinates on ``pp`` that take part, ascending; if empty, the whole axis takes part. ``ahead_s``:
    the part of a blocking collective, in seconds, in which the host continues to launch kernels. ``coding``: how the
    elements are encoded for sending; None: they are sent unchanged. ``part``: groups of this many neighbouring ranks of
    the axis communicate, each for itself (0: all ranks of the axis together)."""

    what: str
    collective: CollectiveKind
    axis: str
    bytes: int
    blocking: bool = True
    members: tuple[int, ...] = ()
    ahead_s: float = 0.0
    coding: CodedElements | None = None
    part: int = 0


class Wait(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="wait"):
    """Wait for the end of the non-blocking ``Communicate`` of the same name."""

    what: str


Piece = Compute | Communicate | Wait

_OF_MICROBATCHES = frozenset({"F", "B", "I", "W"})
"""The kinds of actions that run in each micro-batch."""


def launched(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The pieces of one action, with waits added where the host launches kernels more slowly than the device runs them.
    Earlier waits of the pieces are computed again, so that actions can be joined."""
    computing = [piece for piece in pieces if isinstance(piece, Compute)]
    if not any(piece.launch_s for piece in computing):
        return tuple(pieces)
    busy_s = sum(piece.device_s for piece in computing)
    busy_s += sum(piece.ahead_s for piece in pieces if isinstance(piece, Communicate))
    waits = iter(waits_s(busy_s, [piece.launch_s for piece in computing]))
    return tuple(_waiting(piece, next(waits)) if isinstance(piece, Compute) else piece for piece in pieces)


def _waiting(piece: Compute, wait_s: float) -> Compute:
    return msgspec.structs.replace(piece, seconds=piece.device_s + wait_s, host_s=wait_s)


def without_launches(work: "StepWork") -> "StepWork":
    """The same work if no device ever waits for its host."""
    stages = (
        msgspec.structs.replace(
            stage, pieces={kind: _freed(pieces) for kind, pieces in stage.pieces.items()}, before=_freed(stage.before),
            after=_freed(stage.after),
        )
        for stage in work.stages
    )  # fmt: skip
    return msgspec.structs.replace(work, stages=tuple(stages))


def _freed(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    return tuple(
        msgspec.structs.replace(piece, seconds=piece.device_s, launch_s=0.0, host_s=0.0)
        if isinstance(piece, Compute) else piece
        for piece in pieces
    )  # fmt: skip


class ActionBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of a stage's values in one action: the action takes over ``taken_bytes``, needs up to ``most_bytes`` (with
    those), and leaves ``left_bytes``. Bytes that are held for the whole step do not count."""

    taken_bytes: int = 0
    most_bytes: int = 0
    left_bytes: int = 0


class StageWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stage on one rank: the pieces of each kind of action, the bytes that cross stage borders, and memory.

    ``pieces`` maps a kind of action (``F``, ``B``, ``I``, ``W``, and once a step ``REDUCE_GRAD``) to its pieces.
    ``before`` runs before the schedule (prologue), and ``after`` runs after it (sums of gradients over stages,
    clipping, optimizer). Bytes are counted for one rank. Per micro-batch, ``sent_up_bytes`` go to the next stage and
    ``sent_down_bytes`` to the previous stage. ``saved_bytes`` live from a micro-batch's forward until its last backward
    action. ``held_bytes`` live for the whole step (parameters, gradients, optimizer state, buckets, inputs).
    ``workspace_bytes`` is the most that one action needs in addition. Of the held bytes, ``passing_bytes`` (gathered
    parameters, results of the prologue) live only until gradients are reduced, and ``inputs_bytes`` until the update.

    ``actions`` has the memory of each kind of action, of ``before`` and of ``after``. If the stage is put together from
    layers, it has at most ``I`` and ``W``, and ``saved_bytes`` and ``workspace_bytes`` stand for all other actions.

    If the phases are launched as graphs, the graphs have ``slot_bytes`` for each micro-batch in flight, and
    ``more_bytes`` for the prologue (``cost/graphs.py``).
    """

    pieces: dict[str, tuple[Piece, ...]]
    before: tuple[Piece, ...] = ()
    after: tuple[Piece, ...] = ()
    sent_up_bytes: int = 0
    sent_down_bytes: int = 0
    saved_bytes: int = 0
    held_bytes: int = 0
    workspace_bytes: int = 0
    passing_bytes: int = 0
    inputs_bytes: int = 0
    actions: dict[str, ActionBytes] = {}
    slot_bytes: int = 0
    more_bytes: int = 0

    def memory_of(self, action: str) -> ActionBytes:
        """The memory of a kind of action."""
        if action in self.actions or self.slot_bytes or action not in _OF_MICROBATCHES:
            return self.actions.get(action, ActionBytes())
        saved, most = self.saved_bytes, self.saved_bytes + self.workspace_bytes
        return ActionBytes(0 if action == "F" else saved, most, saved if action in ("F", "I") else 0)


def as_graphs(stage: StageWork) -> StageWork:
    """The work of a stage whose phases are launched as graphs: the kernels of micro-batches do not wait for the host,
    which launches each phase at once."""
    pieces = {kind: _freed(each) if kind in _OF_MICROBATCHES else each for kind, each in stage.pieces.items()}
    return msgspec.structs.replace(stage, pieces=pieces)


class StepWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stages of a step, from the first to the last. ``heap_factor``: the bytes that the allocator takes from the
    system per byte of saved values or workspace."""

    stages: tuple[StageWork, ...]
    heap_factor: float = 1.0

    def held_bytes(self, stage: int, actions: Iterable[Action]) -> int:
        """The bytes of a stage that live for the whole step, with its graphs. ``actions`` are those of its rank."""
        each = self.stages[stage]
        slots = num_slots(actions, stage) if each.slot_bytes else 0
        return each.held_bytes + slots * each.slot_bytes + each.more_bytes

    def memory_of(self, stage: int, action: str) -> ActionBytes:
        """The memory of a kind of action of a stage, as the allocator takes it."""
        each, factor = self.stages[stage].memory_of(action), self.heap_factor
        if factor == 1.0:
            return each
        return ActionBytes(*(round(factor * size) for size in (each.taken_bytes, each.most_bytes, each.left_bytes)))


def num_slots(actions: Iterable[Action], stage: int) -> int:
    """The most micro-batches of a stage between their forward and the end of their backward."""
    now = most = 0
    for action in actions:
        if action.stage == stage and action.kind is ActionKind.F:
            now += 1
            most = max(most, now)
        elif action.stage == stage and action.kind in (ActionKind.B, ActionKind.W):
            now -= 1
    return max(1, most)
