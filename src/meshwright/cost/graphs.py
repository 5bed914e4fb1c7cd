"""Memory of a stage whose phases are launched as graphs (``runtime/graphs.py``).

A graph's memory is its own for as long as it exists. So the values of a phase count for the whole run, once for each
micro-batch in flight, and the actions themselves only allocate what crosses between stages.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from meshwright.cost.lifetimes import StageLifetimes, slot_bytes
from meshwright.cost.work import ActionBytes
from meshwright.ir.program import Program
from meshwright.ir.schedule import ActionKind
from meshwright.ir.stages import BACKWARD, CAPTURED, FORWARD, INPUT, LATE, PROLOGUE, WEIGHT

_SENDS, _RECEIVES = (ActionKind.SEND_F, ActionKind.SEND_B), (ActionKind.RECV_F, ActionKind.RECV_B)


class GraphBytes(NamedTuple):
    """The memory of graphs: ``slot_bytes`` for each micro-batch in flight, and ``more_bytes`` in the first slot for the
    prologue. ``actions``: the memory that each action allocates in addition."""

    slot_bytes: int
    more_bytes: int
    actions: dict[str, ActionBytes]


def graph_bytes(program: Program, memory: StageLifetimes, passing_bytes: int, kinds: Collection[str]) -> GraphBytes:
    """The memory of a stage's graphs. ``memory``: the memory of the same actions without graphs. ``passing_bytes``: the
    results of the prologue. ``kinds``: the kinds of actions of its rank."""
    copied, once = _copied_bytes(program)
    if program.together:
        most = max(memory.actions["F"].most_bytes, memory.actions["B"].most_bytes)
        return GraphBytes(most + copied + once, 0, {})
    none, actions = ActionBytes(), memory.actions
    received_bytes, returned_bytes = (actions.get(kind, none).left_bytes for kind in ("RECV_F", "RECV_B"))
    activations, gradients = (_crossing(program, kind) for kind in _RECEIVES)
    received, passed = activations | gradients, _crossing(program, ActionKind.SEND_B).keys()
    up, down = (_sum(_crossing(program, kind), but=received) for kind in _SENDS)  # sent as copies, unless passed on
    slot = copied + slot_bytes(program, tuple(name for kind, name in _LATE.items() if kind in kinds))
    forward, split, weight = (_read(program, *phases) for phases in ((FORWARD,), (FORWARD, INPUT), (WEIGHT,)))
    # A received value is freed when its first reader has copied it, before the results are copied. Until then it waits:
    # after the forward for a backward, and after the first part of a backward for the second part.
    kept = _sum(activations, within=_read(program, *LATE), but=forward)
    deferred = _sum(received, within=weight, but=split)
    # What lives while the results of a backward, or of its first part, are copied.
    beside_whole = _sum(gradients, within=passed) + down
    beside_split = _sum(gradients, within=passed | weight) + _sum(activations, within=weight, but=split) + down
    ends = actions["REDUCE_GRAD"].taken_bytes  # the results of a single micro-batch, which stay in its slot
    beside = {
        "RECV_F": actions["RECV_F"],
        "RECV_B": actions["RECV_B"],
        "F": ActionBytes(received_bytes, received_bytes + up, kept),
        "B": ActionBytes(returned_bytes + kept, max(returned_bytes + kept, beside_whole), 0),
        "I": ActionBytes(returned_bytes + kept, max(returned_bytes + kept, beside_split), deferred),
        "W": ActionBytes(deferred, deferred, 0),
        "REDUCE_GRAD": _without(actions["REDUCE_GRAD"], ends),
        "after": _without(actions["after"], ends),
    }
    more = once + max(0, actions["before"].most_bytes - passing_bytes - slot)
    return GraphBytes(slot, more, beside)


def _crossing(program: Program, *kinds: ActionKind) -> dict[str, int]:
    """The bytes of the values that a stage sends or receives, by name."""
    return {each.value.name: each.value.num_bytes for kind in kinds for each in program.crossing(kind)}


def _read(program: Program, *phases: str) -> set[str]:
    """The names of the values that phases take."""
    return {value.name for name in phases for value in program.phase(name).inputs}


def _sum(sizes: Mapping[str, int], *, within: Collection[str] | None = None, but: Collection[str] = ()) -> int:
    """The bytes of the values in ``within`` (default: all), without those in ``but``."""
    return sum(size for name, size in sizes.items() if (within is None or name in within) and name not in but)


def _copied_bytes(program: Program) -> tuple[int, int]:
    """The bytes of the batch that are copied into the slot of each micro-batch, and the bytes that are copied only into
    the first slot, because only the prologue reads them."""
    whole = {held.value for held in program.inputs}
    phases = {name: program.phase(name).inputs for name in CAPTURED}
    taken = {value.name: value for values in phases.values() for value in values}
    read = {value.name for name, values in phases.items() if name != PROLOGUE for value in values}
    copied = [value for name, value in taken.items() if name in whole or name in program.slices]
    each = sum(value.num_bytes for value in copied if value.name in read)
    return each, sum(value.num_bytes for value in copied) - each


def _without(each: ActionBytes, num_bytes: int) -> ActionBytes:
    return ActionBytes(*(max(0, size - num_bytes) for size in (each.taken_bytes, each.most_bytes, each.left_bytes)))


def moving_part(programs: Sequence[Program], kinds: Collection[str]) -> str:
    """Why a stage's phases cannot be captured; empty if all can. ``kinds``: the kinds of actions of the schedule."""
    phases = [PROLOGUE, *(name for kind, name in _PHASES.items() if kind in kinds)]
    return next(filter(None, (program.moving(phases) for program in programs)), "")


_LATE: Mapping[str, str] = {"B": BACKWARD, "I": INPUT, "W": WEIGHT}
_PHASES: Mapping[str, str] = {"F": FORWARD, **_LATE}
