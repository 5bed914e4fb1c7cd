"""Changes of a plan while it runs: a link has become slower, and collectives over it take another algorithm."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

NOT_RUN = ("prediction", "alternatives", "notes")
"""What a plan says besides what is run."""


class Amendment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From ``step`` on, the collectives of one operation and size among ``ranks``, which differ on ``axis``, go by
    ``algorithm``. ``num_bytes`` are of the whole vector."""

    step: int
    axis: str
    ranks: tuple[int, ...]
    operation: str
    num_bytes: int
    algorithm: str

    def __str__(self) -> str:
        ranks = " ".join(map(str, self.ranks))
        where = f"over {self.axis} of ranks {ranks}"
        return f"from step {self.step} on, {self.operation} of {self.num_bytes} bytes {where} by {self.algorithm}"


def amended(before: Iterable[Amendment], new: Iterable[Amendment]) -> tuple[Amendment, ...]:
    """The amendments that hold now: a new amendment replaces the old one of the same collective."""
    held = {(one.axis, one.ranks, one.operation, one.num_bytes): one for one in (*before, *new)}
    return tuple(held[key] for key in sorted(held))


def base_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What is run of a plan, as it was before amendments; plans are as in their files."""
    return {key: value for key, value in plan.items() if key not in (*NOT_RUN, "amendments")}
