"""Copies of the state that ranks hold beside their steps: two in the launcher's memory, and one for saves."""

import msgspec

from meshwright.ir.units import size

SLOTS = 2
"""Copies of a rank's part in its launcher's memory: while a new one is written, the one before it stays."""
HOSTS = 2
"""Hosts that keep a copy of each part, if there are as many."""
KEPT, STAGED = "copies in memory", "staging of saves"
"""The names of the two kinds of copies, in ledgers and plans."""


class StateCopies(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes of the copies of one rank: ``kept_bytes`` in its launcher's memory, and ``staged_bytes``, from which saves
    are written beside the steps."""

    kept_bytes: int = 0
    staged_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of both."""
        return self.kept_bytes + self.staged_bytes

    def __str__(self) -> str:
        parts = ((KEPT, self.kept_bytes), (STAGED, self.staged_bytes))
        return " and ".join(f"{size(num_bytes)} for {what}" for what, num_bytes in parts if num_bytes)


class MemoryPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A named part of a rank's predicted and measured peak."""

    what: str
    predicted_bytes: int
    measured_bytes: int
