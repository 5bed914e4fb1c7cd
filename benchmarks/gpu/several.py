"""The part ``ranks``: layouts of several GPUs beside one process, and beside DDP, FSDP2, tensor parallel, pipelining.

One process a GPU, started here as torchrun would; each check and each comparison has processes of its own, so that one
that hangs or dies ends alone. A rehearsal has two ranks on the CPU.
"""

from __future__ import annotations

import copy
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import meshwright as mw
from benchmarks import peers
from benchmarks.gpu import layouts
from benchmarks.gpu.context import Context
from benchmarks.gpu.models import WORKLOADS, Workload
from benchmarks.gpu.speed import adamw, plain_step
from benchmarks.report import judged
from meshwright.comm.groups import from_rank_0
from meshwright.ir.result import Check, Settings
from meshwright.ir.summary import exposed_share, summarize
from meshwright.models import language_model_loss
from meshwright.runtime import launch
from meshwright.runtime.device import num_cuda_devices
from meshwright.runtime.meeting_point import free_port
from tests.distributed import oracle

TIMED = ("ddp", "fsdp2", "tensor parallel", "pipelining")
CHECK_S, EACH_S, COMPARE_S = 30.0, 6.0, 80.0
"""Limits: of the processes that check layouts, and of each layout; and of a comparison."""
AFTER_S = 5.0
"""How long the other ranks may still run after a rank has ended with an error."""
MEASURED = ", measured"
"""The end of the name under which the memory of a layout is kept."""


def run(context: Context) -> None:
    """Check parity, then time each layout beside its peer."""
    most = 2 if context.rehearse else min(8, num_cuda_devices())
    most = 1 << (most.bit_length() - 1)
    context.keep(ranks=most)
    outcomes: dict[str, Any] = {}
    known = layouts.layouts(most)
    for number, names in layouts.by_ranks(known).items():
        outcomes |= _checked(context, number, names)
    context.notes.add_finding(parity(outcomes, most))
    names = [name for name, text in outcomes.items() if text != layouts.APART]
    kept = {name: context.kept(f"ranks-parity-{known[name].layout.num_ranks}").get(f"{name}{MEASURED}")
            for name in names}  # fmt: skip
    context.notes.add_finding(without_waits(kept, most))
    if context.left_s > 30:
        why = start(context, most, "timed:gathers", min(COMPARE_S, context.left_s - 5))
        if why:
            context.notes.failed(f"{most} GPUs, gathers ahead", RuntimeError(why))
    for name in TIMED:
        if context.left_s > 30:
            why = start(context, most, f"timed:{name}", min(COMPARE_S, context.left_s - 5))
            if why:
                context.notes.failed(f"{most} GPUs, beside {name}", RuntimeError(why))


def parity(outcomes: Mapping[str, Any], most: int) -> Check:
    """The finding of errors, or of reasons, by the names of layouts of up to ``most`` ranks."""
    judged_names = [name for name, text in outcomes.items() if text != layouts.APART]
    right = [name for name in judged_names if isinstance(outcomes[name], float) and outcomes[name] <= oracle.TOLERANCE]
    return Check(
        target=f"parity in float64 of layouts of up to {most} ranks with one process", passed=len(right),
        verdict="pass" if len(right) == len(judged_names) else "fail", total=len(judged_names),
        measured=f"{len(right)} of {len(judged_names)} layouts",
        notes={name: str(text) for name, text in outcomes.items()},
    )  # fmt: skip


def without_waits(kept: Mapping[str, Any], most: int) -> Check:
    """The finding of waits of the host. ``kept`` maps a layout of up to ``most`` ranks to what was measured of it, or
    to None."""
    waits = {
        name: "not measured" if measured is None else measured["waits"] or "none" for name, measured in kept.items()
    }
    right = sum(text == "none" for text in waits.values())
    return Check(
        target=f"the host waits for nothing in a step of layouts of up to {most} ranks", passed=right, total=len(waits),
        verdict="pass" if right == len(waits) else "fail", measured=f"{right} of {len(waits)} layouts", notes=waits,
    )  # fmt: skip


