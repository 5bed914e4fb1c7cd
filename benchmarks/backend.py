"""Is the backend "meshwright" faster than gloo under PyTorch's own trainers? Beside gloo: pass or fail.

Run as ``make bench-backend``. The exit code is 1 if a target is missed. Both backends carry the same program in the
same processes, by turns, with one thread a rank.

trainers   GPT-S in float32 under DistributedDataParallel, FSDP2 (``fully_shard``) and ``parallelize_module``: a step of
           zero_grad, forward, loss, backward and SGD with momentum 0.9. Losses must be equal.
calls      All-reduce, all-gather, reduce-scatter and all-to-all of 4 B to 64 MiB a rank, float32, as a program calls
           torch.distributed: from when all ranks have met until the slowest is done, divided by the calls of a round.
stress     4 ranks run 10,000 random collectives on 5 groups from a thread each, in other orders on each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import peers, report
from benchmarks.foundation import BATCH, over, sgd, text_batches
from benchmarks.report import decided, judged
from meshwright.bench.repeat import alternate
from meshwright.comm.process_group.identity import NAME
from meshwright.comm.process_group.registration import register
from meshwright.ir.result import Check, Finding, Settings
from meshwright.models import gpt_s, language_model_loss
from tests.distributed import oracle
from tests.distributed.backend_stress import members, stress
from tests.distributed.pool import Ranks

COMMAND = "make bench-backend"
OURS, GLOO = NAME, "gloo"
ROUNDS, STEPS = 31, 3
LOSS_SPREAD = 1e-6
TRAINERS: Mapping[str, float] = {"DDP": 0.97, "FSDP2": 0.9, "tensor parallel": 0.75}
"""The most that a step may take, as a multiple of gloo's."""
SIZES = (4, 2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24, 2**26)
"""Bytes of a rank's tensor."""
CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ROUND_BYTES, MOST_CALLS = 2**25, 200
"""A round makes as many calls as move so many bytes, at most ``MOST_CALLS``."""
STRESS_RANKS, STRESS_CALLS, STRESS_GROUPS = 4, 10_000, 5


def groups() -> dict[str, Any]:
    """A group of each backend."""
    register()
    torch.set_num_threads(1)
    return {OURS: dist.new_group(backend=NAME), GLOO: dist.new_group(backend="gloo")}


# --- trainers --------------------------------------------------------------------------------------------------------


