"""A stage that differs from another only in names has the program that lowering it would make."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import meshwright as mw
from meshwright.capture.builder import capture
from meshwright.catalog import load_cluster
from meshwright.errors import MeshwrightError
from meshwright.ir.graph import Graph
from meshwright.ir.plan import Note, Plan
from meshwright.ir.program import Program
from meshwright.lower import plans
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.planner import explicit
from meshwright.planner.explicit import Ask, plan_layout

CLUSTER = load_cluster("h100-80gb-dgx-ndr400x8", 16)
LAYERS, BATCH, SEQUENCE, WIDTH, VOCABULARY = 8, 16, 16, 32, 64


def gpt() -> nn.Module:
    return GPT(
        GPTConfig(layers=LAYERS, width=WIDTH, heads=4, vocabulary=VOCABULARY, sequence_length=SEQUENCE, dropout=0.1)
    )


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_ff=64, d_kv=8, num_heads=4, num_layers=4, num_decoder_layers=4,
            decoder_start_token_id=0, pad_token_id=0, use_cache=False,
        )
    ),
}  # fmt: skip


class Spaced(nn.Module):
    """A model whose layers have names with spaces and commas."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({f"layer {number}, to": nn.Linear(WIDTH, WIDTH) for number in range(LAYERS)})
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.embedding(tokens)
        for layer in self.layers.values():
            value = nn.functional.gelu(layer(value))
        result: Tensor = self.head(value)
        return result


MODELS["spaced"] = Spaced


@cache
def graph_of(model: str) -> Graph:
    with torch.device("meta"):
        net, tokens = MODELS[model](), torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    if model in ("gpt", "spaced"):
        return capture(net, language_model_loss, {"tokens": tokens, "targets": tokens}).graph
    return capture(net, lambda net, given: net(**given).loss, {"input_ids": tokens, "labels": tokens}).graph


def plan_of(model: str, layout: mw.Layout) -> Plan:
    graph = graph_of(model)
    return plan_layout(graph, layout, world_size=16, cluster=CLUSTER, ask=Ask(lower=PlanLowering(graph)))


def programs_of(model: str, plan: Plan, *, each: bool) -> tuple[tuple[Program, ...], int]:
    """The programs of a plan, and the number of stages that were lowered. With ``each``, all stages are lowered."""
    lowered = []

    class Counted(PlanLowering):
        def _lowered(self, *given: Any) -> list[Program]:
            lowered.append(given)
            return super()._lowered(*given)

    with pytest.MonkeyPatch.context() as patch:
        if each:
            patch.setattr(plans, "stage_key", lambda *given: None)
        return Counted(graph_of(model))(plan), len(lowered)


@pytest.mark.parametrize(
    ("model", "layout", "most"),
    [
        ("gpt", mw.Layout(dp=2, pp=8, microbatches=8), 3),
        ("spaced", mw.Layout(dp=2, pp=8, microbatches=8), 5),
        ("spaced", mw.Layout(dp=2, pp=8, microbatches=8, zero=1), 5),
        ("gpt", mw.Layout(dp=2, tp=2, pp=4, microbatches=8, schedule="interleaved", chunks=2, zero=1), 3),
        ("llama", mw.Layout(tp=2, pp=8, microbatches=8, sequence_parallel=True), 3),
        ("llama", mw.Layout(dp=2, pp=8, microbatches=4, zero=3, recompute="full"), 3),
        ("mixtral", mw.Layout(dp=2, pp=8, microbatches=4), 3),
        ("mixtral", mw.Layout(stage_sizes=({"dp": 4}, *({"tp": 2} for _ in range(6))), pp=7, microbatches=4), 5),
    ],
)
def test_stages_of_equal_layers_are_lowered_once(model: str, layout: mw.Layout, most: int) -> None:
    plan = plan_of(model, layout)
    shared, lowered = programs_of(model, plan, each=False)
    assert shared == programs_of(model, plan, each=True)[0]
    assert lowered <= most


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(st.data())
def test_every_stage_has_the_program_that_lowering_it_makes(data: st.DataObject) -> None:
    """Random layouts of models with dropout, experts and two stacks, and plans whose stages recompute differently."""
    model = data.draw(st.sampled_from(sorted(MODELS)))
    pp, tp = data.draw(st.sampled_from([(4, 1), (4, 2), (4, 4), (8, 1), (8, 2)]))
    schedules: list[tuple[Any, int]] = [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)]
    schedule, chunks = data.draw(st.sampled_from(schedules))
    layout = mw.Layout(
        dp=16 // (pp * tp), tp=tp, pp=pp, schedule=schedule, chunks=chunks,
        microbatches=data.draw(st.sampled_from([8, 16])), zero=data.draw(st.sampled_from([0, 1, 2, 3])),
        sequence_parallel=tp > 1 and data.draw(st.booleans()),
        recompute=data.draw(st.sampled_from(["none", "selective", "full"])),
    )  # fmt: skip
    try:
        plan = plan_of(model, layout)
    except MeshwrightError:
        reject()
    assert programs_of(model, plan, each=False)[0] == programs_of(model, plan, each=True)[0]
    blocks = st.sampled_from([(), ("blocks.*",), ("model.layers.3", "encoder.block.1")])
    stages = tuple(msgspec.structs.replace(stage, recompute=data.draw(blocks)) for stage in plan.stages)
    other = msgspec.structs.replace(plan, stages=stages, prefetch=data.draw(st.integers(0, 3)))
    assert programs_of(model, other, each=False)[0] == programs_of(model, other, each=True)[0]


def test_notes_on_products_name_the_ranks_that_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan serves the last two pipeline ranks; only the last one holds the head."""

    def with_note(lower: object, plan: Plan, *others: object) -> Plan:
        noted = (Note(module=f"head{suffix}", split="in 4 pieces", reason="") for suffix in ("", " (backward)"))
        return msgspec.structs.replace(plan, notes=(*plan.notes, *noted)) if plan.mesh.size("tp") > 1 else plan

    monkeypatch.setattr(explicit, "with_pieces", with_note)
    layout = mw.Layout(stage_sizes=({"dp": 4}, {"tp": 4}, {"tp": 4}), pp=3, microbatches=4)
    graph = graph_of("gpt")
    plan = plan_layout(graph, layout, world_size=12, cluster=CLUSTER, ask=Ask(lower=PlanLowering(graph)))
    notes = [note.module for note in plan.notes if note.split == "in 4 pieces"]
    assert notes == ["pp rank 2: head", "pp rank 2: head (backward)"]
