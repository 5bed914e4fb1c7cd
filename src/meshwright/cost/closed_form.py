"""The closed form of a step: the seconds of each action's pieces, one after the other, over the pipeline's schedule."""

from collections.abc import Iterable

import msgspec

from meshwright.cost.collective import Group, Network
from meshwright.cost.work import Communicate, Compute, Piece, Wait, Work
from meshwright.ir.cluster import Cluster
from meshwright.ir.mesh import Mesh
from meshwright.ir.schedule import Action, ActionKind, Schedule
from meshwright.schedules.timing import run


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step. ``compute_s`` and ``communication_s`` are of the rank that is busiest; what is left of
    ``step_s`` is waiting for other ranks."""

    step_s: float
    compute_s: float
    communication_s: float


def predict_step(work: Work, schedule: Schedule, mesh: Mesh, cluster: Cluster) -> Predicted:
    """The step of ``work`` by ``schedule`` (with its sends), as if nothing hid behind anything and no link were shared
    but by the ranks of one collective."""
    network = Network(cluster)
    stride = mesh.world_size // (mesh.size("pp") if "pp" in mesh.names else 1)

    def seconds(action: Action) -> float:
        stage = work.stages[action.stage]
        if action.kind is ActionKind.SEND_F:
            return network.send_s(stage.sent_up_bytes, stride) if stage.sent_up_bytes else 0.0
        if action.kind is ActionKind.SEND_B:
            return network.send_s(stage.sent_down_bytes, stride) if stage.sent_down_bytes else 0.0
        return pieces_s(stage.pieces.get(action.kind.value, ()), mesh, network)

    times = run(schedule, seconds)
    ends, busy = [], []
    for actions, each in zip(schedule.ranks, times, strict=True):
        mine = sorted({action.stage for action in actions})
        rest = [piece for one in mine for piece in (*work.stages[one].before, *work.stages[one].after)]
        outside = pieces_s(rest, mesh, network)
        ends.append((each[-1][1] if each else 0.0) + outside)
        computing = [p for a in actions for p in work.stages[a.stage].pieces.get(a.kind.value, ())] + rest
        compute = sum(piece.seconds for piece in computing if isinstance(piece, Compute))
        spent = sum(seconds(action) for action in actions) + outside
        busy.append((compute, max(0.0, spent - compute)))
    compute_s, communication_s = max(busy)
    return Predicted(step_s=max(ends), compute_s=compute_s, communication_s=communication_s)


def pieces_s(pieces: Iterable[Piece], mesh: Mesh, network: Network) -> float:
    """Pieces one after the other; a ``Wait`` costs nothing, for its collective has been counted."""
    total = 0.0
    for piece in pieces:
        match piece:
            case Compute():
                total += piece.seconds
            case Communicate():
                total += collective_s(piece, mesh, network)
            case Wait():
                pass
    return total


def collective_s(piece: Communicate, mesh: Mesh, network: Network) -> float:
    """A collective over one axis of the mesh."""
    group = axis_group(mesh, piece.axis)
    match piece.collective:
        case "all_reduce":
            return network.all_reduce_s(piece.bytes, group)
        case "reduce_scatter":
            return network.reduce_scatter_s(piece.bytes, group)
        case "all_gather":
            return network.all_gather_s(piece.bytes, group)
        case "all_to_all":
            return network.all_to_all_s(piece.bytes, group)
        case "broadcast":
            return network.broadcast_s(piece.bytes, group)


def axis_group(mesh: Mesh, axis: str) -> Group:
    """The ranks of an axis: its size, and how far apart they are."""
    if axis not in mesh.names:
        return Group(1)
    ranks = mesh.group_ranks(axis, 0)
    return Group(len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