def trained(trainer: str, rounds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of a step and first losses, by backend."""
    sides, size, rank = {}, dist.get_world_size(), dist.get_rank()
    for name, group in groups().items():
        torch.manual_seed(0)
        model = gpt_s()
        batches = text_batches(model)
        parts = [list(oracle.shards(batch, size))[rank] for batch in batches]
        if trainer == "DDP":
            sides[name] = over(peers.data_parallel(model, sgd, language_model_loss, process_group=group), parts)
        elif trainer == "FSDP2":
            mesh = DeviceMesh.from_group(group, "cpu")
            sides[name] = over(peers.fully_sharded(model, sgd, foreach=True, mesh=mesh), parts)
        else:
            mesh = DeviceMesh.from_group(group, "cpu")
            sides[name] = over(peers.tensor_parallel(model, size, sgd, foreach=True, mesh=mesh), batches)
    losses = {name: [step().item() for _ in range(steps)] for name, step in sides.items()}
    return alternate(sides, rounds=rounds, steps=steps), losses


def trainer_finding(trainer: str, rounds: int) -> Finding:
    """One trainer on ours beside gloo."""
    return decided(
        lambda seconds, losses: judged(
            f"2 ranks, GPT-S, {trainer}: a step takes at most {TRAINERS[trainer]:g} x as long as on gloo",
            seconds, OURS, TRAINERS[trainer], settings=trainer, num_ranks=2, steps=STEPS, losses=losses,
            loss_spread=LOSS_SPREAD,
        ),
        2, trained, trainer, rounds, STEPS,
    )  # fmt: skip


# --- calls -----------------------------------------------------------------------------------------------------------


def called(operation: str, num_bytes: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of a call, and the sum of its result, by backend."""
    size, count = dist.get_world_size(), max(1, num_bytes // 4)
    part = max(1, count // size)
    calls = max(1, min(MOST_CALLS, ROUND_BYTES // num_bytes))
    sides, sums = {}, {}
    for name, group in groups().items():
        value = torch.ones(part * size if operation in ("reduce_scatter", "all_to_all") else count)
        wide = torch.empty(count * size if operation == "all_gather" else part * size)
        narrow = torch.empty(part)
        run: Mapping[str, Callable[[], Any]] = {
            "all_reduce": lambda v=value, g=group: dist.all_reduce(v, group=g),  # type: ignore[misc]
            "all_gather": lambda v=value, w=wide, g=group: dist.all_gather_single(w, v, g),  # type: ignore[misc]
            "reduce_scatter": lambda v=value, n=narrow, g=group: dist.reduce_scatter_single(n, v, group=g),  # type: ignore[misc]
            "all_to_all": lambda v=value, w=wide, g=group: dist.all_to_all_single(w, v, group=g),  # type: ignore[misc]
        }
        sides[name] = run[operation]
        sides[name]()
        result = {"all_reduce": value, "reduce_scatter": narrow}.get(operation, wide)
        sums[name] = [float(result.sum())]
        value.zero_()  # sums of ones would become infinite
    return alternate(sides, rounds=rounds, steps=calls), sums


def limit(num_bytes: int) -> float:
    """The most that a call may take, as a multiple of gloo's."""
    return 0.3 if 2**12 <= num_bytes <= 2**20 else 1.0


def call_finding(operation: str, num_bytes: int, rounds: int) -> Finding:
    """One operation of one size on ours beside gloo."""
    name = f"{operation} of {report.size(num_bytes)}"
    return decided(
        lambda seconds, sums: judged(
            f"2 ranks, {name}: at most {limit(num_bytes):g} x gloo", seconds, OURS, limit(num_bytes), settings=name,
            num_ranks=2, steps=max(1, min(MOST_CALLS, ROUND_BYTES // num_bytes)), losses=sums, loss_spread=0.0,
        ),
        2, called, operation, num_bytes, rounds,
    )  # fmt: skip


# --- stress ----------------------------------------------------------------------------------------------------------


def stressed() -> int:
    """How many collectives of this rank were right."""
    register()
    torch.set_num_threads(1)
    return stress(STRESS_CALLS, STRESS_GROUPS, seed=0)


def stress_finding() -> Check:
    """Random collectives in random order over threads."""
    with Ranks() as ranks:
        right = ranks(STRESS_RANKS, stressed, timeout=1800.0)
    share = STRESS_CALLS // STRESS_GROUPS
    expected = [
        share * sum(rank in members(number, STRESS_RANKS) for number in range(STRESS_GROUPS))
        for rank in range(STRESS_RANKS)
    ]
    return Check(
        target=f"{STRESS_RANKS} ranks, {STRESS_CALLS:,} random collectives on {STRESS_GROUPS} groups over threads: "
        "none wrong, none hangs",
        verdict="pass" if right == expected else "fail",
        measured="right on each rank: "
        + ", ".join(f"{count:,} of {calls:,}" for count, calls in zip(right, expected, strict=True)),
        passed=sum(right),
        total=sum(expected),
    )


PARTS: Mapping[str, Callable[[int], list[Finding]]] = {
    "trainers": lambda rounds: [trainer_finding(trainer, rounds) for trainer in TRAINERS],
    "calls": lambda rounds: [call_finding(operation, size, rounds) for operation in CALLS for size in SIZES],
    "stress": lambda rounds: [stress_finding()],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write every target."""
    results, rounds, whole = report.measured(COMMAND, __doc__, PARTS, ROUNDS, arguments)
    if whole:
        sizes = asdict(gpt_s().config) | {"batch": BATCH}
        settings = {name: Settings(dtype="float32", ranks=2, threads=1, sizes=sizes) for name in TRAINERS}
        settings |= {
            f"{operation} of {report.size(size)}": Settings(dtype="float32", ranks=2, threads=1, sizes={"bytes": size})
            for operation in CALLS
            for size in SIZES
        }
        text = (__doc__ or "").partition("is missed.")[2].strip() + "\n\n" + report.how(rounds, STEPS)
        timed = (
            "A training step, or a call of torch.distributed, from when all ranks have met until the slowest is done."
        )
        report.write("backend", "PyTorch's trainers on our backend", COMMAND, timed, settings, results, text)
    return report.alone(results)


if __name__ == "__main__":
    sys.exit(main())
