"""The report of a dry run: what would break, wait or not fit on devices that are not there."""

from typing import ClassVar, Literal

import msgspec

FindingKind = Literal["wait", "mixed devices", "no kernel", "unmatched", "memory", "error"]
"""``wait``: the host waits for the device within a step. ``mixed devices``: an operator has tensors of host and device.
``no kernel``: an operator has none for its dtype or on this device. ``unmatched``: a message or collective never ends,
or its ranks disagree. ``memory``: a rank does not fit. ``error``: the step fails."""


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Something that is wrong, with its place in the source or in the schedule. ``ranks`` are those that met it,
    ``times`` how often in all. ``moment`` is ``set-up``, ``step 1`` or ``step 2``."""

    kind: FindingKind
    what: str
    where: str = ""
    moment: str = ""
    ranks: tuple[int, ...] = ()
    times: int = 1


class RankRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The run of one rank. ``peak_bytes`` are the most bytes of tensors on its device in the second step,
    ``predicted_bytes`` those of the cost model, ``held_bytes`` those between the steps. ``messages`` and
    ``collectives`` are numbers of operations in the second step."""

    rank: int
    peak_bytes: int
    predicted_bytes: int
    held_bytes: int
    messages: int
    collectives: int

    @property
    def deviation(self) -> float:
        """The relative difference of the predicted peak from the peak."""
        return self.predicted_bytes / self.peak_bytes - 1 if self.peak_bytes else 0.0


class DryRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The report of two steps of a plan on fake tensors. ``device`` is the device's name in the catalog,
    ``memory_bytes`` its memory, ``room_bytes`` the part that tensors may take. ``matched`` tells whether the messages
    and collectives of all ranks of the job were compared. ``unchecked`` names the opaque regions, whose inside did not
    run: whether it waits for the device, or has kernels there, is not known."""

    VERSION: ClassVar[int] = 1
    version: int = 1
    model: str
    cluster: str
    device: str
    memory_bytes: int
    room_bytes: int
    layout: str
    world_size: int
    matched: bool
    ranks: tuple[RankRun, ...]
    findings: tuple[Finding, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def of(self, kind: FindingKind) -> tuple[Finding, ...]:
        """The findings of one kind."""
        return tuple(finding for finding in self.findings if finding.kind == kind)
