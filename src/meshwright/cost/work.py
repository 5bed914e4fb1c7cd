"""What a step consists of on every stage, with its costs: the simulator plays it, an emulated device waits it."""

import msgspec

from meshwright.ir.program import CollectiveKind


class Compute(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="compute"):
    """Kernels that run one after the other on a rank's compute stream, ``seconds`` in all."""

    what: str
    seconds: float
    flops: float = 0.0
    bytes: int = 0


class Communicate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="communicate"):
    """A collective along a mesh axis of ``bytes`` (as ``cost.collective.Network`` counts them). It
    starts when every rank of its group has come to it. ``blocking``: what follows waits for its end; else ``Wait``.
    ``members``: the coordinates on ``pp`` that take part, rising; all of the axis where it is empty."""

    what: str
    collective: CollectiveKind
    axis: str
    bytes: int
    blocking: bool = True
    members: tuple[int, ...] = ()


class Wait(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="wait"):
    """Wait for the end of the ``Communicate`` of the same name that was not blocking."""

    what: str


Piece = Compute | Communicate | Wait


class StageWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stage on one rank: what each kind of action does for one micro-batch, what crosses the borders, what lives.

    ``pieces`` is by kind of action (``F``, ``B``, ``I``, ``W``, and once a step ``REDUCE_GRAD``); ``before`` and
    ``after`` surround the schedule (prologue; joined gradients, clipping, optimizer). Bytes are of one rank:
    ``sent_up_bytes`` per micro-batch to the next stage, ``saved_bytes`` alive from a micro-batch's forward until its
    last backward action, ``held_bytes`` the whole step (parameters, gradients, optimizer state, buckets, inputs),
    ``workspace_bytes`` at most during one action.
    """

    pieces: dict[str, tuple[Piece, ...]]
    before: tuple[Piece, ...] = ()
    after: tuple[Piece, ...] = ()
    sent_up_bytes: int = 0
    sent_down_bytes: int = 0
    saved_bytes: int = 0
    held_bytes: int = 0
    workspace_bytes: int = 0


class Work(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stages of a step, from the first to the last. ``heap_factor``: the bytes that the allocator takes from the
    system for a byte that is saved or workspace."""

    stages: tuple[StageWork, ...]
    heap_factor: float = 1.0
