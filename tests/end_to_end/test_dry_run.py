"""Dry runs: layouts and pipelines are clean on GPUs that are not there, and planted faults are found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.api.dry_runs import dry_run_captured
from meshwright.capture.builder import Capture, capture
from meshwright.cli import run
from meshwright.comm import device_channel, symmetric_memory
from meshwright.comm.record import current
from meshwright.cost.program import stage_held
from meshwright.errors import ClusterError, LaunchError, LayoutError
from meshwright.ir import files
from meshwright.ir.dry_run import DryRun
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, MLP, GPTConfig, classification_loss, language_model_loss
from meshwright.runtime import dry_run, trainer
from meshwright.runtime.clip import clip
from meshwright.runtime.executor import Executor
from meshwright.runtime.rehearsal import Rehearsal
from meshwright.runtime.rehearsed_kind import _Copies
from meshwright.runtime.rehearsed_work import Mark
from meshwright.schedules.rendezvous import Awaited, StartedOperation
from meshwright.torch_private import FakeStore
from tests.distributed import hugging_face, oracle, pipelines, test_pieces
from tests.end_to_end import dry_run_cases

PIPELINES = {
    "zb-v": mw.Layout(pp=2, chunks=2, schedule="zb-v", microbatches=4),
    "interleaved": mw.Layout(pp=2, dp=2, chunks=2, schedule="interleaved", microbatches=4),
    "gpipe": mw.Layout(pp=4, microbatches=4, schedule="gpipe", recompute="full"),
    "zb-h1": mw.Layout(pp=4, microbatches=4, schedule="zb-h1", recompute="full"),
}


def a_batch(size: int = 8) -> dict[str, Tensor]:
    return {"inputs": torch.zeros(size, 6), "label": torch.zeros(size, dtype=torch.int64)}


def dry_mlp(
    layout: mw.Layout, optimizer: Any = oracle.OPTIMIZERS["AdamW"], cluster: mw.Cluster | str = "h100-dgx",
    **options: Any,
) -> DryRun:  # fmt: skip
    return mw.dry_run(
        MLP((6, 16, 12, 4)), classification_loss, a_batch(), layout, cluster, optimizer=optimizer, **options
    )


def layouts() -> Iterator[object]:
    """Every model under the layouts of the parity matrix with two axes, and in turn with one; a small one under each
    layout. ``make matrix`` and ``make bench-dry-runs`` run every model under every layout."""
    for number, case in enumerate(dry_run_cases.layouts(all_ranks=False)):
        model, at = divmod(number, len(dry_run_cases.LAYOUTS))  # dp2, tp2 and dp2 x tp2 come first
        chosen = case.capture == "MLP" or (case.capture in oracle.MODELS and at in (model % 2, 2))
        yield pytest.param(case, id=case.name, marks=() if chosen else (pytest.mark.product,))


def large() -> Iterator[object]:
    """A small model on 256 ranks, under layouts whose messages are compared quickly."""
    for case in dry_run_cases.large(dry_run_cases.deep_mlp):
        quick = case.name in ("dp64 x tp4, zero 3", "dp64 x pp4")
        yield pytest.param(case, id=case.name, marks=() if quick else (pytest.mark.product,))


def small() -> Iterator[object]:
    """Small models under other axes and in pipelines, with all of their ranks."""
    for case in dry_run_cases.small():
        yield pytest.param(case, id=case.name)


@pytest.mark.parametrize("case", [*layouts(), *small()])
def test_layouts_are_clean_and_their_memory_is_predicted(case: dry_run_cases.Case) -> None:
    report = dry_run_cases.run(case)
    assert (report.findings, report.matched) == ((), True)
    assert all(each.collectives for each in report.ranks)
    assert all(each.peak_bytes > each.held_bytes > 0 for each in report.ranks)
    assert all(map(dry_run_cases.as_predicted, report.ranks)), report.ranks


@pytest.mark.parametrize("case", list(large()))
def test_layouts_of_256_ranks_are_clean(case: dry_run_cases.Case) -> None:
    layout = case.options["plan"]
    report = dry_run_cases.run(case._replace(options={**case.options, "ranks": dry_run_cases.firsts(layout)}))
    assert (report.findings, report.matched, report.world_size) == ((), True, 256)
    assert all(map(dry_run_cases.as_predicted, report.ranks)), report.ranks


def test_a_dry_run_leaves_the_model_as_it_is() -> None:
    model = MLP((6, 16, 12, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mw.dry_run(model, classification_loss, a_batch(), mw.Layout(tp=2), "h100-dgx")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_end_although_sends_block(name: str) -> None:
    layout = PIPELINES[name]
    options = {"plan": layout, "optimizer": oracle.OPTIMIZERS["SGD"], "ranks": dry_run_cases.firsts(layout)}
    report = dry_run_cases.run(dry_run_cases.Case(name, partial(oracle.gpt, True, layers=4), options, "GPT, 4 layers"))
    assert report.findings == ()
    assert report.matched
    assert all(each.messages for each in report.ranks)
    assert all(map(dry_run_cases.as_predicted, report.ranks)), report.ranks


def test_skips_between_stages_of_a_u_net_end() -> None:
    subject = pipelines.unet(False)
    batch = {name: value[:8] for name, value in subject.batches[0].items()}
    report = mw.dry_run(subject.model, subject.loss_fn, batch, mw.Layout(pp=4, microbatches=2))
    assert report.findings == ()


MIXTURES = [
    (mw.Layout(dp=4, ep=2, zero=1), None),
    (mw.Layout(dp=2, ep=2, tp=2, pp=2, microbatches=2), "bfloat16"),
]


@pytest.mark.parametrize(("layout", "precision"), MIXTURES, ids=["experts", "pipeline, bfloat16"])
def test_no_host_waits_for_the_numbers_of_tokens_of_experts(layout: mw.Layout, precision: Any) -> None:
    """Nor for the counts of a router: in bfloat16 with PyTorch's grouped products, else with products of blocks."""
    subject = hugging_face.subject("Mixtral", 1)
    report = mw.dry_run(
        subject.model.float(), subject.loss_fn, subject.batches[0], layout, optimizer=oracle.OPTIMIZERS["AdamW"],
        max_grad_norm=oracle.MAX_GRAD_NORM, precision=precision,
    )  # fmt: skip
    assert (report.findings, report.matched) == ((), True)
    assert all(map(dry_run_cases.as_predicted, report.ranks)), report.ranks


