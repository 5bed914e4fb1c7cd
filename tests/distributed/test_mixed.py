"""Operators that split samples, rows, channels and filters each in their own way: training equals one process, by names
that say what stays where, on meshes of one to three axes; sums over segments of the ranks run at once."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import LayoutError
from meshwright.ir.graph import Graph
from meshwright.ir.placement import Shard
from meshwright.ir.plan_check import check_fits
from meshwright.ir.trace import Trace
from meshwright.models import (
    VGG,
    AlexNet,
    LeNet,
    ResNet,
    UNet,
    WideResNet,
    classification_loss,
    segmentation_loss,
)
from meshwright.models.googlenet import GoogLeNet, Inception
from meshwright.planner.factors import FactorChoices
from meshwright.planner.pins import read_pins
from tests.distributed import oracle
from tests.distributed.oracle import Subject
from tests.distributed.pool import Ranks
from tests.distributed.test_spatial import images


def classifier(make: Callable[[], nn.Module], size: int, side: int) -> Subject:
    return Subject(make().double(), classification_loss, images(size, side, 10, ()))


class Branches(nn.Module):
    """Two modules of GoogLeNet; ``make bench-convolution`` trains all nine."""

    def __init__(self) -> None:
        super().__init__()
        self.modules_3 = nn.Sequential(Inception(3, 4, 4, 4, 2, 4, 4), Inception(16, 4, 4, 4, 2, 4, 4))
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.modules_3(images).mean(dim=(2, 3)))
        return logits


NETWORKS: dict[str, Callable[[], Subject]] = {
    "LeNet": lambda: classifier(lambda: LeNet(16, 3, channels=(4, 8), dense=(16,)), 4, 16),
    "AlexNet": lambda: classifier(lambda: AlexNet(79, classes=10, channels=(4, 8, 8, 8, 4), dense=(16, 16)), 4, 79),
    "VGG": lambda: classifier(lambda: VGG((1, 2), 4, 16, classes=10, dense=(16,)), 4, 16),
    "branches": lambda: classifier(Branches, 4, 16),
    "ResNet": lambda: classifier(lambda: ResNet(width=4), 4, 16),
    "Wide-ResNet": lambda: classifier(lambda: WideResNet((1, 1), 4, classes=10), 4, 32),
    "U-Net": lambda: Subject(
        UNet(depth=1, width=4, classes=4).double(), segmentation_loss, images(2, 16, 4, (16, 16))
    ),
}  # fmt: skip
LARGE: dict[str, Callable[[], Subject]] = {"GoogLeNet": lambda: classifier(lambda: GoogLeNet(8, classes=10), 4, 64)}
"""Those that only ``make bench-convolution`` trains."""
ONE = {"samples": "sample", "rows": "height", "channels": "stationary-x", "filters": "stationary-y"}


def pinned(name: str, words: str) -> dict[str, str]:
    """That every convolution of a network that can, and nothing else, splits so."""
    pins = {}
    for module, layer in (NETWORKS | LARGE)[name]().model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            pins[module] = words
    return pins


@cache
def captured(name: str) -> Graph:
    subject = (NETWORKS | LARGE)[name]()
    return mw.capture(subject.model, subject.loss_fn, subject.batches[0])


def possible(name: str, layout: mw.Layout) -> mw.Layout:
    """Without pins of what no operator can split (three colours, a filter of each of three classes)."""
    graph = captured(name)
    kept, mesh = {}, layout.mesh()
    for glob, text in layout.pin.items():
        factors = FactorChoices(graph, layout.mixed_axes, {operator.name: {} for operator in graph.operators})
        with contextlib.suppress(LayoutError):
            read_pins(factors, {glob: text}, mesh.names)
            kept[glob] = text
    assert kept
    return mw.Layout(dp=layout.dp, spatial=layout.spatial, mixed=layout.mixed, pin=kept)


def train(name: str, layout: mw.Layout) -> oracle.LargestErrors:
    torch.manual_seed(3)
    serial = (NETWORKS | LARGE)[name]()
    torch.manual_seed(3)
    parallel = (NETWORKS | LARGE)[name]()
    before = {each: value.clone() for each, value in serial.model.state_dict().items()}
    optimizer, key = oracle.OPTIMIZERS["SGD"], ("mixed", name)
    expected = oracle.reference(serial, optimizer, key=key)
    run, trainer = oracle.in_parallel(parallel, layout, optimizer, parallelize=oracle.sharing_capture(key))
    return oracle.compared(before, expected, run, trainer)


def check(ranks: Ranks, name: str, layout: mw.Layout) -> None:
    for result in ranks(layout.num_ranks, train, name, layout, timeout=600):
        assert result.error <= oracle.TOLERANCE, (name, result)
        assert result.moved > 1e-3


WAYS = [
    ("LeNet", "channels"), ("AlexNet", "filters"), ("VGG", "channels"), ("branches", "filters"), ("ResNet", "rows"),
    ("Wide-ResNet", "channels"), ("U-Net", "rows"), ("U-Net", "filters"),
]  # fmt: skip
"""Every network is split in a way, and every way splits networks of several kinds."""


@pytest.mark.parametrize(
    "name",
    [name if name == "branches" else pytest.param(name, marks=pytest.mark.product) for name in NETWORKS],
)
def test_data_parallel_networks_train_as_in_one_process(ranks: Ranks, name: str) -> None:
    check(ranks, name, mw.Layout(dp=2))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(*case, marks=() if case in WAYS else pytest.mark.product)
        for case in itertools.product(NETWORKS, ["rows", "channels", "filters"])
    ],
)
def test_networks_split_in_one_way_train_as_in_one_process(ranks: Ranks, name: str, way: str) -> None:
    layout = mw.Layout(mixed=(2,), pin=pinned(name, f"{ONE[way]}@m1"))
    check(ranks, name, possible(name, layout))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("VGG", mw.Layout(mixed=(2, 2), pin={"convolutions.3": "stationary-w@m1,m2"})),
        ("ResNet", mw.Layout(mixed=(2, 2), pin={"blocks.*": "stationary-w@m1,m2"})),
        ("ResNet", mw.Layout(dp=2, mixed=(2,), pin={"blocks.*.conv2": "stationary-x@m1", "stem": "stationary-y@m1"})),
        ("U-Net", mw.Layout(spatial=(2,), mixed=(2,), pin={"down.*.conv2": "stationary-y@m1"})),
        ("U-Net", mw.Layout(mixed=(2, 2), pin={"down.*": "height@m1 width@m2", "up.0.conv1": "height@m2 sample@m1"})),
        ("branches", mw.Layout(mixed=(4,))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_axes_split_differently(ranks: Ranks, name: str, layout: mw.Layout) -> None:
    check(ranks, name, layout)


def test_three_axes_split_samples_rows_and_filters(ranks: Ranks) -> None:
    pins = {
        "*": "sample@m1",
        "blocks.*.conv1": "sample@m1 height@m2 filter@m3",
        "blocks.*.conv2": "sample@m1 channel@m2 width@m3",
    }
    check(ranks, "ResNet", mw.Layout(mixed=(2, 2, 2), pin=pins))


def traced(layout: mw.Layout) -> Trace:
    subject = NETWORKS["VGG"]()
    trainer = mw.parallelize(
        subject.model, subject.loss_fn, subject.batches[0], plan=layout, optimizer=oracle.OPTIMIZERS["SGD"]
    )
    trainer.step(subject.batches[0])
    return trainer.trace(all_ranks=True)


def test_segments_of_the_ranks_reduce_at_once(ranks: Ranks) -> None:
    """Channels over pairs of ranks, samples over the others: two sums of two ranks each, side by side in the trace. On
    few busy cores, the pairs may come to their sums one after the other; then another step is traced."""
    layout = mw.Layout(mixed=(2, 2), pin={"convolutions.3": "stationary-x@m1 sample@m2"})
    assert any(reduces_at_once(ranks(4, traced, layout)[0]) for _ in range(8))


def reduces_at_once(trace: Trace) -> bool:
    sums = [span for span in trace.spans if span.stream == "communication" and span.what.startswith("all_reduce m1 of")]
    assert {span.what for span in sums} == {"all_reduce m1 of ranks 0 2", "all_reduce m1 of ranks 1 3"}
    return any(
        span.what != other.what and max(span.start_s, other.start_s) < min(span.end_s, other.end_s)
        for span, other in itertools.combinations(sums, 2)
    )


# --- what is chosen, and said ----------------------------------------------------------------------------------------


def planned(name: str, **layout: object) -> mw.Plan:
    graph = captured(name)
    plan = mw.plan(graph, layout=mw.Layout(**layout))  # type: ignore[arg-type]
    check_fits(plan, graph)
    return plan


def test_weights_lie_where_their_name_says() -> None:
    def storage(words: str, sizes: tuple[int, ...]) -> object:
        return planned("VGG", mixed=sizes, pin={"convolutions.5": words}).storage("convolutions.5.weight")

    assert storage("stationary-x@m1", (2,)) == {"m1": Shard(1)}
    assert storage("stationary-y@m1", (2,)) == {"m1": Shard(0)}
    assert storage("stationary-w@m1,m2", (2, 2)) == {"m1": Shard(1), "m2": Shard(0)}
    assert storage("stationary-w@m2,m1", (2, 2)) == {"m1": Shard(0), "m2": Shard(1)}


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("stationary-w@m1", r"stationary-w takes 2 axes, there are 1\n  -> write for example 'stationary-w@m"),
        ("stationary-w@m1,m1", r"stationary-w takes 2 axes, there are 1"),
        ("stationary-x@m1,m2", r"stationary-x takes 1 axis, there are 2"),
        ("stationary-z@m1", r"can split 'stationary-z' over m1=2\n  -> .*channel, filter, width, height"),
        ("height@dense", r"unknown axis 'dense'\n  -> axes are dp, m1, m2, tp"),
    ],
)  # fmt: skip
def test_names_that_cannot_be_are_refused(pin: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        planned("VGG", mixed=(2, 2), pin={"convolutions.5": pin})


def test_a_spatial_split_of_a_dense_layer_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"pin\['dense.0'\]: no operator there can split 'height' over m1=2"):
        planned("VGG", mixed=(2,), pin={"dense.0": "height@m1"})
