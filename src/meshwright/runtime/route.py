"""Places in a schedule, and routes: which messages carry a tensor between two stages."""

from dataclasses import dataclass
from typing import NamedTuple

Place = tuple[slice, ...]
"""A box: a rectangular block of a tensor, given by one slice for every dim."""


class At(NamedTuple):
    """The place in the schedule at which a collective runs."""

    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"stage {self.stage}" + (f", micro-batch {self.microbatch}" if self.microbatch is not None else "")


@dataclass(frozen=True)
class Route:
    """The messages by which this rank sends or receives a tensor that crosses between two stages.

    Each of ``messages`` is (peer rank, box of this rank's part). Receiving ranks that hold the same part may receive
    only boxes of it, and then exchange these boxes: this rank sends its box ``own_box`` to the peers in ``others`` and
    receives their boxes. Each of ``others`` is (peer rank, box that the peer sends). A box that is None is not sent.
    """

    messages: tuple[tuple[int, Place], ...]
    own_box: Place | None = None
    others: tuple[tuple[int, Place | None], ...] = ()

    @property
    def peers(self) -> set[int]:
        """The ranks that this rank sends to or receives from."""
        return {peer for peer, _ in (*self.messages, *self.others)}