def test_no_host_waits_for_random_numbers() -> None:
    subject = oracle.one_block(False, dropout=0.1)
    report = mw.dry_run(subject.model, subject.loss_fn, subject.batches[0], mw.Layout(dp=2, tp=2, recompute="full"))
    assert report.findings == ()


@pytest.mark.parametrize("layout", [mw.Layout(dp=2), mw.Layout(tp=2, recompute="full")], ids=["dp2", "tp2"])
def test_the_memory_in_which_random_numbers_are_drawn_is_predicted(layout: mw.Layout) -> None:
    """The masks of attention are the most of it."""
    config = GPTConfig(layers=1, width=64, heads=4, vocabulary=256, sequence_length=256, dropout=0.1)
    tokens = torch.zeros(8, config.sequence_length, dtype=torch.int64)
    report = mw.dry_run(GPT(config), language_model_loss, {"tokens": tokens, "targets": tokens}, layout)
    assert all(map(dry_run_cases.as_predicted, report.ranks)), report.ranks


def test_tokens_that_travel_to_their_experts_wait_for_their_numbers() -> None:
    """A plan for CPUs, whose ranks tell each other how many tokens they send, waits on GPUs, and the report says so."""
    subject = hugging_face.subject("Mixtral", 1)
    graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    plan = mw.plan(graph, "h100-dgx", layout=mw.Layout(dp=2, ep=2), devices=2)
    stage = msgspec.structs.replace(plan.stage, operator_algorithms={})
    report = mw.dry_run(
        subject.model, subject.loss_fn, subject.batches[0], msgspec.structs.replace(plan, stages=(stage,)), ranks=(0,)
    )
    assert any("bincount" in finding.what for finding in report.of("wait")), report.findings


