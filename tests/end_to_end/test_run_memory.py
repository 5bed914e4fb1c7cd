"""Searches leave memory for copies of the state, if anything fits beside them."""

from __future__ import annotations

import msgspec
import pytest

from meshwright.api.run_memory import beside_steps, leaving_room
from meshwright.cost.occupancy import room_of
from meshwright.cost.optimizer import ADAMW, SGD
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.copies import StateCopies
from meshwright.ir.graph import Graph, ParameterGradient, Tensor
from meshwright.ir.plan import Plan
from tests.pure.test_ledger import DP

CLUSTER = Cluster.load("cpu-local")
HELD = StateCopies(kept_bytes=2 * 2**20, staged_bytes=2**20)


def tensor(name: str, elements: int, kind: str = "parameter") -> Tensor:
    return Tensor(name=name, shape=(elements,), dtype="float32", kind=kind, storage=name)  # type: ignore[arg-type]


GRAPH = Graph(
    model="m", batch_size=4, operators=(), factor_classes={}, inputs=(), parameters=("w", "frozen"), buffers=("b",),
    loss="loss",
    tensors={
        "w": tensor("w", 100), "frozen": tensor("frozen", 10), "b": tensor("b", 6, "buffer"), "g": tensor("g", 100),
    },
    gradients=(
        ParameterGradient(parameter="w", gradient="g"), ParameterGradient(parameter="frozen", gradient=None),
    ),
)  # fmt: skip


@pytest.mark.parametrize("given", [None, 2.0**30])
def test_a_search_gets_the_memory_that_copies_leave(given: float | None) -> None:
    limits: list[float | None] = []

    def search(memory_bytes: float | None) -> Plan:
        limits.append(memory_bytes)
        return DP

    plan = leaving_room(search, HELD, CLUSTER, 2, given)
    assert limits == [(given or room_of(CLUSTER, range(2))) - 3 * 2**20]
    assert plan.notes[-1].reason == "of each rank's memory, 2 MiB for copies in memory and 1 MiB for staging of saves"
    assert plan.digest == DP.digest
    assert leaving_room(search, StateCopies(), CLUSTER, 2, given) is DP


def test_what_fits_only_without_copies_is_found_and_said() -> None:
    def search(memory_bytes: float | None) -> Plan:
        if memory_bytes is not None:
            raise LayoutError("no layout fits", where="memory")
        return DP

    (note,) = leaving_room(search, HELD, CLUSTER, 2, None).notes
    assert (note.split, note.reason[:23]) == ("no room", "a rank would need 2 MiB")


def test_copies_are_counted_from_the_model_and_the_optimizer() -> None:
    state = 4 * (100 + 10 + 6)
    assert beside_steps(GRAPH, SGD, CLUSTER, 2) == StateCopies(kept_bytes=state, staged_bytes=state // 2)
    trained = state + 2 * 4 * 100
    assert beside_steps(GRAPH, ADAMW, CLUSTER, 2) == StateCopies(kept_bytes=trained, staged_bytes=trained // 2)
    assert beside_steps(GRAPH, ADAMW, CLUSTER, 1).kept_bytes == 0, "a single rank has no launcher"
    gpus = msgspec.structs.replace(CLUSTER, device=Cluster.load("a100-80gb-dgx-hdr200x8").device)
    assert beside_steps(GRAPH, ADAMW, gpus, 2) == StateCopies(), "they lie in the memory of the host"
