"""Images cut over ranks: training equals one process, whatever dims are cut, beside data parallelism, in pipelines and
with recomputation; what cannot be cut is said."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import LayoutError
from meshwright.ir.plan import starred
from meshwright.models import MLP, ResNet, UNet, classification_loss, segmentation_loss
from meshwright.ops import collectives
from tests.distributed import oracle
from tests.distributed.oracle import Batch, Subject
from tests.distributed.pool import Ranks


class Signals(nn.Module):
    """One spatial dim: dilated and grouped convolutions, halving and doubling."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv1d(2, 4, 5, padding=4, dilation=2)
        self.grouped = nn.Conv1d(4, 4, 4, stride=2, padding=1, groups=2)
        self.back = nn.ConvTranspose1d(4, 2, 4, stride=2, padding=1)
        self.norm = nn.InstanceNorm1d(4, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm(self.wide(F.pad(x, (1, 3), mode="replicate")[..., :-4])))
        y = F.interpolate(F.max_pool1d(self.grouped(y), 3, stride=1, padding=1), scale_factor=2, mode="linear")
        return self.back(F.avg_pool1d(y, 2))


class Volumes(nn.Module):
    """Three spatial dims, with the operators that the reference models leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(2, 4, 3, padding=1, padding_mode="replicate")
        self.norm = nn.LayerNorm([4, 4, 4, 4])
        self.deep = nn.Conv3d(4, 4, 3, padding=1, bias=False)
        self.head = nn.Conv3d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool3d(torch.tanh(self.stem(x)), 3, stride=2, padding=1)
        y = F.silu(self.deep(self.norm(y)))
        y = F.interpolate(y, scale_factor=2, mode="trilinear") + F.avg_pool3d(x, 3, 1, 1).mean(1, keepdim=True)
        return self.head(F.pad(y, (1, 1, 1, 1, 1, 1))[..., 1:-1, 1:-1, 1:-1])


def same_size(model: nn.Module, batch: Batch) -> Tensor:
    """A mean over all points of what is made of them."""
    return F.mse_loss(model(batch["image"]), batch["label"])


def images(size: int, side: int, classes: int, labels: tuple[int, ...]) -> list[Batch]:
    return [
        {
            "image": torch.randn(size, 3, side, side, dtype=torch.float64),
            "label": torch.randint(classes, (size, *labels)),
        }
        for _ in range(2)
    ]


def points(size: int, *sides: int) -> list[Batch]:
    """Two channels, and as many to be made of them."""
    return [{name: torch.randn(size, 2, *sides, dtype=torch.float64) for name in ("image", "label")} for _ in range(2)]


def unet(norm: str) -> nn.Module:
    return UNet(depth=1, width=4, classes=3, norm=norm).double()


MODELS: dict[str, Callable[[], Subject]] = {
    "U-Net": lambda: Subject(unet("group"), segmentation_loss, images(2, 16, 3, (16, 16))),
    "U-Net of one image": lambda: Subject(unet("batch"), segmentation_loss, images(1, 16, 3, (16, 16))),
    "ResNet": lambda: Subject(ResNet(width=4).double(), classification_loss, images(4, 16, 10, ())),
    "signals": lambda: Subject(Signals().double(), same_size, points(2, 32)),
    "volumes": lambda: Subject(Volumes().double(), same_size, points(2, 8, 8, 8)),
}
CASES = [
    ("U-Net", mw.Layout(spatial=(2,))),
    ("U-Net", mw.Layout(spatial=(1, 2), microbatches=2, recompute="full")),
    ("U-Net", mw.Layout(spatial=(2,), pp=2, microbatches=2)),
    ("U-Net of one image", mw.Layout(spatial=(2, 2))),
    ("ResNet", mw.Layout(spatial=(2, 2))),
    ("ResNet", mw.Layout(dp=2, spatial=(2,))),
    ("signals", mw.Layout(spatial=(2,))),
    ("volumes", mw.Layout(spatial=(2, 1, 2))),
]


def train(name: str, layout: mw.Layout) -> oracle.LargestErrors:
    torch.manual_seed(3)
    serial = MODELS[name]()
    torch.manual_seed(3)
    return compared(serial, MODELS[name](), layout, ("spatial", name))


def compared(serial: Subject, parallel: Subject, layout: mw.Layout, key: object = None) -> oracle.LargestErrors:
    """Subjects with the same key are equal."""
    before = {name: value.clone() for name, value in serial.model.state_dict().items()}
    optimizer = oracle.OPTIMIZERS["SGD"]
    expected = oracle.reference(serial, optimizer, key=key)
    parallelize = mw.parallelize if key is None else oracle.sharing_capture(key)
    run, trainer = oracle.in_parallel(parallel, layout, optimizer, parallelize=parallelize)
    return oracle.compared(before, expected, run, trainer)


@pytest.mark.parametrize(("model", "layout"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_cut_images_train_as_in_one_process(ranks: Ranks, model: str, layout: mw.Layout) -> None:
    for result in ranks(layout.num_ranks, train, model, layout):
        assert result.error <= oracle.TOLERANCE, result
        assert result.moved > 1e-3


def train_own_rows_first(name: str, layout: mw.Layout) -> oracle.LargestErrors:
    """With every convolution as the planner has large ones."""
    torch.manual_seed(3)
    serial = MODELS[name]()
    torch.manual_seed(3)
    parallel = MODELS[name]()
    share = ("spatial", name)
    graph = oracle.captured(share, parallel).graph
    every = tuple(
        {starred(operator.name): None for operator in graph.operators if operator.target.startswith("aten.convolution")}
    )
    plan = msgspec.structs.replace(mw.plan(graph, layout=layout), interiors=every)
    before = {key: value.clone() for key, value in serial.model.state_dict().items()}
    optimizer = oracle.OPTIMIZERS["SGD"]
    expected = oracle.reference(serial, optimizer, key=share)
    run, trainer = oracle.in_parallel(parallel, plan, optimizer, parallelize=oracle.sharing_capture(share))
    targets = [node.target for node in trainer._last.stages[0].functions["prologue"].graph.nodes]
    assert collectives.ADD_ROWS in targets
    assert collectives.HALO_RETURN in targets
    return oracle.compared(before, expected, run, trainer)


@pytest.mark.parametrize(
    ("model", "layout"), [("U-Net", mw.Layout(spatial=(2,))), ("ResNet", mw.Layout(spatial=(2, 2)))], ids=str
)
def test_so_they_do_where_own_rows_are_convolved_first(ranks: Ranks, model: str, layout: mw.Layout) -> None:
    for result in ranks(layout.num_ranks, train_own_rows_first, model, layout):
        assert result.error <= oracle.TOLERANCE, result
        assert result.moved > 1e-3


def train_on_parts(layout: mw.Layout) -> tuple[list[float], dict[str, tuple[slice, ...]]]:
    """Losses on whole batches, less those on this rank's rows and columns of the same; and which these are."""
    losses: list[list[float]] = []
    parts: dict[str, tuple[slice, ...]] = {}
    for local in (False, True):
        torch.manual_seed(3)
        subject = MODELS["U-Net"]()
        trainer = mw.parallelize(
            subject.model, subject.loss_fn, subject.batches[0], plan=layout, optimizer=oracle.OPTIMIZERS["SGD"]
        )
        parts = trainer.input_parts
        batches = [{name: batch[name][parts[name]] for name in batch} if local else batch for batch in subject.batches]
        losses.append([float(trainer.step(batch, local=local)) for batch in batches])
    return [loss - other for loss, other in zip(*losses, strict=True)], parts


