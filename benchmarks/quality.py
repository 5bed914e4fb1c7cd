"""Is "auto" ever worse than what one would lay out by hand? Under the cost model, on one box, 8 boxes and slow links.

A part of ``make bench-models`` (``python -m benchmarks.models --only quality``). By hand: the batch over all ranks; or
columns, then rows over tensor-parallel ranks as Megatron-LM has it, with and without sequence parallelism, and with the
vocabulary split where that pays, the batch over the others. "auto" does not know these. Nothing is measured: steps are
simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout_text import layout_text
from meshwright.ir.result import Check, Finding
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.planner.auto import plan_auto
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import foretell
from meshwright.planner.inter_op.pipelines import ALIKE


@dataclass(frozen=True)
class ClusterPlace:
    """Where a model is to be trained."""

    cluster: str
    num_ranks: int


PLACES: Mapping[str, ClusterPlace] = {
    "one box": ClusterPlace("a100-80gb-dgx", 8),
    "8 boxes": ClusterPlace("a100-80gb-dgx-hdr200x8", 64),
    "slow links": ClusterPlace("v100-16gb-p3-eth25", 16),
}


def gpt(batch_size: int, *, tied: bool = True) -> Graph:
    """Two layers of a GPT of 2,048 features and 32,768 words."""
    config = GPTConfig(layers=2, width=2048, heads=16, vocabulary=32768, sequence_length=1024, tied_head=tied)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(batch_size, config.sequence_length, dtype=torch.int64)
    return mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


def llama(batch_size: int) -> Graph:
    """Two layers of Llama-3-8B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(batch_size, 1024, dtype=torch.int64)
    return mw.capture(model, lambda model, batch: model(**batch).loss, {"input_ids": tokens, "labels": tokens})


MODELS: Mapping[str, Callable[[int], Graph]] = {"GPT": gpt, "Llama-3-8B, 2 layers": llama}


def by_hand(num_ranks: int) -> Iterator[mw.Layout]:
    """What one would try."""
    tp = 1
    while tp <= num_ranks:
        yield mw.Layout(dp=num_ranks // tp, tp=tp)
        if tp > 1:
            yield mw.Layout(dp=num_ranks // tp, tp=tp, sequence_parallel=True)
        tp *= 2


def hand_steps(graph: Graph, cluster: Cluster, num_ranks: int) -> dict[str, float]:
    """Simulated seconds of a step by layout; those that do not fit the model are left out."""
    by_layout = {}
    for layout in by_hand(num_ranks):
        try:
            ask = Ask(explains=False, by_rule=True, lower=PlanLowering(graph), fits_buckets=False)
            plan = plan_layout(graph, layout, world_size=num_ranks, cluster=cluster, ask=ask)
        except MeshwrightError:
            continue
        by_layout[layout_text(layout)] = foretell(PlanLowering(graph), plan, cluster).played.step_s
    return by_layout


def compared(name: str, graph: Graph, cluster: Cluster, num_ranks: int) -> Check:
    """One model in one place."""
    plan = plan_auto(graph, num_ranks, cluster, PlanLowering, only="intra")
    assert plan.prediction is not None
    hand = hand_steps(graph, cluster, num_ranks)
    best = min(hand, key=hand.__getitem__)
    worse = plan.prediction.step_s / hand[best] - 1
    return Check(
        target=f'{name}: by the cost model, "auto" is no worse than the best layout by hand',
        verdict="pass" if worse <= 0 else "fail",
        measured=f"{worse:+.1%}: {layout_text(plan.layout)}; by hand {best}",
        passed=int(worse <= 0),
        total=1,
        notes={"slower": worse, "alike": ALIKE, "by hand": hand},
    )


def findings(only: str = "") -> Iterator[Finding]:
    """Every model in every place."""
    for place_name, place in PLACES.items():
        for model_name, make in MODELS.items():
            name = f"{model_name}, {place_name}"
            if only in name:
                cluster = mw.Cluster.load(place.cluster, place.num_ranks)
                yield compared(name, make(place.num_ranks), cluster, place.num_ranks)
