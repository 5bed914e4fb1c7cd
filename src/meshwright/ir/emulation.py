"""What an emulated device does for each stage: how long it waits, and for whom."""

from typing import Literal

import msgspec


class Doing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``seconds`` of computing (``compute``) or of a collective that blocks (``communicate``); ``meet``: of one for
    which all stages come together first; ``start``: of one that goes on until an ``until`` of the same name waits."""

    what: str
    role: Literal["compute", "communicate", "meet", "start", "until"]
    seconds: float = 0.0


class EmulatedStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stage: by kind of action (as in ``cost.work.StageWork``), and around the schedule. A message to the next
    stage is under way for ``sent_up_s``, to the one before for ``sent_down_s``."""

    actions: dict[str, tuple[Doing, ...]]
    before: tuple[Doing, ...] = ()
    after: tuple[Doing, ...] = ()
    sent_up_s: float = 0.0
    sent_down_s: float = 0.0