def test_a_rank_needs_no_more_than_its_rows(ranks: Ranks) -> None:
    parts = []
    for differences, part in ranks(4, train_on_parts, mw.Layout(dp=2, spatial=(2,))):
        assert differences == [0.0, 0.0]
        parts.append([(extent.start, extent.stop) for extent in part["image"]])
    rows = [(0, 8), (8, 16)]
    assert parts == [[(n, n + 1), (0, 3), y, (0, 16)] for n in (0, 1) for y in rows]


@cache
def graph_of(name: str) -> mw.Graph:
    subject = MODELS[name]()
    return mw.capture(subject.model, subject.loss_fn, subject.batches[0])


def planned(name: str, **layout: object) -> mw.Plan:
    return mw.plan(graph_of(name), layout=mw.Layout(**layout))  # type: ignore[arg-type]


def test_every_level_of_a_unet_is_cut() -> None:
    plan = planned("U-Net", spatial=(2, 2))
    choices = {name: (strategy.get("sy"), strategy.get("sx")) for name, strategy in plan.stage.strategies.items()}
    levels = ("pool:max_pool2d_with_indices#0", "enlarge.*:convolution#0", "enlarge.*:convolution_backward#1")
    assert {choices[name] for name in levels} == {("yy", "xx")}
    assert all(y and x for name, (y, x) in choices.items() if "convolution" in name or "norm:" in name)
    assert "whole on" not in plan.explain()