def test_a_kernel_that_does_not_wait_for_its_inputs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are copied on a stream of their own, for which the kernels of a step must wait."""
    monkeypatch.setattr(_Copies, "hold_kernels", lambda self: None)
    report = dry_mlp(mw.Layout(dp=2))
    assert {finding.kind for finding in report.findings} == {"error"}
    assert all("reads a tensor that a copy still writes" in finding.what for finding in report.findings)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_in_low_precision_the_host_waits_neither_for_the_scale_nor_for_the_check(precision: Any) -> None:
    assert dry_mlp(mw.Layout(dp=2), precision=precision).findings == ()


def test_an_optimizer_that_cannot_skip_an_update_waits_for_the_check() -> None:
    report = dry_mlp(mw.Layout(dp=2), lambda p: torch.optim.RMSprop(p, lr=0.1), precision="float16")
    assert {finding.kind for finding in report.findings} == {"wait"}
    assert all("meshwright/runtime/precision.py" in finding.where for finding in report.findings)


class Attends(nn.Module):
    """Causal attention in which two query heads share a key head; with a window if it is not 0."""

    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.project, self.window = nn.Linear(32, 64), window

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (-1, 8)).transpose(1, 2) for part in self.project(x).split([32, 16, 16], 2)
        )
        mask, place = None, torch.arange(x.shape[1])
        if self.window:
            mask = (place <= place[:, None]) & (place > place[:, None] - self.window)
        return nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=True
        )


ATTENTION = {
    "dp": mw.Layout(dp=2),
    "heads": mw.Layout(tp=2),
    "gathered": mw.Layout(cp=2),
    "ring of 2": mw.Layout(cp=2, context="ring"),
    "ring of 4": mw.Layout(cp=4, context="ring"),
}


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["x"]).square().mean()
    return loss


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("layout", ATTENTION.values(), ids=ATTENTION)
def test_attention_holds_no_scores_and_waits_for_nothing(layout: mw.Layout, window: int) -> None:
    length = 2048
    report = mw.dry_run(
        Attends(window), squares, {"x": torch.zeros(2 * layout.dp, length, 32)}, layout, "h100-dgx",
        optimizer=oracle.OPTIMIZERS["SGD"], precision="bfloat16",
    )  # fmt: skip
    assert report.findings == ()
    assert report.matched
    assert all(each.peak_bytes < length * length for each in report.ranks), "not even one boolean mask"
    assert all(map(dry_run_cases.as_predicted, report.ranks)), "what kernels take too"


class Masked(nn.Module):
    """Attention with a mask that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(2, (-1, 8)).transpose(1, 2) for part in self.project(x).chunk(3, 2))
        mask = (x[:, :, 0] >= 0)[:, None, None, :] & (x[:, :, 1] >= 0)[:, None, :, None]
        return nn.functional.scaled_dot_product_attention(query, key, value, mask)


@pytest.mark.parametrize("precision", ["bfloat16", None])
def test_the_memory_of_a_ring_with_a_mask_is_predicted(precision: Any) -> None:
    """A step converts the part of the mask for the keys that it has."""
    report = mw.dry_run(
        Masked(), squares, {"x": torch.zeros(2, 1024, 32)}, mw.Layout(cp=2, context="ring"), "h100-dgx",
        optimizer=oracle.OPTIMIZERS["SGD"], precision=precision, ranks=(0,),
    )  # fmt: skip
    assert report.findings == ()
    assert all(map(dry_run_cases.as_predicted, report.ranks)), report.ranks


@cache
def blocks(precision: Any) -> tuple[nn.Module, dict[str, Tensor], Capture]:
    """Two feed-forward blocks, and their captured step."""
    model, batch = test_pieces.Blocks(32, 64), {"tokens": torch.zeros(8, 64, dtype=torch.int64)}
    return model, batch, capture(model, test_pieces.loss_fn, batch, precision=precision)


def in_pieces(layout: mw.Layout, precision: Any, cluster: str = "h100-dgx", **options: Any) -> tuple[DryRun, mw.Plan]:
    """A dry run of the blocks, all of whose products run in pieces where their rows are divided."""
    model, batch, captured = blocks(precision)
    plain = mw.plan(captured.graph, cluster, devices=layout.num_ranks, layout=layout)
    plan = test_pieces.divided(msgspec.structs.replace(plain, graphs=False), captured.graph, plain.mesh.size("tp"))
    options = {"optimizer": oracle.OPTIMIZERS["SGD"], **options}
    return dry_run_captured(captured, model, test_pieces.loss_fn, batch, plan, cluster, **options), plan


SHARED = {
    "tp2": mw.Layout(tp=2, sequence_parallel=True),
    "dp2 x tp2, zero 3": mw.Layout(dp=2, tp=2, zero=3, sequence_parallel=True),
    "tp2 x pp2": mw.Layout(tp=2, pp=2, microbatches=2, sequence_parallel=True),
}


