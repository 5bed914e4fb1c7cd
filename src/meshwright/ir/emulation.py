"""The work of an emulated device in each stage: how long it waits, and for which peers."""

from typing import Literal

import msgspec


class Doing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``seconds`` of ``compute``, or of a collective: ``communicate`` blocks; ``meet`` first waits for all stages, then
    blocks; ``start`` goes on until an ``until`` with the same name waits for it."""

    what: str
    role: Literal["compute", "communicate", "meet", "start", "until"]
    seconds: float = 0.0


class EmulatedStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The work of one stage by kind of action (as in ``cost.work.StageWork``), ``before`` and ``after`` the schedule. A
    message takes ``sent_up_s`` to the next stage and ``sent_down_s`` to the previous stage."""

    actions: dict[str, tuple[Doing, ...]]
    before: tuple[Doing, ...] = ()
    after: tuple[Doing, ...] = ()
    sent_up_s: float = 0.0
    sent_down_s: float = 0.0