def test_levels_that_are_too_thin_stay_whole_and_say_so() -> None:
    plan = planned("ResNet", spatial=(8,))
    assert "16 rows that become 8" not in plan.explain()
    assert "whole on sy  8 rows that become 4 are too few for 8 ranks" in " ".join(plan.explain().split(" "))


class Coarse(nn.Module):
    """A stride, and adaptive pooling, that need not go with the number of ranks."""

    def __init__(self, stride: int, windows: int) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=stride, padding=1)
        self.pool, self.head = nn.AdaptiveAvgPool2d(windows), nn.Linear(4 * windows**2, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.coarse(self.fine(x)).relu()).flatten(1))


COARSE = [
    (8, 1, 4, "coarse:convolution#0", "16 rows that become 2 are too few for 4 ranks"),
    (16, 1, 2, "coarse:convolution#0", "16 rows that become 1 are too few for 2 ranks"),
    (1, 3, 2, "pool:_adaptive_avg_pool2d#0", "16 rows that become 3 do not divide over 2 ranks, as its windows must"),
]


def coarse(stride: int, windows: int) -> Subject:
    return Subject(Coarse(stride, windows).double(), classification_loss, images(2, 16, 10, ()))


@pytest.mark.parametrize(("stride", "windows", "parts", "where", "why"), COARSE)
def test_ranks_that_would_be_left_without_output_are_told(
    stride: int, windows: int, parts: int, where: str, why: str
) -> None:
    subject = coarse(stride, windows)
    graph = mw.capture(subject.model, subject.loss_fn, subject.batches[0])
    text = " ".join(mw.plan(graph, layout=mw.Layout(spatial=(parts,))).explain().split())
    assert f"{where} whole on sy {why}" in text
    assert "fine y@sy" in text, "what can be cut is"


def test_what_is_whole_where_others_are_cut_computes_the_same(ranks: Ranks) -> None:
    for stride, windows, parts, *_ in COARSE[1:]:
        for result in ranks(parts, train_coarse, stride, windows, parts):
            assert result.error <= oracle.TOLERANCE, result


def train_coarse(stride: int, windows: int, parts: int) -> oracle.LargestErrors:
    torch.manual_seed(3)
    serial = coarse(stride, windows)
    torch.manual_seed(3)
    parallel = coarse(stride, windows)
    return compared(serial, parallel, mw.Layout(spatial=(parts,)))


def test_what_has_no_space_is_refused() -> None:
    graph = mw.capture(
        MLP((4, 8, 2)), classification_loss, {"inputs": torch.randn(4, 4), "label": torch.randint(2, (4,))}
    )
    with pytest.raises(LayoutError, match="no convolutions or pooling over such a dim"):
        mw.plan(graph, layout=mw.Layout(spatial=(2,)))
    with pytest.raises(LayoutError, match=r"no rows of 8, 16 can be cut over sy=17\n.*larger images, or fewer parts"):
        planned("U-Net", spatial=(17,))
    with pytest.raises(LayoutError, match=r"spatial=\[0\]"):
        planned("U-Net", spatial=(0,))
