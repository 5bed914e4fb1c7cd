"""The stages that may follow a stage in memory: arrays over all stages say what one stage after the other says."""

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.program import HeldBytes
from meshwright.cost.work import Compute, StageWork
from meshwright.ir.layout import Layout
from meshwright.ir.mesh import Mesh
from meshwright.planner.inter_op.most_after import most_after
from meshwright.planner.inter_op.works import LayerFacts, LayerWorks

SIZES = st.integers(0, 1000)
HELD = st.builds(
    HeldBytes, parameters_bytes=SIZES, gathered_bytes=SIZES, prologue_bytes=SIZES, gradients_bytes=SIZES,
    optimizer_bytes=SIZES, buffers_bytes=SIZES, inputs_bytes=SIZES,
)  # fmt: skip
FACTS = st.builds(LayerFacts, HELD, SIZES, SIZES, st.just(0), st.just(Compute("casts", 0.0)))
STAGES = st.builds(StageWork, pieces=st.just({}), saved_bytes=SIZES, workspace_bytes=SIZES)


@given(
    st.lists(st.tuples(FACTS, STAGES), min_size=1, max_size=6),
    st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2"]),
    st.sampled_from([1, 2, 8]),
    st.floats(0, 40_000),
)
def test_every_stage_keeps_its_micro_batches_in_memory(
    layers: list[tuple[LayerFacts, StageWork]],
    schedule: Literal["gpipe", "1f1b", "zb-h1", "zb-h2"],
    microbatches: int,
    limit: float,
) -> None:
    facts, stages = tuple(fact for fact, _ in layers), tuple(stage for _, stage in layers)
    works = LayerWorks(stages, facts, {}, {}, 1.0, offloads=False, mesh=Mesh())
    layout = Layout(pp=3, schedule=schedule, microbatches=microbatches)
    counts = most_after(range(len(layers)), layout, works, limit)
    for first in range(len(layers)):
        for last in range(first, len(layers)):
            expected = after_stage(facts[first : last + 1], stages[first : last + 1], layout, limit)
            assert counts[first, last] == expected


def after_stage(
    facts: tuple[LayerFacts, ...], stages: tuple[StageWork, ...], layout: Layout, limit: float
) -> int:  # fmt: skip
    """The largest number of stages that may follow one stage of these layers."""
    held = sum(fact.held.total_bytes - fact.held.prologue_bytes - fact.held.inputs_bytes for fact in facts)
    held += max(fact.held.prologue_bytes for fact in facts) + max(fact.held.inputs_bytes for fact in facts)
    saved = sum(stage.saved_bytes for stage in stages)
    room = limit + 1 - held
    if layout.microbatches == 1:
        peak, kept = 0, 0
        for fact, stage in zip(facts, stages, strict=True):
            kept += stage.saved_bytes
            peak = fact.trained_bytes + max(peak, kept + stage.workspace_bytes)
        return -1 if room < peak else layout.pp
    room -= max(stage.workspace_bytes for stage in stages)
    alive = room // saved if saved else layout.microbatches
    needed = {"gpipe": layout.microbatches, "zb-h1": 3, "zb-h2": 5}.get(layout.schedule)
    if room < 0:
        return -1
    if needed is not None:
        return layout.pp if alive >= min(needed, layout.microbatches) else -1
    return layout.pp if alive >= layout.microbatches else int(alive - 1)
