"""Repeats the evaluation of Alpa with captured models: GPT, mixtures of experts and Wide-ResNet on up to 64 V100
GPUs."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from meshwright.api.gshard import MoE, MoEConfig
from meshwright.api.plans import capture
from meshwright.catalog import load_cluster
from meshwright.cost.optimizer import OptimizerCost
from meshwright.errors import LayoutError
from meshwright.garbage import nothing_collected
from meshwright.ir.graph import Graph
from meshwright.ir.layout_text import layout_text
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, WideResNet, classification_loss, language_model_loss
from meshwright.planner.layout_search import Search
from meshwright.planner.time_limit import TimeLimit
from meshwright.worked import SEARCHED, Worked, alpa
from meshwright.worked.alpa import AlpaPair, Compared, Kind, PlannerResult

Say = Callable[[str], None]
_ORDER: tuple[Kind, ...] = ("both", "manual", "intra", "inter")
"""The joint search comes first, because the other searches reuse its prices of layers."""


def recompute_alpa(name: str, pairs: Sequence[AlpaPair] | None = None, began: Say = lambda what: None) -> Worked:
    """Compare predicted with published throughput of Alpa's four planners, for each pair of a model and a number of
    devices.

    ``name``: a name in ``worked.SEARCHED``. ``pairs``: the pairs to compare; by default all pairs of ``name``.
    ``began`` is called with each pair, and with each layout that a search weighs. A pair takes seconds on one device
    and many minutes on 64 devices.
    """
    chosen = alpa.pairs_of(SEARCHED[name]) if pairs is None else pairs
    results = [planned_pair(pair, began) for pair in chosen]
    about = "Alpa's own search against manual, intra-operator and inter-operator planning, in TFLOP/s for each V100."
    return Worked(id=name, about=about, lines=tuple(alpa.lines_of(results)))


@nothing_collected()
def planned_pair(pair: AlpaPair, began: Say = lambda what: None) -> Compared:
    """The plans that the four planners make for one pair."""
    cluster = load_cluster(alpa.CLUSTER, pair.devices).without_graphs()  # the published systems have none
    limit = alpa.MEMORY * cluster.device.memory_bytes
    graph = captured(pair)
    clock = TimeLimit(None, lambda what: began(f"{pair.title}: {what}"))
    shared: dict[OptimizerCost, Search] = {}  # searches with equal optimizers share the prices of layers
    results: dict[Kind, PlannerResult] = {}
    for kind in _ORDER:
        optimizer = alpa.optimizer_of(pair.family, kind)
        if optimizer not in shared:  # the "inter" search needs the largest number of layers
            shared[optimizer] = Search(
                graph, pair.devices, cluster, PlanLowering, optimizer, False, limit, "inter", False, clock,
                memory_bytes=limit,
            )  # fmt: skip
        search = shared[optimizer].within(*alpa.space_of(pair.family, kind))
        try:
            search.run()
            plan = search.best()
        except LayoutError as error:
            results[kind] = PlannerResult(problem=error.problem)
            continue
        finally:
            search.prices.close()
        assert plan.prediction is not None
        results[kind] = PlannerResult(layout=layout_text(plan.layout), step_s=plan.prediction.step_s)
    return Compared(pair, results)


def captured(pair: AlpaPair) -> Graph:
    """The training step of a pair's model on a global batch, on the meta device."""
    model = model_of(pair)
    with torch.device("meta"):
        if pair.family == "wresnet":
            labels = torch.zeros(pair.batch, dtype=torch.int64)
            images = {"image": torch.zeros(pair.batch, 3, 224, 224), "label": labels}
            return capture(model, classification_loss, images)
        tokens = torch.zeros(pair.batch, alpa.SEQUENCE, dtype=torch.int64)
        return capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


def model_of(pair: AlpaPair) -> nn.Module:
    """The model of a pair on the meta device, as in Alpa's evaluation. GPT and mixtures of experts use float16,
    attention that stores its scores, and an output layer that is not tied to the embedding. Wide-ResNet uses
    float32."""
    layers, width, heads, experts, widened = pair.sizes
    vocabulary = alpa.VOCABULARY[pair.family]
    with torch.device("meta"):
        if pair.family == "wresnet":
            blocks = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}[layers]
            return WideResNet(blocks, width=width, widened=widened, classes=1024, reduced=1)
        if pair.family == "moe":
            sizes = MoEConfig(layers, width, heads, experts, vocabulary, alpa.SEQUENCE, alpa.GROUP)
            return MoE(sizes).to(torch.float16)
        config = GPTConfig(
            layers=layers, width=width, heads=heads, vocabulary=vocabulary, sequence_length=alpa.SEQUENCE,
            tied_head=False, writes_scores=True,
        )  # fmt: skip
        return GPT(config).to(torch.float16)
