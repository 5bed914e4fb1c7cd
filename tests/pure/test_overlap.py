"""The closed form of steps whose collectives run beside kernels, beside the simulation of the same steps."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost.closed_form import predict_step
from meshwright.cost.work import Communicate, Compute, Piece, StageWork, StepWork, Wait
from meshwright.ir.cluster import Cluster
from meshwright.ir.device import Device, Kernels
from meshwright.ir.level import Level
from meshwright.ir.mesh import Mesh
from meshwright.ir.software import Software
from meshwright.schedules.pipeline import training_schedule
from meshwright.simulate.engine import play

GPU = Device(
    name="gpu", kind="gpu", memory_bytes=10**10, memory_bandwidth_bytes_per_s=1e12,
    peak_flops_per_s={"bfloat16": 1e14}, efficiency={"matmul": ((1e6, 1.0),)},
    kernels=Kernels(processors=100, kernel_s=2e-6),
)  # fmt: skip
LEVELS = (
    Level(name="box", fan_out=2, alpha_s=1e-2, beta_s_per_byte=1e-9),
    Level(name="network", fan_out=8, alpha_s=5e-2, beta_s_per_byte=1e-8),
)
CLUSTER = Cluster(name="gpus", num_devices=16, device=GPU, levels=LEVELS, software=Software(step_s=0.5))
SECONDS = st.floats(0.1, 3.0)
BYTES = st.integers(10**6, 10**9)


def step_s(work: StepWork, mesh: Mesh, name: str, microbatches: int, chunks: int = 1) -> tuple[float, float]:
    """The seconds of a step in closed form and simulated."""
    schedule = training_schedule(name, mesh.size("pp") if mesh.has("pp") else 1, microbatches, chunks)
    prediction = predict_step(work, schedule, mesh, CLUSTER, overlap=True)
    assert prediction.compute_s + prediction.communication_s <= prediction.step_s + 1e-9
    return prediction.step_s, play(schedule, work, mesh, CLUSTER).step_s


@st.composite
def action(draw: st.DrawFn) -> tuple[Piece, ...]:
    """Kernels, a collective that kernels wait for at once, and two that end within the action, the first of them on the
    same links."""
    tp, dp = (Communicate(name, "all_reduce", name, draw(BYTES), blocking=False) for name in ("tp", "dp"))
    blocking = Communicate("at once", "all_gather", "tp", draw(BYTES))
    kernels = [Compute("kernels", draw(SECONDS)) for _ in range(4)]
    return (kernels[0], tp, dp, kernels[1], blocking, Wait("dp"), kernels[2], Wait("tp"), kernels[3])


@st.composite
def stage(draw: st.DrawFn) -> StageWork:
    """A stage whose sums of gradients are waited for before its update."""
    sums = [Communicate(name, "all_reduce", "dp", draw(BYTES), blocking=False) for name in ("first", "second")]
    loss = Communicate("loss", "broadcast", "pp", 4)
    pieces = {kind: draw(action()) for kind in "FBIW"} | {"REDUCE_GRAD": (*sums,)}
    return StageWork(
        pieces=pieces,
        before=(Compute("before", draw(SECONDS)),),
        after=(loss, Wait("first"), Compute("update", draw(SECONDS)), Wait("second"), Compute("update", draw(SECONDS))),
        sent_up_bytes=draw(BYTES),
        sent_down_bytes=draw(BYTES),
    )


@given(st.data(), st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2"]), st.sampled_from([(1, 1), (2, 3), (3, 5)]))
@settings(max_examples=30, deadline=None)
def test_it_equals_the_simulation(data: st.DataObject, name: str, sizes: tuple[int, int]) -> None:
    pp, microbatches = sizes
    work = StepWork(tuple(data.draw(stage()) for _ in range(pp)))
    closed_form_s, simulated_s = step_s(work, Mesh.of(pp=pp, dp=2, tp=2), name, microbatches)
    assert closed_form_s == pytest.approx(simulated_s)


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "dualpipe-v"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_sums_of_chunks_may_begin_earlier_in_the_simulation(name: str, data: st.DataObject) -> None:
    """There, the chunk that ends first sums its gradients beside the actions of the other."""
    work = StepWork(tuple(data.draw(stage()) for _ in range(4)))
    closed_form_s, simulated_s = step_s(work, Mesh.of(pp=2, dp=2, tp=2), name, 4, 2)
    assert closed_form_s == pytest.approx(simulated_s, rel=0.15)
    unsummed = [
        msgspec.structs.replace(
            each, pieces=each.pieces | {"REDUCE_GRAD": ()}, after=(each.after[0], *each.after[2::2])
        )
        for each in work.stages
    ]
    closed_form_s, simulated_s = step_s(StepWork(tuple(unsummed)), Mesh.of(pp=2, dp=2, tp=2), name, 4, 2)
    assert closed_form_s == pytest.approx(simulated_s)


def test_sums_that_begin_in_the_only_backward_run_until_the_update() -> None:
    pieces: dict[str, tuple[Piece, ...]] = {
        "F": (Compute("F", 1.0),),
        "B": (Compute("B", 2.0), Communicate("sum", "all_reduce", "dp", 10**9, blocking=False), Compute("B", 0.5)),
        "REDUCE_GRAD": (),
    }
    work = StepWork((StageWork(pieces=pieces, after=(Wait("sum"), Compute("update", 1.0))),))
    closed_form_s, simulated_s = step_s(work, Mesh.of(dp=2), "1f1b", 1)
    assert closed_form_s == pytest.approx(simulated_s)
    assert closed_form_s > 0.5 + 4.5
    in_turn = predict_step(work, training_schedule("1f1b", 1, 1), Mesh.of(dp=2), CLUSTER)
    assert in_turn.step_s == pytest.approx(closed_form_s + 0.5)


def test_a_message_does_not_block_its_sender() -> None:
    pieces: dict[str, tuple[Piece, ...]] = {"F": (Compute("F", 1.0),), "B": (Compute("B", 2.0),), "REDUCE_GRAD": ()}
    work = StepWork((StageWork(pieces=pieces, sent_up_bytes=10**7), StageWork(pieces=pieces, sent_down_bytes=10**7)))
    closed_form_s, simulated_s = step_s(work, Mesh.of(pp=2), "gpipe", 8)
    assert closed_form_s == pytest.approx(simulated_s)
    in_turn = predict_step(work, training_schedule("gpipe", 2, 8), Mesh.of(pp=2), CLUSTER)
    assert in_turn.step_s > closed_form_s
