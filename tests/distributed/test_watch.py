"""When a link becomes slower within a run, all ranks take another algorithm from the same step on, and say so."""

from __future__ import annotations

import logging
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
import meshwright.comm.backend
from meshwright.comm import groups, watch
from meshwright.comm.collectives import Collectives
from meshwright.comm.groups import axis_groups, from_every_rank, look_at_links
from meshwright.comm.watch import Switch, Watch
from meshwright.emulation.network import LINK, limit, run_in_boxes
from meshwright.ir.amendment import Amendment
from meshwright.ir.mesh import AxisGroup, Mesh
from meshwright.ir.plan import Plan
from meshwright.ops import collectives
from tests.distributed import oracle
from tests.distributed.pool import Ranks

EVERY = 4


class KeptLines(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(group: AxisGroup, num: int, steps: int, patch: pytest.MonkeyPatch, change: Any) -> tuple[list[Amendment], Any]:
    """The switches, and what was logged, of so many steps with an all-reduce each; ``change`` is called after 8."""
    patch.setattr(watch, "EVERY", EVERY)
    patch.setattr(watch, "LEAST_S", 0.15)  # others use the machine too
    handler = KeptLines()
    watch.log.addHandler(handler)
    switches: list[Amendment] = []
    for step in range(1, steps + 1):
        value = torch.full((num,), float(group.index + 1))
        value = collectives.WAIT(collectives.ALL_REDUCE(value, "sum", group.name, group.algorithm))
        assert torch.equal(value, torch.full((num,), float(sum(range(1, group.size + 1)))))
        switches += look_at_links(step, {"dp": group})
        if step == 8:
            change()
    watch.log.removeHandler(handler)
    return switches, handler.lines


def slowed() -> tuple[list[Amendment], list[str], str]:
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
        patch.setattr(groups.member(ranks), "has_links", True)
        patch.setattr(Collectives, "all_reduce", all_reduce)
        switches, lines = run(group, 1000, 20, patch, change)
        return switches, lines, looks.algorithm("ring", "all_reduce", 4000)


def test_all_ranks_switch_at_the_same_step(ranks: Ranks) -> None:
    each = ranks(4, slowed)
    assert all(switches == each[0][0] for switches, _, _ in each)
    (change,) = each[0][0]
    assert (change.step, change.operation, change.num_bytes) == (17, "all_reduce", 4000)
    assert (change.axis, change.ranks) == ("dp", (0, 1, 2, 3))
    assert change.algorithm != "ring"
    assert {name for _, _, name in each} == {change.algorithm}
    assert [len(lines) for _, lines, _ in each] == [1, 0, 0, 0], "rank 0 says it"
    assert "axis dp: all_reduce of 4000 bytes took 3" in each[0][1][0]
    assert f"from step 17 on by {change.algorithm}" in each[0][1][0]


def narrowed(rate_bits_per_s: float) -> tuple[list[list[Amendment]], list[str]]:
    """Every box's link becomes as slow as that after step 8; the switches by rank, and what rank 0 logged."""
    rank = dist.get_rank()
    group = axis_groups(Mesh.of(dp=4), rank, {"dp": "butterfly"})["dp"]

    def change() -> None:
        dist.barrier()
        if rank % 2 == 0:
            subprocess.run(limit(LINK, rate_bits_per_s).split(), check=True)
        dist.barrier()

    with pytest.MonkeyPatch.context() as patch:
        switches, lines = run(group, 2**17, 16, patch, change)
    return from_every_rank(switches), lines


@pytest.mark.usefixtures("networks")
def test_a_link_that_becomes_slower_makes_ranks_go_along_levels(tmp_path: Path) -> None:
    """Two boxes of two, where a butterfly sends the whole vector of every rank over the link."""
    each, lines = run_in_boxes(narrowed, 2e7, boxes=(0, 0, 1, 1), rates_bits_per_s=(1e9, 1e9), directory=tmp_path)
    assert all(switches == each[0] for switches in each)
    (change,) = each[0]
    assert change.step == 17
    assert "@2x2" in change.algorithm
    (line,) = lines
    assert line.startswith("axis dp: all_reduce of 0.5 MiB took ")
    assert f"from step 17 on by {change.algorithm}" in line
    assert line.endswith("instead of butterfly")


# --- a run that is resumed -------------------------------------------------------------------------------------------

SWITCH, SAVE, STEPS = 3, 4, 7


def all_slower(looks: Watch, step: int) -> tuple[Switch, ...]:
    """As if every collective had become slower at the look after step ``SWITCH``."""
    if step != SWITCH + 1:
        return ()
    looks._usual |= dict.fromkeys(looks._names, 1.0)
    return tuple(looks._again(step, key, 1.0, 2.0) for key in sorted(looks._names))


class Ran(msgspec.Struct):
    """What a run did: losses by step, parameters, the plan, and the digests of its steps' traces."""

    losses: dict[int, float]
    parameters: dict[str, Tensor]
    plan: Plan
    digests: dict[int, str]


def run_by(algorithm: str, directory: Path, begins: str, ends: int, slows: bool) -> Ran:
    """Train on two boxes of two from a checkpoint, or from the beginning; save after step ``SAVE``."""
    torch.manual_seed(0)
    subject = oracle.gpt(True, layers=1)
    subject.model.float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "boxes_of", lambda group: ((0, 1), (2, 3)))
        patch.setattr(watch, "EVERY", 1)
        patch.setattr(Watch, "look", all_slower if slows else lambda looks, step: ())
        patch.setattr(Watch, "_measured", lambda looks, key: {"ring": 2.0, "butterfly": 1.0})

        def make_trainer(plan: mw.Layout | Plan) -> mw.Trainer:
            return mw.parallelize(
                subject.model, subject.loss_fn, subject.batches[0], plan=plan,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            )  # fmt: skip

        plan = make_trainer(mw.Layout(dp=4)).plan
        buckets = tuple(msgspec.structs.replace(bucket, algorithm=algorithm) for bucket in plan.buckets)
        trainer = make_trainer(msgspec.structs.replace(plan, algorithms={"dp": algorithm}, buckets=buckets))
        if begins:
            trainer.load(directory / begins)
        losses, digests = {}, {}
        while trainer.step_number < ends:
            batch = subject.batches[trainer.step_number % len(subject.batches)]
            losses[trainer.step_number] = float(trainer.step(batch))
            digests[trainer.step_number] = trainer.trace().plan
            if trainer.step_number == SAVE and not begins:
                trainer.save(directory / "ckpt")
        return Ran(losses, trainer.full_state_dict(all_ranks=True), trainer.plan, digests)


