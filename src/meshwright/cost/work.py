"""The work of a step on every stage, with its costs, for the simulator and for emulated devices."""

from collections.abc import Sequence

import msgspec

from meshwright.cost.host import waits_s
from meshwright.cost.kernels import Cost
from meshwright.ir.program import CollectiveKind


class Compute(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="compute"):
    """Kernels that run one after the other on a rank's compute stream, ``seconds`` in all. For ``host_s`` of these the
    device waits for the host to launch them (``cost.host``)."""

    what: str
    seconds: float
    flops: float = 0.0
    bytes: int = 0
    host_s: float = 0.0

    def __add__(self, other: "Compute") -> "Compute":
        return Compute(
            self.what, self.seconds + other.seconds, self.flops + other.flops, self.bytes + other.bytes,
            self.host_s + other.host_s,
        )  # fmt: skip


class Communicate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="communicate"):
    """A collective of ``bytes`` (as ``cost.collective.Network`` counts them) along a mesh axis. It starts when every
    rank of its group has reached it. ``blocking``: the next piece waits for its end; otherwise a ``Wait`` waits for it.
    ``members``: the coordinates on ``pp`` that take part, ascending; if empty, the whole axis takes part."""

    what: str
    collective: CollectiveKind
    axis: str
    bytes: int
    blocking: bool = True
    members: tuple[int, ...] = ()


class Wait(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="wait"):
    """Wait for the end of the non-blocking ``Communicate`` of the same name."""

    what: str


Piece = Compute | Communicate | Wait
Lot = tuple[str, Cost]
"""Kernels that run one after the other, before it is known how long they wait for the host: the name of their piece,
and their cost on the device."""


def launched(pieces: Sequence[Piece | Lot], inside_s: float, launch_s: float) -> tuple[Piece, ...]:
    """The pieces of one action. Lots of kernels become Computes, which wait where the host launches kernels, each in
    ``launch_s``, more slowly than the device runs them. The device also waits ``inside_s`` for collectives, for which
    the host does not stop."""
    lots = [piece[1] for piece in pieces if isinstance(piece, tuple)]
    busy_s = sum(cost.seconds for cost in lots) + inside_s
    waits = iter(waits_s(busy_s, [launch_s * cost.launches for cost in lots]))
    return tuple(_computing(*piece, next(waits)) if isinstance(piece, tuple) else piece for piece in pieces)


def _computing(what: str, cost: Cost, wait_s: float) -> Compute:
    return Compute(what, cost.seconds + wait_s, cost.flops, cost.bytes, wait_s)


class StageWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stage on one rank: the pieces of each kind of action, the bytes that cross stage borders, and memory.

    ``pieces`` maps a kind of action (``F``, ``B``, ``I``, ``W``, and once a step ``REDUCE_GRAD``) to its pieces.
    ``before`` runs before the schedule (prologue), and ``after`` behind it (sums of gradients over stages, clipping,
    optimizer). Bytes are those of one rank. Per micro-batch, ``sent_up_bytes`` go to the next stage and
    ``sent_down_bytes`` to the previous stage. ``saved_bytes`` live from a micro-batch's forward until its last backward
    action. ``held_bytes`` live for the whole step (parameters, gradients, optimizer state, buckets, inputs).
    ``workspace_bytes`` is the most that one action needs in addition.
    """

    pieces: dict[str, tuple[Piece, ...]]
    before: tuple[Piece, ...] = ()
    after: tuple[Piece, ...] = ()
    sent_up_bytes: int = 0
    sent_down_bytes: int = 0
    saved_bytes: int = 0
    held_bytes: int = 0
    workspace_bytes: int = 0


class StepWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stages of a step, from the first to the last. ``heap_factor``: the bytes that the allocator takes from the
    system per byte of saved values or workspace."""

    stages: tuple[StageWork, ...]
    heap_factor: float = 1.0