@pytest.mark.parametrize("name", SHARED)
def test_products_in_shared_memory_are_clean_and_their_memory_is_predicted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, precision = SHARED[name], "bfloat16" if name == "tp2" else None
    monkeypatch.setattr(Marked, "rehearsals", [])
    monkeypatch.setattr(dry_run, "Rehearsal", Marked)
    report, plan = in_pieces(layout, precision)
    assert (report.findings, report.matched) == ((), True)
    assert all(map(dry_run_cases.as_predicted, report.ranks)), report.ranks
    programs = PlanLowering(blocks(precision)[2].graph, box=8)(plan)
    kept = [stage_held(programs, plan, stage, mw.Cluster.load("h100-dgx")) for stage in range(layout.pp)]
    for rank in Marked.rehearsals:
        entries = [entry for entry in rank.stream["step 2"] if isinstance(entry, StartedOperation)]
        kinds = Counter(entry.kind for entry in entries if entry.communicator.endswith("shared memory"))
        assert min(kinds["fused_all_gather_matmul"], kinds["fused_matmul_reduce_scatter"]) >= 2 // layout.pp
        assert not any(len(entry.messages) > 1 for entry in entries), "no ring of shifts"
        stage = plan.mesh.coordinates(rank.rank).get("pp", 0)
        assert sum(rank.memory.shared.values()) == kept[stage].shared_bytes > 0


def test_between_boxes_rows_travel_as_messages() -> None:
    report, _ = in_pieces(mw.Layout(tp=16, sequence_parallel=True), None, "h100-dgx-ndr400x2", ranks=(0,))
    assert report.findings == ()
    assert all(each.messages for each in report.ranks)


