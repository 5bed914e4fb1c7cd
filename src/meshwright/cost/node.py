"""A collective inside of an operator that runs as a decomposition, as the integer program prices it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """A collective over an axis, of ``bytes`` (as ``cost.collective.Network`` counts them), over ranks that all come to
    it."""

    what: str
    kind: str
    axis: str
    bytes: int
