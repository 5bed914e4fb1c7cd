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
from meshwright.ir.stages import BACKWARD, CAPTURED, FORWARD, INPUT, PROLOGUE, WEIGHT

_SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)


class GraphBytes(NamedTuple):
    """The memory of graphs: ``slot_bytes`` for each micro-batch in flight, and ``more_bytes`` in the first slot for the
    prologue. ``actions``: the memory that each action allocates in addition."""

    slot_bytes: int
    more_bytes: int
    actions: dict[str, ActionBytes]


def graph_bytes(program: Program, memory: StageLifetimes, passing_bytes: int, kinds: Collection[str]) -> GraphBytes:
    """The memory of a stage's graphs. ``memory``: the memory of the same actions without graphs. ``passing_bytes``: the
    results of the prologue. ``kinds``: the kinds of actions of the schedule."""
    copied = _copied_bytes(program)
    if program.together:
        most = max(memory.actions["F"].most_bytes, memory.actions["B"].most_bytes)
        return GraphBytes(most + copied, 0, {})
    none, actions = ActionBytes(), memory.actions
    came, back = (actions.get(kind, none).left_bytes for kind in ("RECV_F", "RECV_B"))
    up, down = (sum(each.value.num_bytes for each in program.crossing(kind)) for kind in _SENDS)  # sent as copies
    slot = copied + slot_bytes(program, splits="I" in kinds)
    ends = actions["REDUCE_GRAD"].taken_bytes  # the results of a single micro-batch, which stay in its slot
    beside = {
        "RECV_F": actions["RECV_F"],
        "RECV_B": actions["RECV_B"],
        "F": ActionBytes(came, came + up, 0),
        "B": ActionBytes(back, back + down, 0),
        "I": ActionBytes(back, back + down, 0),
        "REDUCE_GRAD": _without(actions["REDUCE_GRAD"], ends),
        "after": _without(actions["after"], ends),
    }
    more = max(0, actions["before"].most_bytes - passing_bytes - slot)
    return GraphBytes(slot, more, beside)


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


_PHASES: Mapping[str, str] = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHT}