def test_a_rank_that_leaves_out_a_product_in_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = symmetric_memory.multiply_scatter

    def alone(left: Tensor, right: Tensor, group: Any) -> Tensor:
        if dist.get_rank() == 1:
            return left.new_empty(left.shape[0] // group.size(), right.shape[1])
        return multiply(left, right, group)

    monkeypatch.setattr(symmetric_memory, "multiply_scatter", alone)
    report, _ = in_pieces(SHARED["tp2"], None)
    assert {finding.kind for finding in report.findings} == {"unmatched"}
    assert "fused_matmul_reduce_scatter in step 1" in report.findings[0].what


class Marked(Rehearsal):
    """Keeps the ranks of a dry run."""

    rehearsals: ClassVar[list[Marked]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rehearsals.append(self)


@pytest.mark.parametrize(
    ("layout", "blocking"),
    [(mw.Layout(dp=2, tp=2, zero=3), ()), (mw.Layout(pp=2, microbatches=4), ("broadcast",))],
    ids=["collectives", "messages"],
)
def test_a_trace_marks_every_operation_on_its_own_stream_and_every_copy(
    layout: mw.Layout, blocking: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of an operation is marked as soon as it has started, on a stream that waits for it; kernels do not. Only
    the broadcast of a pipeline's loss blocks the kernels."""
    monkeypatch.setattr(Marked, "rehearsals", [])
    monkeypatch.setattr(dry_run, "Rehearsal", Marked)
    assert dry_mlp(layout, cluster=mw.Cluster.load("h100-dgx").without_graphs()).findings == ()
    for rank in Marked.rehearsals:
        entries = rank.stream["step 2"]
        started = [entry for entry in entries if isinstance(entry, StartedOperation)]
        sent = {each.number for each in started if any(message.sends for message in each.messages)}
        waited = {entry.number for entry in entries if isinstance(entry, Awaited)}
        assert waited == {each.number for each in started} - sent, "a mark's stream is not that of the kernels"
        ends = {number: mark for mark in rank.marks for number in mark.ended}
        own = [each for each in started if each.kind not in blocking]
        kinds = Counter(each.kind for each in own)
        assert kinds["allreduce"] >= 2 if layout.tp == 2 else kinds.total() == 2 * layout.microbatches, kinds
        for each in own:
            mark = ends[each.number]
            assert mark.begun == each.number + 1, "nothing was started in between"
            assert mark.stream.startswith("ends of ")
            assert Mark("kernels", mark.begun) in rank.marks, "where it may begin"
        lanes: dict[str, list[int]] = {mark.stream: [] for mark in ends.values()}
        for mark in rank.marks:
            if mark.ended:
                lanes[mark.stream] += mark.ended
        assert all(numbers == sorted(numbers) for numbers in lanes.values()), "in the order in which they run"
        copies = [mark for mark in rank.marks if mark.stream == "copies"]
        assert len(copies) == 2 * len(a_batch()), "the begin and the end of each copy of an input"


def test_a_host_that_reads_a_trace_within_a_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(parameters: Any, max_norm: float) -> Tensor:
        recorder = current()
        assert recorder is not None
        recorder.trace(0)
        return clip(parameters, max_norm)

    monkeypatch.setattr(trainer, "clip", reading)
    report = dry_mlp(mw.Layout(dp=2), max_grad_norm=1.0)
    assert {finding.what for finding in report.findings} == {"the host reads the times of a trace"}
    assert all("meshwright/comm/record.py" in finding.where for finding in report.findings), "not the stand-in's line"


# --- planted faults --------------------------------------------------------------------------------------------------


class Reads(torch.optim.SGD):
    """Reads a value of the device in every step."""

    def step(self, closure: Any = None) -> Any:
        if float(self.param_groups[0]["params"][0].sum()) >= 0:
            super().step(closure)


class Mixes(torch.optim.SGD):
    """Adds a tensor of the host to a gradient."""

    def step(self, closure: Any = None) -> Any:
        gradient = self.param_groups[0]["params"][0].grad
        gradient.add_(torch.ones(gradient.shape))
        super().step(closure)


class Copies(torch.optim.SGD):
    """Keeps a copy of a gradient on the host."""

    def step(self, closure: Any = None) -> Any:
        self.copied = self.param_groups[0]["params"][0].grad.cpu()
        super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "kind", "what"),
    [
        (Reads, "wait", "the host reads a value of one float32 on cuda"),
        (Copies, "wait", "a copy of 16x6 float32 on cuda to the host"),
        (Mixes, "mixed devices", "aten.add_.Tensor: 16x6 float32 on cuda and 16x6 float32 on cpu"),
    ],
)
def test_a_planted_fault_of_an_optimizer_is_found(optimizer: Any, kind: str, what: str) -> None:
    report = dry_mlp(mw.Layout(dp=2), lambda parameters: optimizer(parameters, lr=0.1))
    for finding, moment in zip(report.findings, ("step 1", "step 2"), strict=True):
        assert (finding.kind, finding.what, finding.moment, finding.ranks) == (kind, what, moment, (0, 1))
        assert "test_dry_run.py" in finding.where
        assert finding.where.endswith("in step")


def test_a_planted_send_that_nobody_receives_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Executor._send

    def sends_more(self: Executor, stage: Any, action: Any) -> None:
        send(self, stage, action)
        if dist.get_rank() == 0 and action.microbatch == 1:
            self._channels[1].send(torch.empty(3, device=self.device))

    monkeypatch.setattr(Executor, "_send", sends_more)
    report = dry_mlp(mw.Layout(pp=2, microbatches=2))
    findings = report.of("unmatched")
    assert findings == report.findings
    assert {finding.moment for finding in findings} == {"step 1", "step 2"}
    assert findings[0].what.startswith("send in step 1, stage 0, micro-batch 1: rank 1 never receives")


def test_one_communicator_for_both_directions_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneWay(device_channel.DeviceChannel):
        def __init__(self, up: Any, down: Any, peer: int, device: torch.device) -> None:
            super().__init__(up, up, peer, device)

    monkeypatch.setattr(device_channel, "DeviceChannel", OneWay)
    subject = oracle.one_block(False)
    report = mw.dry_run(subject.model, subject.loss_fn, subject.batches[0], mw.Layout(pp=2, microbatches=4))
    assert {finding.kind for finding in report.findings} == {"unmatched"}
    assert any("rank 1 never receives: rank 1 waits for" in finding.what for finding in report.findings)


def test_a_rank_with_another_collective_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd_norm(parameters: Any, max_norm: float) -> Tensor:
        return clip(parameters, max_norm) if dist.get_rank() == 0 else torch.zeros((), device=parameters.device)

    monkeypatch.setattr(trainer, "clip", odd_norm)
    report = dry_mlp(mw.Layout(tp=2), max_grad_norm=1.0)
    assert {finding.kind for finding in report.findings} == {"unmatched"}
    assert "does not come" in report.findings[0].what


def test_a_message_of_another_size_is_told_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    send = device_channel.DeviceChannel.send

    def send_more(self: device_channel.DeviceChannel, tensor: Tensor) -> Any:
        return send(self, torch.cat([tensor.flatten(), tensor.flatten()]))

    monkeypatch.setattr(device_channel.DeviceChannel, "send", send_more)
    findings = dry_mlp(mw.Layout(pp=2, microbatches=2)).of("unmatched")
    assert findings[0].what == "send in set-up: sends 2 x float32, but rank 1 receives 1 x float32 (recv in set-up)"


def test_each_rank_runs_once_and_no_ranks_are_those_that_are_run_by_default() -> None:
    layout = mw.Layout(dp=2)
    assert [each.rank for each in dry_mlp(layout, ranks=[]).ranks] == [0, 1]
    assert [each.rank for each in dry_mlp(layout, ranks=[1, 0, 1]).ranks] == [1, 0]


class Resizes(nn.Module):
    """Resizes features by an operator that PyTorch decomposes on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        planes = self.inner(inputs).unflatten(1, (1, 2, 2))
        return nn.functional.interpolate(planes, scale_factor=2.0, mode="bilinear").flatten(1)


def test_operators_that_pytorch_decomposes_are_followed() -> None:
    assert mw.dry_run(Resizes(), classification_loss, a_batch(), mw.Layout(dp=2)).findings == ()


class Integers(nn.Module):
    """A product of integers, for which CUDA has no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.table: Tensor
        self.register_buffer("table", torch.ones(4, 4, dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        counts = (inputs > 0)[:, :4].to(torch.int64) @ self.table
        result: Tensor = self.inner(inputs) + counts
        return result


def test_a_product_of_integers_has_no_kernel() -> None:
    report = mw.dry_run(Integers(), classification_loss, a_batch(), mw.Layout(dp=2))
    assert {finding.what for finding in report.of("no kernel")} == {"aten.mm.default has no kernel for int64"}


def test_a_step_that_does_not_fit_is_told() -> None:
    cluster = mw.Cluster.load("h100-dgx")
    small = msgspec.structs.replace(cluster, device=msgspec.structs.replace(cluster.device, memory_bytes=2**20))
    report = mw.dry_run(MLP((6, 16, 12, 4)), classification_loss, a_batch(), mw.Layout(dp=2), small)
    assert {finding.kind for finding in report.findings} == {"memory"}


# --- what is refused, and the command line ---------------------------------------------------------------------------


def test_clusters_without_gpus_and_other_ranks_are_refused() -> None:
    with pytest.raises(ClusterError, match="its device, generic-cpu, is no GPU"):
        mw.dry_run(MLP((6, 16, 12, 4)), classification_loss, a_batch(), mw.Layout(dp=2), "cpu-local")
    with pytest.raises(LayoutError, match="there is no rank 2"):
        dry_mlp(mw.Layout(dp=2), ranks=[2])


@pytest.fixture
def a_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_rank_of_a_job_makes_no_dry_run(a_world: None) -> None:
    with pytest.raises(LaunchError, match="this process is a rank of a job"):
        dry_mlp(mw.Layout(dp=2))


def cli(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> tuple[int, str]:
    code = run(["dryrun", *arguments])
    return code, capsys.readouterr().out


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = cli(capsys, ["lenet", "--cluster", "h100-dgx", "--dp", "2", "--ranks", "2"])
    assert code == 0
    assert text.splitlines()[0] == "LeNet on 2 x h100 (h100-dgx): dp2"
    assert text.splitlines()[-1] == "clean: nothing breaks, waits for the device, or does not fit"
    code, text = cli(capsys, ["lenet", "--cluster", "h100-dgx", "--dp", "2", "--ranks", "2", "--rank", "1", "--json"])
    report = files.decode(text.encode(), DryRun, where="stdout")
    assert (code, [each.rank for each in report.ranks], report.matched) == (0, [1], False)


def test_the_command_runs_a_run_file_on_the_cluster_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "RUN.toml"
    file.write_text(
        '[model]\nname = "mlp"\nsizes = [64, 8, 10]\n[data]\nkind = "random"\nbatch_size = 16\n'
        '[layout]\ndp = 8\nzero = 1\n[optimizer]\nname = "adamw"\nlr = 1e-3\n'
    )
    code, text = cli(capsys, [str(file), "--cluster", "h100-dgx", "--ranks", "8", "--rank", "0", "--rank", "7"])
    assert code == 0, text
    assert text.splitlines()[0] == "MLP on 8 x h100 (h100-dgx): dp8, zero1"
    assert [line.split()[0] for line in text.splitlines() if line.strip()[:1].isdecimal()] == ["0", "7"]
    assert run(["dryrun", str(file), "--cluster", "cpu-local", "--ranks", "8"]) == 2
    assert "its device, generic-cpu, is no GPU" in capsys.readouterr().err
