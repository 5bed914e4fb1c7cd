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
    copied = _copied_bytes(program)
    if program.together:
        most = max(memory.actions["F"].most_bytes, memory.actions["B"].most_bytes)
        return GraphBytes(most + copied, 0, {})
    none, actions = ActionBytes(), memory.actions
    came, back = (actions.get(kind, none).left_bytes for kind in ("RECV_F", "RECV_B"))
    received = {each.value.name for kind in _RECEIVES for each in program.crossing(kind)}  # and passed on, not copied
    up, down = (
        sum(each.value.num_bytes for each in program.crossing(kind) if each.value.name not in received)
        for kind in _SENDS
    )
    slot = copied + slot_bytes(program, tuple(name for kind, name in _LATE.items() if kind in kinds))
    kept = _waiting_bytes(program, _RECEIVES[:1], (FORWARD,), LATE)
    deferred = _waiting_bytes(program, _RECEIVES, (FORWARD, INPUT), (WEIGHT,))
    ends = actions["REDUCE_GRAD"].taken_bytes  # the results of a single micro-batch, which stay in its slot
    beside = {
        "RECV_F": actions["RECV_F"],
        "RECV_B": actions["RECV_B"],
        "F": ActionBytes(came, came + up, kept),
        "B": ActionBytes(back + kept, back + kept + down, 0),
        "I": ActionBytes(back + kept, back + kept + down, deferred),
        "W": ActionBytes(deferred, deferred, 0),
        "REDUCE_GRAD": _without(actions["REDUCE_GRAD"], ends),
        "after": _without(actions["after"], ends),
    }
    more = max(0, actions["before"].most_bytes - passing_bytes - slot)
    return GraphBytes(slot, more, beside)


def _waiting_bytes(
    program: Program, kinds: Collection[ActionKind], done: Collection[str], later: Collection[str]
) -> int:
    """The bytes of received values that a phase of ``later`` reads first: none of ``done`` has copied them."""
    copied, read = (
        {value.name for name in phases for value in program.phase(name).inputs} for phases in (done, later)
    )
    received = (each.value for kind in kinds for each in program.crossing(kind))
    return sum(value.num_bytes for value in received if value.name in read - copied)


def _copied_bytes(program: Program) -> int:
    """The bytes of the parts of the batch that are copied for a micro-batch."""
    whole = {held.value for held in program.inputs}
    taken = {value.name: value for name in CAPTURED for value in program.phase(name).inputs}
    return sum(value.num_bytes for name, value in taken.items() if name in whole or name in program.slices)


def _without(each: ActionBytes, num_bytes: int) -> ActionBytes:
    return ActionBytes(*(max(0, size - num_bytes) for size in (each.taken_bytes, each.most_bytes, each.left_bytes)))


def moving_part(programs: Sequence[Program], kinds: Collection[str]) -> str:
    """Why a stage's phases cannot be captured; empty if all can. ``kinds``: the kinds of actions of the schedule."""
    phases = [PROLOGUE, *(name for kind, name in _PHASES.items() if kind in kinds)]
    return next(filter(None, (program.moving(phases) for program in programs)), "")


_LATE: Mapping[str, str] = {"B": BACKWARD, "I": INPUT, "W": WEIGHT}
_PHASES: Mapping[str, str] = {"F": FORWARD, **_LATE}
