"""The memory of a stage's actions, from the lifetimes of its values, and its peak over a schedule."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.lifetimes import lifetimes
from meshwright.cost.occupancy import peak_memory
from meshwright.cost.work import ActionBytes, StageWork, StepWork
from meshwright.ir.program import Accumulator, Collective, Node, Phase, Program, Transfer, Value
from meshwright.ir.schedule import ActionKind, ActionList, Schedule
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build


def value(name: str, num_bytes: int, storage: str = "") -> Value:
    return Value(name, (num_bytes,), "uint8", storage or name)


def node(name: str, inputs: Sequence[str], output: Value, frees: Sequence[str] = ()) -> Node:
    return Node(name=name, target="aten.add.Tensor", inputs=tuple(inputs), outputs=(output,), frees=tuple(frees))


def transfers(*values: Value) -> tuple[Transfer, ...]:
    return tuple(Transfer(each.name, each, each.shape) for each in values)


X, H, Y, GY, GH, GX, TOTAL = (
    value(name, size)
    for name, size in (("x", 5), ("h", 10), ("y", 20), ("gy", 21), ("gh", 100), ("gx", 6), ("total", 40))
)
MIDDLE = Program(
    stage=1,
    num_stages=3,
    phases=(
        Phase("forward", (X,), (node("h", ["x"], H), node("y", ["h"], Y)), ("h", "y")),
        Phase(
            "backward",
            (GY, H),
            (node("gh", ["gy", "h"], GH, ["gy"]), node("gx", ["gh"], GX, ["gh", "h"])),
            ("gx",),
        ),
        Phase(
            "input", (GY, H), (node("gh", ["gy", "h"], GH, ["gy"]), node("gx", ["gh"], GX)), ("gh", "gx")
        ),
        Phase("weight", (GH, H), (node("w", ["gh", "h"], value("w", 40, "total"), ["gh", "h"]),), ("w",)),
    ),
    transfers={
        ActionKind.RECV_F: transfers(X), ActionKind.SEND_F: transfers(Y), ActionKind.RECV_B: transfers(GY),
        ActionKind.SEND_B: transfers(GX),
    },
    accumulators=(Accumulator("p", TOTAL),),
)  # fmt: skip
"""A stage in the middle: x becomes h and y; h is saved; gy becomes gh and gx."""


def test_actions_take_need_and_leave_what_their_values_do() -> None:
    stage_lifetimes = lifetimes(MIDDLE, on_cpu=False)
    assert stage_lifetimes.saved_bytes == 10
    assert {kind: stage_lifetimes.actions[kind] for kind in ("RECV_F", "F", "RECV_B", "B", "I", "W")} == {
        "RECV_F": ActionBytes(0, 5, 5),
        "F": ActionBytes(5, 5 + 10 + 20, 10),
        "RECV_B": ActionBytes(0, 21, 21),
        "B": ActionBytes(10 + 21, 10 + 21 + 100, 0),
        "I": ActionBytes(10 + 21, 10 + 21 + 100, 10 + 100),
        "W": ActionBytes(10 + 100, 10 + 100, 0),
    }


def stage(**changes: object) -> StageWork:
    actions = lifetimes(MIDDLE, on_cpu=False).actions
    fields: dict[str, object] = {"pieces": {}, "held_bytes": 1000, "passing_bytes": 300, "inputs_bytes": 7}
    return StageWork(**(fields | {"actions": actions} | changes))  # type: ignore[arg-type]


def test_a_received_value_counts_from_its_message_on() -> None:
    """x of the next micro-batch has come when the backward of this one runs."""
    actions = ActionList.from_text("0RECV_F0 0F0 0SEND_F0 0RECV_F1 0RECV_B0 0B0 0SEND_B0 0F1 0RECV_B1 0B1")
    schedule = Schedule.of("by hand", [list(actions)], num_stages=1, num_microbatches=2)
    (peak,) = peak_memory(StepWork((stage(),)), schedule)
    assert (peak.action, peak.peak_bytes) == ("0B0", 1000 + 5 + (10 + 21 + 100))


def test_gathered_parameters_are_gone_when_gradients_are_reduced() -> None:
    reducing = {
        "REDUCE_GRAD": ActionBytes(0, 700, 50), "after": ActionBytes(50, 60, 40), "F": ActionBytes(0, 350, 0),
        "B": ActionBytes(0, 10, 0),
    }  # fmt: skip
    schedule = add_reduction(build("none", 1, 1))
    (peak,) = peak_memory(StepWork((stage(actions=reducing),)), schedule)
    assert (peak.action, peak.peak_bytes, peak.held_bytes) == ("0REDUCE_GRAD", 1000 - 300 + 700, 700)
    (peak,) = peak_memory(StepWork((stage(actions=reducing, passing_bytes=400),)), schedule)
    assert (peak.action, peak.peak_bytes) == ("0F0", 1000 + 350)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_peak_is_that_of_values_counted_one_by_one(name: str, ranks: int) -> None:
    chunks = 2 if name == "zb-v" else 1
    schedule = add_reduction(add_communication(build(name, ranks, 2 * ranks, chunks)))
    work = StepWork(tuple(stage(passing_bytes=0) for _ in range(schedule.num_stages)))
    for memory, actions in zip(peak_memory(work, schedule), schedule.ranks, strict=True):
        assert memory.peak_bytes == counted(list(actions))


def counted(actions: list[object]) -> int:
    """The peak of a rank, with a dict of all values: the oracle of ``peak_memory``."""
    live: dict[tuple[object, ...], int] = {}
    held, most = 1000 * len({action.stage for action in actions}), 0  # type: ignore[attr-defined]
    stages = {action.stage for action in actions}  # type: ignore[attr-defined]

    def look(extra: int = 0) -> None:
        nonlocal most
        most = max(most, held + sum(live.values()) + extra)

    for action in actions:
        number, kind, key = action.stage, action.kind.value, (action.stage, action.microbatch)  # type: ignore[attr-defined]
        if kind == "RECV_F":
            live[*key, "x"] = 5
        elif kind == "RECV_B":
            live[*key, "gy"] = 21
        elif kind == "F":
            live[*key, "x"] = 5
            live[*key, "h"] = 10
            look(20)
            del live[*key, "x"]
            if number + 1 in stages:
                live[number + 1, key[1], "x"] = 5
        elif kind in ("B", "I"):
            live[*key, "gy"] = 21
            look(100)
            del live[*key, "gy"]
            if kind == "I":
                live[*key, "gh"] = 100
            else:
                del live[*key, "h"]
            if number - 1 in stages:
                live[number - 1, key[1], "gy"] = 21
        elif kind == "W":
            look()
            del live[*key, "gh"], live[*key, "h"]
        look()
    return most


def programs() -> st.SearchStrategy[tuple[list[int], list[list[int]]]]:
    """Sizes of values, and for each value the earlier values that make it."""

    def readers(sizes: list[int]) -> st.SearchStrategy[tuple[list[int], list[list[int]]]]:
        inputs = [
            st.lists(st.integers(0, at - 1), max_size=3, unique=True) if at else st.just([]) for at in range(len(sizes))
        ]
        return st.tuples(st.just(sizes), st.tuples(*inputs).map(list))

    return st.lists(st.integers(1, 50), min_size=1, max_size=12).flatmap(readers)


@given(programs())
def test_a_step_in_one_function_needs_what_is_alive_at_its_fullest(drawn: tuple[list[int], list[list[int]]]) -> None:
    sizes, inputs = drawn
    names = [f"v{at}" for at in range(len(sizes))]
    last = {
        at: max((reader for reader, read in enumerate(inputs) if at in read), default=at) for at in range(len(sizes))
    }
    nodes = tuple(
        node(names[at], [names[read] for read in inputs[at]], value(names[at], sizes[at]),
             [names[gone] for gone, when in last.items() if when == at])
        for at in range(len(sizes))
    )  # fmt: skip
    half = len(nodes) // 2
    program = Program(together=True, phases=(Phase("forward", (), nodes[:half]), Phase("backward", (), nodes[half:])))
    actions = lifetimes(program, on_cpu=True).actions
    alive = [sum(sizes[at] for at in range(now + 1) if last[at] >= now) for now in range(len(nodes))]
    assert max(actions["F"].most_bytes, actions["B"].most_bytes) == max(alive)
    assert actions["B"].left_bytes == 0


def reduced(copied_bytes: int) -> Program:
    """A stage that sums a gradient of 90 bytes over 4 ranks, after several micro-batches."""
    gradient, sums = value("g", 90), Collective(kind="reduce_scatter", axis="dp", size=4, bytes=90)
    start = Node(
        name="start", target="reduce", inputs=("g",), outputs=(value("part", 25),), starts=sums,
        copied_bytes=copied_bytes,
    )  # fmt: skip
    end = Node(name="end", target="wait", inputs=("start",), outputs=(value("end", 25, "part"),), waits="start")
    return Program(
        phases=(
            Phase("reduce", (gradient,), (start,), ("part",)),
            Phase("finish", (value("part", 25),), (end,), ("end",)),
        ),
        gradients={"p": "end"},
        accumulators=(Accumulator("p", gradient),),
    )


def test_copies_live_until_the_collective_that_reads_them_is_done() -> None:
    actions = lifetimes(reduced(92), on_cpu=False).actions
    assert actions["REDUCE_GRAD"] == ActionBytes(0, 25 + 92, 25 + 92)
    assert actions["after"] == ActionBytes(25 + 92, 25 + 92, 25)
    assert lifetimes(reduced(92), on_cpu=True).actions["REDUCE_GRAD"] == ActionBytes(0, 25, 25)


def test_the_sum_of_a_tied_gradient_needs_the_terms_of_other_stages() -> None:
    actions = lifetimes(reduced(0), on_cpu=False, joined_bytes=30).actions
    assert actions["after"] == ActionBytes(25, 25 + 30, 25)
