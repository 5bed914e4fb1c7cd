"""The work of an emulated device: durations instead of FLOPs and bytes, and the ranks that it waits for."""

from typing import Literal

import msgspec

from meshwright.cost.fabric import Fabric
from meshwright.cost.work import Communicate, Compute, Piece, StepWork, Wait
from meshwright.errors import ScheduleError
from meshwright.ir.cluster import Cluster
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import Schedule


class Doing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of emulated work, which takes ``seconds``. ``role`` is ``compute`` or names a part of a collective.
    ``communicate`` blocks. ``meet`` first waits for all stages, then blocks. ``start`` begins a collective that does
    not block, and ``until`` with the same name waits for its end. Collectives of the same ``axis`` run one after the
    other."""

    what: str
    role: Literal["compute", "communicate", "meet", "start", "until"]
    seconds: float = 0.0
    axis: str = ""


class EmulatedStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The work of one stage. ``actions`` maps a kind of action to its work (as in ``cost.work.StageWork``); ``before``
    and ``after`` are the work before and after the schedule. A message takes ``sent_up_s`` to the next stage and
    ``sent_down_s`` to the previous stage."""

    actions: dict[str, tuple[Doing, ...]]
    before: tuple[Doing, ...] = ()
    after: tuple[Doing, ...] = ()
    sent_up_s: float = 0.0
    sent_down_s: float = 0.0


def emulated_stages(work: StepWork, mesh: Mesh, cluster: Cluster, schedule: Schedule) -> tuple[EmulatedStage, ...]:
    """The durations of one rank of every stage. ``schedule`` says which pipeline rank holds a stage. The rank's peers
    on the other axes are assumed to arrive at the same time, so collectives take closed-form times, as in the simulator
    without stragglers.

    Raises:
        ScheduleError: a collective along ``pp`` does not block; only blocking collectives are emulated there.
    """
    fabric = Fabric(cluster, mesh)
    homes, stages = schedule.homes, []
    for number, stage in enumerate(work.stages):
        beside = {step: homes[(number + step) % len(work.stages)] for step in (1, -1)}
        here = homes[number]
        stages.append(
            EmulatedStage(
                actions={kind: _doings(pieces, fabric, here) for kind, pieces in stage.pieces.items()},
                before=_doings(stage.before, fabric, here),
                after=_doings(stage.after, fabric, here),
                sent_up_s=fabric.send_s(stage.sent_up_bytes, here, beside[1]),
                sent_down_s=fabric.send_s(stage.sent_down_bytes, here, beside[-1]),
            )
        )
    return tuple(stages)


def _doings(pieces: tuple[Piece, ...], fabric: Fabric, rank: int) -> tuple[Doing, ...]:
    doings = []
    for piece in pieces:
        match piece:
            case Compute():
                doings.append(Doing(piece.what, "compute", piece.seconds))
            case Wait():
                doings.append(Doing(piece.what, "until"))
            case Communicate():
                if piece.axis == "pp" and not piece.blocking:
                    raise ScheduleError(
                        f"`{piece.what}` goes on along pp beside the computing",
                        where="emulated device",
                        remedy="let it block: stages really meet there",
                    )
                seconds = fabric.collective_s(piece, rank)
                meets = piece.axis == "pp" and fabric.size("pp") > 1
                role: Literal["meet", "communicate", "start"] = "communicate" if piece.blocking else "start"
                doings.append(Doing(piece.what, "meet" if meets else role, seconds, piece.axis))
    return tuple(doings)
