"""The layouts of several GPUs that ``make gpu`` checks, each beside one process, and what dry runs foretell of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import torch
from torch import Tensor, nn

import meshwright as mw
from benchmarks.gpu.context import Context
from benchmarks.gpu.models import Mixture
from meshwright.capture.builder import Capture, capture
from meshwright.comm.groups import from_rank_0
from meshwright.ir.cluster import Cluster
from meshwright.ir.files import decode, encode_json
from meshwright.ir.mesh import AxisGroup
from meshwright.ir.precision import Precision
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.ops import collectives
from meshwright.runtime.device import CpuKind, CudaKind
from meshwright.torch_private import symmetric_memory_bytes
from tests.distributed import oracle
from tests.distributed.test_pieces import divided
from tests.gpu.test_operators import waits

APART = "left out: the GPUs do not reach each other's memory"


class Checked(NamedTuple):
    """A layout that is checked with some models. ``pieces``: if not 0, each product whose rows the ranks divide runs in
    so many pieces; with ``shared``, in memory that the GPUs share, otherwise by messages."""

    layout: mw.Layout
    models: tuple[str, ...] = ("GPT",)
    pieces: int = 0
    shared: bool = False


def layouts(ranks: int) -> dict[str, Checked]:
    """The layouts for up to this number of ranks, a power of 2."""
    both, experts = ("GPT", "MLP"), ("experts",)
    rows = mw.Layout(tp=2, sequence_parallel=True)
    by_name = {
        "dp": Checked(mw.Layout(dp=ranks), both),
        "tp": Checked(mw.Layout(tp=2), both),
        "tp, sequence parallel": Checked(rows),
        "pp": Checked(mw.Layout(pp=2, microbatches=4)),
        "dp, zero 3": Checked(mw.Layout(dp=ranks, zero=3), both),
        "cp": Checked(mw.Layout(cp=2)),
        "zb-h1": Checked(mw.Layout(pp=2, microbatches=4, schedule="zb-h1")),
        "experts": Checked(mw.Layout(dp=2, ep=2), experts),
        "tp, products in pieces": Checked(rows, pieces=4),
        "tp, products in shared memory": Checked(rows, pieces=2, shared=True),
    }
    if ranks >= 4:
        deep = mw.Layout(tp=2, pp=2, microbatches=4, sequence_parallel=True)
        by_name |= {
            "dp x tp": Checked(mw.Layout(dp=2, tp=2), both),
            "tp x pp": Checked(mw.Layout(tp=2, pp=2, microbatches=4)),
            "experts x tp": Checked(mw.Layout(dp=2, ep=2, tp=2), experts),
            "tp x pp, products in pieces": Checked(deep, pieces=4),
            "tp 4, products in shared memory": Checked(
                mw.Layout(tp=4, sequence_parallel=True), ("GPT, 4 heads",), pieces=4, shared=True
            ),
        }  # fmt: skip
    if ranks >= 8:
        by_name |= {
            "experts over 4 x tp": Checked(mw.Layout(dp=4, ep=4, tp=2, zero=1), experts),
            "dp x tp x pp, products in shared memory": Checked(
                mw.Layout(dp=2, tp=2, pp=2, zero=1, microbatches=4, sequence_parallel=True), pieces=2, shared=True
            ),
        }
    return by_name


@contextmanager
def memory_of_pieces(shared: bool) -> Iterator[None]:
    """Products in pieces run in shared memory where there is some, or by messages. Ranks on CPUs, whose form of the
    operators is called by a rehearsal, count as sharing memory."""

    def named(kind: object, groups: Iterable[AxisGroup]) -> frozenset[str]:
        return frozenset(group.name for group in groups) if shared else frozenset()

    with mock.patch.object(CpuKind, "symmetric", named):
        if shared:
            yield
        else:
            with mock.patch.object(CudaKind, "symmetric", named):
                yield


def subject_of(model: str) -> oracle.Subject:
    """A small model in float64 with its batches, equal on all ranks."""
    torch.manual_seed(7)
    if model == "GPT, 4 heads":
        return oracle.gpt(True, heads=4)
    if model != "experts":
        return oracle.MODELS[model](True)
    net = Mixture(layers=2, width=16, inner=24, experts=4, vocabulary=64).double()
    tokens = torch.randint(64, (oracle.STEPS, oracle.BATCH, oracle.SEQUENCE))
    batches = [{"tokens": each, "targets": each.roll(-1, 1)} for each in tokens]
    return oracle.Subject(net, language_model_loss, batches)


def plan_of(checked: Checked, captured: Capture, cluster: Cluster | str) -> mw.Plan:
    """The plan of rank 0. Graphs of kernels cannot hold messages: phases with pieces are launched kernel by kernel."""

    def planned() -> bytes:
        plan = mw.plan(captured.graph, cluster, devices=checked.layout.num_ranks, layout=checked.layout)
        if checked.pieces:
            plan = divided(msgspec.structs.replace(plan, graphs=False), captured.graph, checked.pieces)
        return encode_json(plan)

    return decode(from_rank_0(planned), mw.Plan, where="plan of rank 0")


def error_of(context: Context, checked: Checked) -> float | str:
    """The largest error of losses and of the state after the last step, in float64 beside one process on the CPU; or
    why there is none."""
    cluster, error = _cluster(context, checked), 0.0
    for model in checked.models:
        expected = oracle.reference(subject_of(model), oracle.OPTIMIZERS["AdamW"], oracle.MAX_GRAD_NORM, key=model)
        subject = subject_of(model)
        captured = capture(subject.model, subject.loss_fn, subject.batches[0])
        plan = plan_of(checked, captured, cluster)
        with memory_of_pieces(checked.shared):
            run, trainer = oracle.in_parallel(
                subject, plan, oracle.OPTIMIZERS["AdamW"], oracle.MAX_GRAD_NORM,
                functools.partial(mw.parallelize, device=context.device, cluster=cluster),
            )  # fmt: skip
        if checked.shared and not shares_memory(trainer):
            return APART
        losses = oracle.error_of(torch.stack(run.losses).cpu(), torch.stack(expected.losses))
        state = {key: value.cpu() for key, value in run.state.items()}
        error = max(error, losses, oracle.largest_error(state, expected.state) if trainer.rank == 0 else 0.0)
    return error


def shares_memory(trainer: mw.Trainer) -> bool:
    """Whether products of a rank run in memory that its group shares."""
    stages = trainer.executor.stages.values()
    graphs = (stage.phases[name].graph for stage in stages for name in stage.functions)  # other phases have none
    shared = (collectives.GATHER_MULTIPLY, collectives.MULTIPLY_SCATTER)
    return any(node.target in shared for graph in graphs for node in graph.nodes)


# --- beside dry runs --------------------------------------------------------------------------------------------------

PRECISION: Precision = "bfloat16"


def work_of(model: str, rehearse: bool, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of about 60 million parameters on a device, with its batch, for memory that is measured."""
    layers, width, vocabulary, sequence = (2, 64, 512, 64) if rehearse else (4, 1024, 8192, 512)
    torch.manual_seed(0)
    with torch.device(device):
        if model == "experts":
            net: nn.Module = Mixture(layers, width, 2 * width, 4, vocabulary)
        else:
            config = GPTConfig(layers=layers, width=width, heads=8, vocabulary=vocabulary, sequence_length=sequence)
            net = GPT(config)
    text = torch.randint(vocabulary, (16, sequence + 1), generator=torch.Generator().manual_seed(1))
    return net, {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of measured steps and of their dry runs."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def measured(context: Context, checked: Checked) -> dict[str, Any]:
    """What is measured in steps of a larger model in bfloat16: the most bytes of tensors on this rank, with the memory
    that GPUs share, 0 on a CPU; the plan that ran; and where the host waited for the device, empty if it did not."""
    model, batch = work_of(checked.models[0], context.rehearse, "cpu")
    captured = capture(model, language_model_loss, batch, precision=PRECISION)
    cluster = _cluster(context, checked)
    plan = plan_of(checked, captured, cluster)
    context.free()
    others = context.held_bytes()
    with memory_of_pieces(checked.shared):
        trainer = mw.parallelize(
            model, language_model_loss, batch, plan=plan, optimizer=optimizer, cluster=cluster, device=context.device
        )  # fmt: skip
    for _ in range(3):  # libraries are loaded, and phases are captured
        trainer.step(batch)
    peak, _ = context.peak_bytes(lambda: trainer.step(batch))
    shared = symmetric_memory_bytes() if shares_memory(trainer) else 0  # kept by PyTorch, beside its allocator
    return {
        "bytes": peak - others + shared, "plan": encode_json(plan).decode(),
        "waits": waits_of(context, trainer, batch),
    }  # fmt: skip


def waits_of(context: Context, trainer: mw.Trainer, batch: dict[str, Tensor]) -> str:
    """The first operation of a step for which the host waits for the device, and its line; empty if there is none."""
    if context.device.type == "cpu":
        return ""
    with waits() as lines:
        trainer.step(batch)
    return next(iter(lines), "")


def foretold(context: Context, checked: Checked, plan: str, cluster: Cluster | str) -> tuple[int, list[str]]:
    """The most bytes of rank 0 in a dry run of a plan that was measured, and what the dry run found."""
    model, batch = work_of(checked.models[0], context.rehearse, "meta")
    known = decode(plan.encode(), mw.Plan, where="plan that was measured")
    dry_run = mw.dry_run(
        model, language_model_loss, batch, known, cluster, devices=checked.layout.num_ranks, ranks=(0,),
        optimizer=optimizer, precision=PRECISION,
    )  # fmt: skip
    return dry_run.ranks[0].peak_bytes, [f"{each.kind}: {each.what}" for each in dry_run.findings]


def _cluster(context: Context, checked: Checked) -> Cluster | str:
    return context.catalog_cluster(checked.layout.num_ranks) or "h100-dgx"


def by_ranks(known: Mapping[str, Checked]) -> dict[int, list[str]]:
    """The names of layouts by their number of ranks."""
    names: dict[int, list[str]] = {}
    for name, checked in known.items():
        names.setdefault(checked.layout.num_ranks, []).append(name)
    return names
