"""The order in which the actions of a schedule run: a slow and simple search finds the same order, also if ranks
wait for each other forever."""

import random
from collections import deque

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ir.schedule import Action, ActionList, Schedule
from meshwright.schedules import pipeline
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.timing import ActionOrder, awaited, communicates, order_of

CHUNKS = {"interleaved": 3, "zb-v": 2, "dualpipe-v": 2}


def plain_order(schedule: Schedule) -> ActionOrder:
    """The order of a schedule by looking actions up."""
    explicit = communicates(schedule)
    actions: list[Action] = []
    ranks: list[int] = []
    awaits: list[tuple[int, ...]] = []
    done, numbers = [0] * len(schedule.ranks), dict[Action, int]()
    waiting: dict[Action, list[int]] = {}
    ready = deque(range(len(schedule.ranks)))
    while ready:
        rank = ready.popleft()
        for action in schedule.ranks[rank].actions[done[rank] :]:
            needed = awaited(action, schedule, explicit=explicit)
            there = tuple(numbers[dependency] for dependency in needed if dependency in numbers)
            if needed and not there:
                for dependency in needed:
                    waiting.setdefault(dependency, []).append(rank)
                break
            numbers[action] = len(actions)
            actions.append(action)
            ranks.append(rank)
            awaits.append(there)
            done[rank] += 1
            ready.extend(waiting.pop(action, ()))
    distinct = tuple(dict.fromkeys((action.stage, action.kind) for action in actions))
    kinds = tuple(distinct.index((action.stage, action.kind)) for action in actions)
    return ActionOrder(tuple(actions), tuple(ranks), tuple(awaits), kinds, distinct)


@pytest.mark.parametrize("name", pipeline.NAMES)
def test_the_order_is_that_of_a_plain_search(name: str) -> None:
    for p, m in ((1, 3), (2, 4), (3, 7), (4, 8)):
        if (name == "none") != (p == 1):
            continue
        schedule = pipeline.build(name, p, m - m % p if name == "interleaved" else m, CHUNKS.get(name, 1))
        for version in (schedule, add_reduction(add_communication(schedule, built=True))):
            order = order_of(version, keep=False)
            assert order == plain_order(version)
            assert len(order.actions) == sum(map(len, version.ranks))


@given(st.sampled_from(["1f1b", "zb-h1", "interleaved"]), st.booleans(), st.integers(0, 2**32), st.integers(0, 6))
def test_the_order_of_a_broken_schedule_is_that_of_a_plain_search(
    name: str, sends: bool, seed: int, changes: int
) -> None:
    """Actions are taken out, doubled or exchanged, so that ranks may wait for ever."""
    schedule = pipeline.build(name, 3, 6, CHUNKS.get(name, 1))
    schedule = add_communication(schedule, built=True) if sends else schedule
    draw, ranks = random.Random(seed), [list(actions) for actions in schedule.ranks]
    for _ in range(changes):
        actions = draw.choice(ranks)
        index, other = draw.randrange(len(actions)), draw.randrange(len(actions))
        match draw.randrange(3):
            case 0:
                del actions[index]
            case 1:
                actions.insert(other, actions[index])
            case _:
                actions[index], actions[other] = actions[other], actions[index]
    broken = msgspec.structs.replace(schedule, ranks=tuple(map(ActionList, ranks)))
    assert order_of(broken, keep=False) == plain_order(broken)
