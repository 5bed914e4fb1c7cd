"""The part ``launches``: a small GPT, whose kernels take less time than the host needs to launch them.

Our step runs operator by operator and compiled, each with and without graphs of its phases, beside eager PyTorch and
torch.compile with CUDA graphs. In float64, losses with graphs equal those without.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks.gpu.context import Context
from benchmarks.gpu.models import Workload
from benchmarks.gpu.speed import adamw, plain_step
from benchmarks.report import judged
from meshwright.ir.result import Check, Settings
from meshwright.models import GPT, GPTConfig, language_model_loss

STEPS, TOLERANCE = 6, 1e-9
GRAPHS, NONE = "graphs", "no graphs"


def workload(rehearse: bool) -> Workload:
    """A GPT whose products take a few microseconds."""
    layers, width, sequence = (2, 32, 32) if rehearse else (12, 384, 128)
    config = GPTConfig(layers=layers, width=width, heads=4, vocabulary=1024, sequence_length=sequence)
    return Workload("small GPT", lambda: GPT(config), layers, width, 1024, sequence, 4)


def run(context: Context) -> None:
    """Compare losses, then times."""
    work = workload(context.rehearse)
    settings = {work.name: Settings(dtype="bfloat16", ranks=1, threads=torch.get_num_threads(), sizes=work.sizes)}
    torch.manual_seed(0)
    model = work.make()
    tried = context.notes.tried
    tried(f"{work.name}: losses with graphs", functools.partial(_same_losses, context, work, model))
    sides: dict[str, Callable[[], object]] = {}
    for compile in (False,) if context.rehearse else (False, True):
        for graphs in (True, False):
            name = f"ours, {'compiled, ' * compile}{GRAPHS if graphs else NONE}"
            training = tried(
                f"{work.name}: {name}",
                functools.partial(_ours, context, work, model, "bfloat16", graphs=graphs, compile=compile),
            )
            if training is not None:
                sides[name] = functools.partial(training[0].step, training[1])
    ours = next((name for name in (f"ours, compiled, {GRAPHS}", f"ours, {GRAPHS}") if name in sides), "")
    if not ours:
        return
    for compile in (False, True):
        pair = {name: step for name, step in sides.items() if ("compiled" in name) == compile}
        own = next(iter(pair), "")
        if len(pair) == 2:
            tried(
                f"{work.name}: {own} beside none",
                functools.partial(_compared, context, work, pair, own, settings, f"{own}: at most 1.0 x without"),
            )
    beside: dict[str, Callable[[], object]] = {ours: sides[ours]}
    peers = {"eager PyTorch": False, "torch.compile with CUDA graphs": True}
    for name, compile in peers.items():
        if context.left_s > 20 and not (compile and context.rehearse):
            peer_step = tried(f"{work.name}: {name}", functools.partial(_peer, context, work, model, compile=compile))
            if peer_step is not None:
                beside[name] = peer_step
    if len(beside) > 1:
        target = f"{ours}: at most 1.0 x PyTorch's step"
        tried(
            f"{work.name}: beside PyTorch", functools.partial(_compared, context, work, beside, ours, settings, target)
        )


def _ours(
    context: Context, work: Workload, model: nn.Module, precision: Any, *, graphs: bool, compile: bool
) -> tuple[mw.Trainer, Mapping[str, Tensor]]:
    """A trainer of a copy of the model, after the steps in which it captures its graphs."""
    batch, own = work.batch(), copy.deepcopy(model).cpu()
    graph = mw.capture(own, language_model_loss, batch, precision=precision)
    chosen = mw.plan(graph, context.catalog_cluster() or "h100-dgx", layout=mw.Layout(precision=precision), devices=1)
    context.keep(**{f"{precision}_graphs": chosen.graphs})
    plan = msgspec.structs.replace(chosen, graphs=graphs)
    trainer = mw.parallelize(
        own, language_model_loss, batch, plan=plan, optimizer=adamw, compile=compile, device=context.device
    )
    there = {key: value.to(context.device) for key, value in batch.items()}
    for _ in range(2):
        trainer.step(there)
    return trainer, there


def _same_losses(context: Context, work: Workload, model: nn.Module) -> None:
    """Note whether losses in float64 do not depend on graphs."""
    losses = []
    for graphs in (False, True):
        trainer, batch = _ours(context, work, copy.deepcopy(model).double(), None, graphs=graphs, compile=False)
        losses.append(torch.stack([trainer.step(batch) for _ in range(STEPS)]).cpu())
    error = float((losses[0] - losses[1]).abs().max())
    context.notes.add_finding(
        Check(
            target=f"{work.name}: losses in float64 with graphs are those without, within {TOLERANCE:g}",
            verdict="pass" if error <= TOLERANCE else "fail", passed=int(error <= TOLERANCE), total=1,
            measured=f"largest difference {error:.2g} in {STEPS} steps",
        )
    )  # fmt: skip


def _peer(context: Context, work: Workload, model: nn.Module, *, compile: bool) -> Callable[[], Tensor]:
    """A step of PyTorch, eager or compiled as a whole with CUDA graphs."""
    twin = copy.deepcopy(model).to(context.device)
    batch = work.batch(context.device)

    def loss_fn(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return language_model_loss(model, batch)[0]

    loss: Callable[..., Any] = torch.compile(loss_fn, mode="reduce-overhead") if compile else loss_fn
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-4, fused=context.device.type == "cuda" or None)
    step = functools.partial(plain_step, twin, optimizer, batch, context.device.type, loss)
    for _ in range(3):
        step()
    return step


def _compared(
    context: Context, work: Workload, sides: Mapping[str, Callable[[], object]], ours: str,
    settings: Mapping[str, Settings], target: str,
) -> None:  # fmt: skip
    """Note a comparison of our step with others."""
    seconds = context.seconds(sides)
    finding = judged(
        f"{work.name}, {target}", seconds, ours, 1.0, settings=work.name, num_ranks=1,
        steps=1 if context.rehearse else 3, losses=dict.fromkeys(sides, ()),
    )  # fmt: skip
    context.notes.add_finding(finding, settings)
