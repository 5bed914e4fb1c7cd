"""The front: of many options, those that no other beats in time, memory and price together."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

THINNED = 0.97
"""An option that is slower must need less than this part of a faster one's memory, or cost less."""


class Weighed(Protocol):
    """What the front looks at: seconds and (where a price is known) US dollars for one sequence, bytes of a device."""

    @property
    def sequence_s(self) -> float: ...
    @property
    def sequence_usd(self) -> float | None: ...
    @property
    def peak_bytes(self) -> float: ...


T = TypeVar("T", bound=Weighed)


def front(options: Iterable[T]) -> tuple[T, ...]:
    """Options that are not beaten, fastest first. Options of other devices, batches and clusters may be among them; of
    two whose prices are not both known, time and memory decide."""
    kept: list[T] = []
    for option in sorted(options, key=lambda one: (one.sequence_s, one.peak_bytes, one.sequence_usd or 0.0)):
        if not any(_beats(one, option) for one in kept):
            kept.append(option)
    return tuple(kept)


def _beats(faster: Weighed, other: Weighed) -> bool:
    known, asked = faster.sequence_usd, other.sequence_usd
    as_dear = known is None or asked is None or asked >= known
    return as_dear and other.peak_bytes >= THINNED * faster.peak_bytes
