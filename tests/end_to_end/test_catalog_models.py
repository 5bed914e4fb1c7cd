"""The catalog's models beside captured ones: parameters and FLOPs within 1 %."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from meshwright.api import capture, plan
from meshwright.catalog import load_cluster
from meshwright.catalog.models import make_model
from meshwright.catalog.models.convolutional import lenet, load_network, small_resnet
from meshwright.cost.coded import foretold
from meshwright.cost.collective import Network
from meshwright.cost.exchange import gradient_exchange
from meshwright.cost.setup import Setup
from meshwright.cost.step import stage_parameters
from meshwright.ir.convnet import ConvNet
from meshwright.ir.graph import Graph
from meshwright.ir.layout import Layout
from meshwright.ir.level import Level
from meshwright.models import (
    GPT,
    VGG,
    AlexNet,
    GPTConfig,
    LeNet,
    ResNet,
    WideResNet,
    classification_loss,
    language_model_loss,
)

PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.convolution.", "aten.convolution_backward.")
GPT2 = {"layers": 2, "hidden": 128, "heads": 4, "vocabulary": 512, "sequence": 64}


def captured(make: Callable[[], nn.Module], loss_fn: Any, batch: dict[str, torch.Tensor]) -> Graph:
    with torch.device("meta"):
        model = make()
    return capture(model, loss_fn, batch)


def products(graph: Graph) -> float:
    return sum(operator.flops for operator in graph.operators if operator.target.startswith(PRODUCTS))


@pytest.mark.parametrize(
    ("net", "make", "size"),
    [
        (lenet(), LeNet, 28),
        (small_resnet(size=16), ResNet, 16),
        (small_resnet(14, 32, size=16), lambda: ResNet(14, 32), 16),
        (load_network("alexnet"), AlexNet, 224),
        (load_network("vgg16"), VGG, 224),
        (load_network("wide-resnet50"), WideResNet, 224),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_convolutional_networks_of_ours(net: ConvNet, make: Callable[[], nn.Module], size: int) -> None:
    batch = {"image": torch.zeros(4, net.image[0], size, size), "label": torch.zeros(4, dtype=torch.int64)}
    graph = captured(make, classification_loss, batch)
    assert graph.num_parameters() == net.parameters
    assert products(graph) == pytest.approx(net.step_flops(4), rel=0.01)


def test_resnet50_as_hugging_face_has_it() -> None:
    """Its default config; torchvision's has as many parameters."""
    batch = {"pixel_values": torch.zeros(2, 3, 224, 224), "labels": torch.zeros(2, dtype=torch.int64)}
    graph = captured(
        lambda: ResNetForImageClassification(ResNetConfig(num_labels=1000)),
        lambda model, batch: model(**batch).loss,
        batch,
    )
    net = load_network("resnet50")
    assert graph.num_parameters() == net.parameters
    assert products(graph) == pytest.approx(net.step_flops(2), rel=0.01)


@pytest.mark.parametrize("codec", ["bf16", "qsgd(4)", "onebit", "topk(1%)", "topk(1%)+qsgd(4)"])
@pytest.mark.parametrize("zero", [0, 1])
def test_coded_gradients_have_the_bytes_of_captured_ones(codec: str, zero: Literal[0, 1]) -> None:
    """The GPT by its sizes, and captured with one bucket: the bytes that a rank sends, and its seconds of coding."""
    level = Level(name="network", fan_out=4, alpha_s=1e-4, beta_s_per_byte=8e-8)
    cluster = msgspec.structs.replace(
        load_cluster("cpu-local"), name="wire", num_devices=4, levels=(level,), collectives=()
    )
    words = torch.zeros(4, GPT2["sequence"], dtype=torch.int64)
    sizes = (GPT2["layers"], GPT2["hidden"], GPT2["heads"], GPT2["vocabulary"], GPT2["sequence"])
    graph = captured(lambda: GPT(GPTConfig(*sizes)), language_model_loss, {"tokens": words, "targets": words})
    planned = plan(graph, cluster, layout=Layout(dp=4, codec=codec, zero=zero))
    (bucket,) = planned.buckets
    (coding,) = bucket.codings
    sent, coding_s = foretold(planned, cluster, dict.fromkeys(graph.parameters, 4))[coding.axis, bucket.reduction]
    setup = Setup(
        model=make_model("gpt", **GPT2), dp=4, zero=zero, global_batch=4, precision="fp32", flash=False, codec=codec
    )
    network, by_count = Network(cluster), stage_parameters(setup, 0) * 4
    by_sizes = gradient_exchange(setup, network, bucket.num_bytes)
    assert by_sizes.algorithm == coding.algorithm
    assert by_sizes.num_bytes == sent
    assert by_sizes.coding_s == pytest.approx(coding_s)
    # By its sizes, the model has nearly as many parameters as it has.
    assert gradient_exchange(setup, network, by_count).num_bytes == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize("hugging_face", [False, True])
def test_transformers(hugging_face: bool) -> None:
    tokens = torch.zeros(2, GPT2["sequence"], dtype=torch.int64)
    if hugging_face:
        config = GPT2Config(
            vocab_size=GPT2["vocabulary"], n_positions=GPT2["sequence"], n_embd=GPT2["hidden"],
            n_layer=GPT2["layers"], n_head=GPT2["heads"],
        )  # fmt: skip
        batch = {"input_ids": tokens, "labels": tokens}
        graph = captured(lambda: GPT2LMHeadModel(config), lambda model, batch: model(**batch).loss, batch)
    else:
        sizes = (GPT2["layers"], GPT2["hidden"], GPT2["heads"], GPT2["vocabulary"], GPT2["sequence"])
        graph = captured(lambda: GPT(GPTConfig(*sizes)), language_model_loss, {"tokens": tokens, "targets": tokens})
    model = make_model("gpt", **GPT2)
    assert graph.num_parameters() == pytest.approx(model.parameters, rel=0.01)
    # The fused attention's backward computes the scores once more: 7 products where the closed form counts 6.
    attention = sum(
        operator.flops for operator in graph.operators if operator.target.startswith("meshwright.attention")
    )
    assert products(graph) + 6 / 7 * attention == pytest.approx(model.step_flops(2), rel=0.01)