def _checked(context: Context, ranks: int, names: Sequence[str]) -> dict[str, Any]:
    """The error of each layout on this number of ranks, or why there is none. All layouts share processes until one of
    them fails; the others go on in new processes."""
    outcomes: dict[str, Any] = {}
    left = list(names)
    while left and context.left_s >= 15:
        limit_s = min(CHECK_S + EACH_S * len(left), context.left_s - 5)
        why = start(context, ranks, f"parity:{';'.join(left)}", limit_s)
        answers = context.kept(f"ranks-parity-{ranks}")
        outcomes |= {name: answers[name] for name in left if name in answers}
        left = [name for name in left if name not in outcomes]
        if left:
            outcomes[left.pop(0)] = why or "no answer"
    return outcomes | dict.fromkeys(left, "not run: no time was left")


def start(context: Context, ranks: int, what: str, limit_s: float) -> str:
    """Run ``what`` on ranks of their own. Return why it failed; empty if it did not."""
    print(f"-- {what} on {ranks} ranks", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu.several", what, str(context.scratch), f"{limit_s:.0f}"]
    command += ["--rehearse"] * context.rehearse
    port = free_port()
    processes = [
        subprocess.Popen(
            command,
            start_new_session=False,
            env=dict(os.environ)
            | {
                "RANK": f"{rank}",
                "LOCAL_RANK": f"{rank}",
                "WORLD_SIZE": f"{ranks}",
                "LOCAL_WORLD_SIZE": f"{ranks}",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": f"{port}",
                "MESHWRIGHT_TIMEOUT_S": "60",
                "OMP_NUM_THREADS": "1" if context.rehearse else "4",
            },
        )
        for rank in range(ranks)
    ]
    try:
        return ended(processes, limit_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def ended(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> str:
    """Wait until all ranks have ended, for at most ``limit_s`` together, and for ``AFTER_S`` once a rank has ended with
    an error. Return which ranks did, and which were still at work; empty if all ended well."""
    deadline = time.monotonic() + limit_s
    stops = deadline
    while True:
        codes = [process.poll() for process in processes]
        failed, at_work = [code for code in codes if code], [rank for rank, code in enumerate(codes) if code is None]
        if failed:
            stops = min(stops, time.monotonic() + AFTER_S)
        if not at_work or time.monotonic() >= stops:
            break
        time.sleep(0.05)
    if not failed and not at_work:
        return ""
    reasons = [f"rank {rank} ended with exit code {code}" for rank, code in enumerate(codes) if code]
    if at_work:
        why = f"{AFTER_S:.0f} s after it" if failed else f"at the limit of {limit_s:.0f} s"
        reasons.append(f"ranks {at_work} were still at work {why}")
    return ", ".join(reasons)


# --- on every rank ----------------------------------------------------------------------------------------------------


def main() -> int:
    """Run on one rank."""
    what, scratch, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    kind, _, name = what.partition(":")
    rehearse = "--rehearse" in sys.argv
    device = launch.start("cpu" if rehearse else "cuda")
    rank = dist.get_rank()
    notes = "ranks" if kind == "timed" else f"ranks-parity-{dist.get_world_size()}"
    name_of_notes = notes if rank == 0 else f"ranks-{rank}"
    context = Context(name_of_notes, scratch, seconds, rehearse=rehearse, device=device)
    if name == "gathers":
        _gathers(context)
    else:
        {"parity": _parity, "timed": _timed}[kind](context, name)
    launch.finish()
    return 0


def _parity(context: Context, names: str) -> None:
    """Note the error of each layout as soon as it is known. Then measure the memory of a larger model under each."""
    known = layouts.layouts(dist.get_world_size())
    for name in names.split(";"):
        context.keep(**{name: layouts.error_of(context, known[name])})
    for name in names.split(";"):
        if from_rank_0(lambda: context.left_s > EACH_S) and context.kept(context.name).get(name) != layouts.APART:
            context.keep(**{f"{name}{MEASURED}": layouts.measured(context, known[name])})


def _timed(context: Context, name: str) -> None:
    """Time our layout and its peer by turns."""
    ranks = dist.get_world_size()
    layout, per_rank, peer = PEERS[name]
    work = WORKLOADS["gpt"](context.rehearse)
    work = replace(work, sequences=work.sequences * ranks if per_rank else max(ranks, work.sequences))
    batch = work.batch()
    torch.manual_seed(0)
    with context.device:
        model = work.make()
    own = copy.deepcopy(model).cpu()
    trainer = mw.parallelize(
        own, language_model_loss, batch, plan=layout(ranks, work.sequences), optimizer=adamw, precision="bfloat16",
        device=context.device, compile=name in COMPILED and not context.rehearse,
    )  # fmt: skip
    there = {key: value.to(context.device) for key, value in batch.items()}
    sides: dict[str, Callable[[], Any]] = {"ours": lambda: trainer.step(there)}
    losses = [float(sides["ours"]())]
    print(f"{name}: our first loss {losses[0]:.5f}", flush=True)
    sides[name] = peer(context, work, model, there)
    finding = judged(
        f"GPT 1.3 B on {ranks} GPUs: a step at most 1.0 x that of {name}", context.seconds(sides), "ours", 1.0,
        settings=f"{work.name}, {ranks} ranks", num_ranks=ranks, steps=3, losses=dict.fromkeys(sides, ()),
    )  # fmt: skip
    settings = Settings(dtype="bfloat16", ranks=ranks, threads=torch.get_num_threads(), sizes=work.sizes)
    if dist.get_rank() == 0:
        context.notes.add_finding(finding, {f"{work.name}, {ranks} ranks": settings})


def _gathers(context: Context) -> None:
    """Time ZeRO 3 with parameters gathered 0, 1, 2 and 4 buckets ahead, and note what communication is exposed."""
    ranks, work = dist.get_world_size(), WORKLOADS["gpt"](context.rehearse)
    work = replace(work, sequences=ranks)
    batch = work.batch()
    torch.manual_seed(0)
    with context.device:
        model = work.make()
    there = {key: value.to(context.device) for key, value in batch.items()}
    sides: dict[str, Callable[[], Any]] = {}
    shares: dict[str, str] = {}
    plan: mw.Plan | None = None
    for ahead in AHEAD:
        own = copy.deepcopy(model).cpu()
        trainer = mw.parallelize(
            own, language_model_loss, batch, plan=mw.Layout(dp=ranks, zero=3) if plan is None else
            msgspec.structs.replace(plan, prefetch=ahead), optimizer=adamw, device=context.device,
            precision="bfloat16" if plan is None else None,
        )  # fmt: skip
        if plan is None:
            plan = trainer.plan
            sides["the plan's"] = functools.partial(trainer.step, there)
        else:
            sides[f"{ahead} ahead"] = functools.partial(trainer.step, there)
        for _ in range(3):
            trainer.step(there)
        share = exposed_share(summarize(trainer.trace()))
        shares[f"the plan's: {trainer.plan.prefetch} ahead" if ahead < 0 else f"{ahead} ahead"] = f"{share:.1%}"
    finding = judged(
        f"GPT 1.3 B on {ranks} GPUs, ZeRO 3: the plan's step at most 1.02 x that of other numbers of buckets ahead",
        context.seconds(sides), "the plan's", 1.02, settings=f"{work.name}, {ranks} ranks", num_ranks=ranks, steps=3,
        losses=dict.fromkeys(sides, ()),
    )  # fmt: skip
    settings = Settings(dtype="bfloat16", ranks=ranks, threads=torch.get_num_threads(), sizes=work.sizes)
    if dist.get_rank() == 0:
        context.notes.add_finding(finding, {f"{work.name}, {ranks} ranks": settings})
        measured = "part of the step that computing waits for communication, by trace"
        target = f"GPT 1.3 B on {ranks} GPUs, ZeRO 3: exposed communication"
        context.notes.add_finding(
            Check(target=target, verdict="reported", passed=1, total=1, measured=measured, notes=shares)
        )


AHEAD = (-1, 0, 2, 4)
"""Numbers of buckets ahead that are compared, after the plan's own (-1)."""
COMPILED = ("ddp", "fsdp2")
"""Comparisons in which both sides are compiled."""


def _part(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of the batch."""
    return {key: value.chunk(dist.get_world_size())[dist.get_rank()] for key, value in batch.items()}


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return language_model_loss(model, batch)[0]


def _ddp(context: Context, work: Workload, model: Any, batch: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    for block in () if context.rehearse else model.blocks:
        block.compile()
    ids = [context.device.index] if context.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
    own = _part(batch)
    return lambda: plain_step(wrapped, optimizer, own, context.device.type, _loss)


def _fsdp2(context: Context, work: Workload, model: Any, batch: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    mesh = init_device_mesh(context.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if not context.rehearse:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=context.device.type == "cuda" or None)
    own = _part(batch)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, own)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _tensor_parallel(context: Context, work: Workload, model: Any, batch: Mapping[str, Tensor]) -> Callable[[], Any]:
    mesh = init_device_mesh(context.device.type, (dist.get_world_size(),))

    def optimizer(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, **options)

    step = peers.tensor_parallel(model, dist.get_world_size(), optimizer, mesh=mesh)

    def low() -> Tensor:
        with torch.autocast(context.device.type, torch.bfloat16):
            return step(batch)

    return low


class _Stage(nn.Module):
    """Stage number ``index`` of ``count`` of a GPT: its blocks, with the embeddings first and the head last."""

    def __init__(self, model: Any, index: int, count: int) -> None:
        super().__init__()
        each = len(model.blocks) // count
        self.blocks = model.blocks[index * each : (index + 1) * each]
        self.first = nn.ModuleList([model.token_embedding, model.position_embedding] if index == 0 else [])
        self.last = nn.Sequential(model.final_norm, model.head) if index == count - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if len(self.first):
            x = self.first[0](x) + self.first[1](torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


def _pipelining(context: Context, work: Workload, model: Any, batch: Mapping[str, Tensor]) -> Callable[[], Any]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    ranks, rank = dist.get_world_size(), dist.get_rank()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # it knows no tied weights
    part = _Stage(model, rank, ranks)
    stage = PipelineStage(part, rank, ranks, context.device)

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(stage, work.sequences, loss_fn=loss_fn)
    fused = context.device.type == "cuda" or None
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4, fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(context.device.type, torch.bfloat16):
            given = (batch["tokens"],) if rank == 0 else ()
            last: dict[str, Any] = {"target": batch["targets"], "losses": []} if rank == ranks - 1 else {}
            schedule.step(*given, **last, return_outputs=False)
        optimizer.step()

    return step


PEERS: Mapping[str, tuple[Callable[[int, int], mw.Layout], bool, Callable[..., Callable[[], Any]]]] = {
    "ddp": (lambda ranks, _: mw.Layout(dp=ranks), True, _ddp),
    "fsdp2": (lambda ranks, _: mw.Layout(dp=ranks, zero=3), True, _fsdp2),
    "tensor parallel": (lambda ranks, _: mw.Layout(tp=ranks), False, _tensor_parallel),
    "pipelining": (lambda ranks, sequences: mw.Layout(pp=ranks, microbatches=sequences), False, _pipelining),
}
"""Maps a peer to our layout of so many ranks and sequences, whether each rank has a batch of its own, and its step."""

if __name__ == "__main__":
    sys.exit(main())