def test_a_resumed_run_goes_on_by_the_amended_plan_bit_by_bit(ranks: Ranks, tmp_path: Path) -> None:
    whole, *others = ranks(4, run_by, "ring", tmp_path, "", STEPS, True)
    assert whole.plan.amendments
    assert {
        (amendment.step, amendment.axis, amendment.ranks, amendment.algorithm) for amendment in whole.plan.amendments
    } == {(SWITCH + 1, "dp", (0, 1, 2, 3), "butterfly")}
    assert all(other.plan == whole.plan for other in others)
    base = msgspec.structs.replace(whole.plan, amendments=())
    assert base.digest != whole.plan.digest
    assert whole.digests == {step: (base if step <= SWITCH else whole.plan).digest for step in range(1, STEPS + 1)}
    assert f"amended: {whole.plan.amendments[0]}" in whole.plan.explain()

    resumed = ranks(4, run_by, "ring", tmp_path, "ckpt", STEPS, False)[0]
    assert resumed.plan == whole.plan
    assert resumed.losses == {step: whole.losses[step] for step in range(SAVE + 1, STEPS + 1)}
    assert all(torch.equal(value, whole.parameters[name]) for name, value in resumed.parameters.items())

    unchanged = ranks(4, run_by, "ring", tmp_path / "unchanged", "", STEPS, False)[0]
    assert not unchanged.plan.amendments
    assert any(not torch.equal(value, whole.parameters[name]) for name, value in unchanged.parameters.items())


def test_another_plan_does_not_take_amendments_over(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, run_by, "ring", tmp_path, "", SAVE, True)
    assert not ranks(4, run_by, "butterfly", tmp_path, "ckpt", SAVE + 1, False)[0].plan.amendments
