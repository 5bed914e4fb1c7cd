"""The search by sizes and the search by graph rank layouts alike: the first is the quick form of the second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import msgspec
import pytest
import torch
from scipy.stats import kendalltau
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import meshwright as mw
from meshwright.api import capture
from meshwright.catalog import load_cluster
from meshwright.catalog.models import make_model
from meshwright.catalog.models.hugging_face import from_config
from meshwright.cost.optimizer import ADAMW
from meshwright.cost.setup import Setup
from meshwright.ir.graph import Graph
from meshwright.ir.layout_text import layout_text
from meshwright.ir.transformer import Transformer
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.planner.by_sizes import layout_of
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.planner.search import weigh

CLUSTER = load_cluster("h100-80gb-dgx-ndr400x8", 8, "meshwright")
CLUSTER = msgspec.structs.replace(
    CLUSTER, software=msgspec.structs.replace(CLUSTER.software, optimizer_bytes=2.0 * ADAMW.fused_moved)
)
"""The models have parameters and moments of 16 bits; by sizes, moments and copies would have 32."""
BATCH, SEQUENCE, LAYERS = 32, 1024, 2
LLAMA: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": LAYERS,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": SEQUENCE, "use_cache": False,
}  # fmt: skip
DENSE = (
    mw.Layout(dp=8),
    mw.Layout(dp=8, zero=1),
    mw.Layout(dp=8, zero=3),
    mw.Layout(dp=8, microbatches=4),
    mw.Layout(dp=4, tp=2),
    mw.Layout(tp=8),
    mw.Layout(dp=4, pp=2, microbatches=4),
    mw.Layout(tp=4, pp=2, microbatches=8),
)
EXPERTS = (
    mw.Layout(dp=8),
    mw.Layout(dp=8, zero=1),
    mw.Layout(dp=8, ep=2),
    mw.Layout(dp=8, ep=8),
    mw.Layout(dp=2, tp=4),
    mw.Layout(dp=4, pp=2, microbatches=4),
    mw.Layout(dp=4, pp=2, ep=4, microbatches=4),
)


def of_tokens(make: Callable[[], nn.Module], loss_fn: Any, names: tuple[str, str]) -> Graph:
    """The step of a bfloat16 model that reads tokens and their labels, on the meta device."""
    with torch.device("meta"):
        model, tokens = make().to(torch.bfloat16), torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    return capture(model, loss_fn, dict.fromkeys(names, tokens))


def gpt() -> tuple[Graph, Transformer]:
    config = GPTConfig(layers=LAYERS, width=2048, heads=16, vocabulary=8192, sequence_length=SEQUENCE)
    sizes = {"layers": LAYERS, "hidden": 2048, "heads": 16, "vocabulary": 8192, "sequence": SEQUENCE}
    graph = of_tokens(lambda: GPT(config), language_model_loss, ("tokens", "targets"))
    return graph, make_model("gpt", dropout=False, **sizes)


def hugging_face(config: Any, kind: Callable[[Any], nn.Module]) -> tuple[Graph, Transformer]:
    graph = of_tokens(lambda: kind(config), lambda model, given: model(**given).loss, ("input_ids", "labels"))
    return graph, msgspec.structs.replace(from_config(config.to_dict()), sequence=SEQUENCE)


MODELS: dict[str, Callable[[], tuple[Graph, Transformer]]] = {
    "gpt": gpt,
    "llama": lambda: hugging_face(LlamaConfig(**LLAMA), LlamaForCausalLM),
    "mixtral": lambda: hugging_face(
        MixtralConfig(**LLAMA, num_local_experts=8, num_experts_per_tok=2), MixtralForCausalLM
    ),
}


def setups_of(layout: mw.Layout, model: Transformer) -> Iterator[Setup]:
    """The setups that a layout of a graph stands for. Over tp, the integer program may split the sequence."""
    assert isinstance(layout.tp, int)
    for between in (False, True) if layout.tp > 1 else (False,):
        yield Setup(
            model=model, dp=layout.dp, tp=layout.tp, pp=layout.pp, ep=layout.ep, global_batch=BATCH,
            micro_batch=BATCH // layout.dp // layout.microbatches, recompute=layout.recompute, zero=layout.zero,
            sequence_parallel=between,
        )  # fmt: skip


def by_graph_s(graph: Graph, layout: mw.Layout, lower: PlanLowering) -> float:
    plan = plan_layout(graph, layout, world_size=8, cluster=CLUSTER, ask=Ask(explains=False, lower=lower))
    return foretell(lower, plan, CLUSTER).played.step_s


@pytest.mark.parametrize(
    ("name", "layouts", "agreement", "winner"),
    [("gpt", DENSE, 0.9, 1.05), ("llama", DENSE, 0.9, 1.05), ("mixtral", EXPERTS, 0.5, 1.25)],
)
def test_both_fidelities_rank_layouts_alike(
    name: str, layouts: tuple[mw.Layout, ...], agreement: float, winner: float
) -> None:
    """Kendall's tau, the pairs that are clearly different, and the price of taking the winner by sizes. The page
    docs/predictor.md has the measured values."""
    graph, model = MODELS[name]()
    assert graph.num_parameters() == model.parameters
    lower, graph_s, sizes_s = PlanLowering(graph), dict[str, float](), dict[str, float]()
    for layout in layouts:
        setups = list(setups_of(layout, model))
        assert all(layout_of(setup) == layout for setup in setups)
        graph_s[layout_text(layout)] = by_graph_s(graph, layout, lower)
        sizes_s[layout_text(layout)] = min(weigh(setup, CLUSTER).step_s for setup in setups)
    print(name, {text: (round(1e3 * graph_s[text], 2), round(1e3 * sizes_s[text], 2)) for text in graph_s})
    assert kendalltau(list(graph_s.values()), list(sizes_s.values())).statistic >= agreement
    for first, second in combinations(graph_s, 2):
        ratios = graph_s[first] / graph_s[second], sizes_s[first] / sizes_s[second]
        clear = all(max(ratio, 1 / ratio) > 1.2 for ratio in ratios)
        assert not clear or (ratios[0] > 1) == (ratios[1] > 1), (first, second, ratios)
    assert graph_s[min(sizes_s, key=lambda text: sizes_s[text])] <= winner * min(graph_s.values())
    assert all(0.65 < sizes_s[text] / graph_s[text] < 1.25 for text in graph_s)
