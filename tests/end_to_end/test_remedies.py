"""What makes a layout of a captured model fit: changes of the layout, more devices and a smaller batch, each with its
price."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import meshwright as mw
from meshwright.catalog import load_cluster
from meshwright.cost.optimizer import ADAMW
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.planner.compare import MOST_LARGER, changes_that_fit
from meshwright.planner.explicit import Ask, plan_layout
from meshwright.planner.foretell import Foretold, foretell
from meshwright.planner.remedy import Change

pytestmark = pytest.mark.usefixtures("without_workers")

A100, BATCH = "a100-80gb-dgx-hdr200x8", 16
LAYOUT = mw.Layout(dp=2)


@cache
def gpt(batch_size: int = BATCH) -> Graph:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=2, width=64, heads=4, vocabulary=64, sequence_length=32))
        tokens = torch.zeros(batch_size, 32, dtype=torch.int64)
    return mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


def foretold(graph: Graph, layout: mw.Layout, devices: int) -> Foretold:
    cluster, lower = load_cluster(A100, devices), PlanLowering(graph)
    plan = plan_layout(graph, layout, world_size=devices, cluster=cluster, ask=Ask(lower=lower, explains=False))
    return foretell(lower, plan, cluster)


def changes(part: float, cluster: Cluster, **options: object) -> tuple[float, tuple[Change, ...]]:
    """The memory limit, which is a part of the memory that the layout needs, and the changes that fit in it."""
    limit = part * foretold(gpt(), LAYOUT, 2).peak.peak_bytes
    return limit, changes_that_fit(gpt(), LAYOUT, cluster, PlanLowering, memory_bytes=limit, optimizer=ADAMW, **options)  # type: ignore[arg-type]


def test_more_devices_and_a_smaller_batch_are_named_with_their_price() -> None:
    limit, remedies = changes(0.7, load_cluster(A100, 2), graph_of=gpt)
    assert all(change.peak_bytes <= limit for change in remedies)
    assert [change.sample_device_s for change in remedies] == sorted(change.sample_device_s for change in remedies)
    (smaller,) = [change for change in remedies if change.text.startswith("batch_size = ")]
    size = int(smaller.text.rpartition(" ")[2])
    assert 2 <= size < BATCH
    alone = foretold(gpt(size), LAYOUT, 2)
    assert alone.peak.peak_bytes <= limit
    assert smaller.step_s == pytest.approx(alone.played.step_s, rel=0.05)
    assert smaller.sample_device_s == pytest.approx(2 * smaller.step_s / size)
    larger = [change for change in remedies if change.text.endswith(" ranks)")]
    assert 1 <= len(larger) <= MOST_LARGER
    for change in larger:
        devices = int(change.text.rpartition("(")[2].split()[0])
        assert devices in (4, 8)
        assert change.sample_device_s == pytest.approx(devices * change.step_s / BATCH)


def test_a_cluster_that_is_full_offers_no_more_devices() -> None:
    full = load_cluster("cpu-local", 2)
    _, remedies = changes(0.7, Cluster(name="two", num_devices=2, device=full.device, levels=full.levels))
    assert remedies, "changes of the layout remain"
    assert not [change for change in remedies if "ranks" in change.text or "batch_size" in change.text]


def test_where_no_batch_is_small_enough_none_is_named() -> None:
    _, remedies = changes(0.05, load_cluster(A100, 2), graph_of=gpt)
    assert not [change for change in remedies if change.text.startswith("batch_size")]
