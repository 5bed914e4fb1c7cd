"""Changes to a plan during a run: when a link becomes slower, its collectives switch to another algorithm."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

NOT_RUN = ("prediction", "alternatives", "notes")
"""The fields of a plan that have no effect on a run."""


class Amendment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A change of algorithm: from ``step`` on, one collective of the plan uses ``algorithm``.

    ``operation``, ``num_bytes`` (the size of the whole vector on one rank), ``axis`` and ``ranks`` identify this
    collective."""

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
    """The amendments in force: an amendment in ``new`` replaces the amendment in ``before`` of the same collective."""
    held = {(change.axis, change.ranks, change.operation, change.num_bytes): change for change in (*before, *new)}
    return tuple(held[key] for key in sorted(held))


def base_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a plan that affect a run, without ``amendments``. ``plan`` is the plan file as a dict."""
    return {key: value for key, value in plan.items() if key not in (*NOT_RUN, "amendments")}
