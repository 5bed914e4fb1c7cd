"""When a link becomes slower within a run, all ranks take another algorithm from the same step on, and say so."""

from __future__ import annotations

import logging
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright.comm.backend  # noqa: F401 - gives the collective operators their kernels
from meshwright.comm import groups, watch
from meshwright.comm.collectives import Collectives
from meshwright.comm.groups import axis_groups, from_every_rank, look_at_links
from meshwright.comm.watch import Switch
from meshwright.ir.mesh import AxisGroup, Mesh
from meshwright.ops import collectives
from meshwright.runtime.emulated_network import LINK, limit, run_in_boxes
from tests.distributed.pool import Ranks

EVERY = 4


class Told(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(group: AxisGroup, num: int, steps: int, patch: pytest.MonkeyPatch, change: Any) -> tuple[list[Switch], Any]:
    """The switches, and what was logged, of so many steps with an all-reduce each; ``change`` is called after 8."""
    patch.setattr(watch, "EVERY", EVERY)
    patch.setattr(watch, "LEAST_S", 0.15)  # others use the machine too
    told = Told()
    watch.log.addHandler(told)
    found: list[Switch] = []
    for step in range(1, steps + 1):
        value = torch.full((num,), float(group.index + 1))
        value = collectives.WAIT(collectives.ALL_REDUCE(value, "sum", group.name, group.algorithm))
        assert torch.equal(value, torch.full((num,), float(sum(range(1, group.size + 1)))))
        found += look_at_links(step, [group])
        if step == 8:
            change()
    watch.log.removeHandler(told)
    return found, told.lines


def slowed() -> tuple[list[Switch], list[str], str]:
    """A ring that waits 0.3 s from step 9 on, between ranks of which two and two shall be a box."""
    rank, usual, slow = dist.get_rank(), Collectives.all_reduce, False
    group = axis_groups(Mesh.of(dp=4), rank, {"dp": "ring"})["dp"]
    ranks = groups.process_group(group.name)
    assert groups.member(ranks).watch is None, "one box"

    def all_reduce(self: Collectives, value: Any, op: str, algorithm: str, label: str) -> Any:
        if slow and algorithm == "ring":
            time.sleep(0.3)
        return usual(self, value, op, algorithm, label)

    def change() -> None:
        nonlocal slow
        slow = True

    with pytest.MonkeyPatch.context() as patch:
        looks = watch.Watch(ranks, ((0, 1), (2, 3)), lambda *given: groups.started(ranks, *given))
        patch.setattr(groups.member(ranks), "watch", looks)
        patch.setattr(Collectives, "all_reduce", all_reduce)
        found, told = run(group, 1000, 20, patch, change)
        return found, told, looks.algorithm("ring", "all_reduce", 4000)


def test_all_ranks_switch_at_the_same_step(ranks: Ranks) -> None:
    each = ranks(4, slowed)
    assert all(found == each[0][0] for found, _, _ in each)
    ((step, key, before, after, *_),) = each[0][0]
    assert (step, key, before) == (17, ("all_reduce", 4000), "ring")
    assert after != "ring"
    assert {name for _, _, name in each} == {after}
    assert [len(told) for _, told, _ in each] == [1, 0, 0, 0], "rank 0 says it"
    assert "axis dp: all_reduce of 4000 bytes took 3" in each[0][1][0]
    assert f"from step 17 on by {after}" in each[0][1][0]


def narrowed(rate_bits_per_s: float) -> tuple[list[list[Switch]], list[str]]:
    """Every box's link becomes as slow as that after step 8; the switches by rank, and what rank 0 logged."""
    rank = dist.get_rank()
    group = axis_groups(Mesh.of(dp=4), rank, {"dp": "butterfly"})["dp"]

    def change() -> None:
        dist.barrier()
        if rank % 2 == 0:
            subprocess.run(limit(LINK, rate_bits_per_s).split(), check=True)
        dist.barrier()

    with pytest.MonkeyPatch.context() as patch:
        found, told = run(group, 2**17, 16, patch, change)
    return from_every_rank(found), told


@pytest.mark.usefixtures("networks")
def test_a_link_that_becomes_slower_makes_ranks_go_along_levels(tmp_path: Path) -> None:
    """Two boxes of two, where a butterfly sends the whole vector of every rank over the link."""
    each, told = run_in_boxes(narrowed, 2e7, boxes=(0, 0, 1, 1), rates_bits_per_s=(1e9, 1e9), directory=tmp_path)
    assert all(found == each[0] for found in each)
    (switch,) = each[0]
    assert (switch.step, switch.before) == (17, "butterfly")
    assert "@2x2" in switch.after
    assert told == [f"axis dp: {switch}"]
