"""The search beside all plans of small models, under the same prices. ``make bench-planning`` tries 200 cases."""

from __future__ import annotations

import msgspec
import pytest
import torch

import meshwright as mw
from benchmarks.exhaustive import gap, stages_agree
from meshwright.ir.cluster import Level
from meshwright.models import MLP, classification_loss
from meshwright.planner.inter_op.pipelines import ALIKE


@pytest.mark.parametrize("seed", [2, 3, 8, 24, 29, 36])
def test_no_plan_is_faster_than_what_the_search_finds(seed: int) -> None:
    """Seeds with two or four devices, on one level and on two, on CPUs and on GPUs: with much memory and with little,
    where two stages differ in what they do once a step, and where the last stage sends nothing back."""
    gaps = gap(seed)
    assert gaps
    for found in gaps:
        assert found.promised <= ALIKE, found
        assert found.plans > 20


def test_stages_are_those_of_brute_force_with_half_of_the_work() -> None:
    right, part = stages_agree(40)
    assert right == 40
    assert part < 0.5


def test_boxes_of_cpus_are_searched() -> None:
    """Layers are priced as stages of their own, on more ranks than the cluster has."""
    local = mw.Cluster.load("cpu-local", 2)
    level = msgspec.structs.replace(local.levels[0], fan_out=2)
    network = Level(name="network", fan_out=2, alpha_s=1e-4, beta_s_per_byte=1e-9)
    cluster = msgspec.structs.replace(local, num_devices=4, levels=(level, network), collectives=(), open_ended=False)
    with torch.device("meta"):
        batch = {"inputs": torch.zeros(8, 64), "label": torch.zeros(8, dtype=torch.int64)}
        graph = mw.capture(MLP((64, 64, 64, 8)), classification_loss, batch)
    plan = mw.plan(graph, cluster, devices=4)
    assert plan.layout.num_ranks == 4
