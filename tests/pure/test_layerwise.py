"""Networks divided layer by layer: the dynamic program equals brute force, and chooses what was once chosen by hand."""

import json
from itertools import product

import pytest

from meshwright.catalog import load_cluster
from meshwright.catalog.models.convolutional import load_network, small_resnet
from meshwright.cli import run as cli
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.convnet import ConvNet
from meshwright.planner.layerwise import PLACES, Place, choice_of, divide_layers, ways_of

DGX1 = "v100-dgx1-edr100x4"


def tried(net: ConvNet, cluster: Cluster, images: int) -> float:
    """Every combination of ways."""
    best = float("inf")
    for ways in product(*(ways_of(layer, images, cluster.num_devices) for layer in net.layers)):
        have: Place | None = None
        total_s = 0.0
        for layer, way in zip(net.layers, ways, strict=True):
            total_s += choice_of(layer, way, have, images, cluster, "fp16").total_s
            have = PLACES[way][1]
        best = min(best, total_s)
    return best


@pytest.mark.parametrize(("name", "images"), [("alexnet", 256), ("alexnet", 8192), ("resnet8", 64)])
@pytest.mark.parametrize("devices", [2, 8])
def test_nothing_that_is_tried_is_faster(name: str, images: int, devices: int) -> None:
    net, cluster = small_resnet() if name == "resnet8" else load_network(name), load_cluster(DGX1, devices)
    net = ConvNet(name=net.name, image=net.image, layers=net.layers[-6:])
    division = divide_layers(net, cluster, images=images)
    assert division.step_s == pytest.approx(tried(net, cluster, images))
    assert division.all_data_s is not None
    assert division.step_s <= division.all_data_s


def test_alexnet_is_divided_as_krizhevsky_did() -> None:
    """One weird trick (2014): convolutions data parallel, dense layers tensor parallel; nothing is pinned."""
    division = divide_layers(load_network("alexnet"), load_cluster(DGX1, 8), images=1024)
    assert [choice.way == "data" for choice in division.choices] == [True] * 5 + [False] * 3
    assert division.all_data_s is not None
    assert division.step_s < 0.8 * division.all_data_s


def test_resnet50_on_a_v100_is_about_as_fast_as_is_known() -> None:
    """Mixed precision on one V100: about 800 to 1,400 images a second (NVIDIA's DeepLearningExamples, MLPerf)."""
    division = divide_layers(load_network("resnet50"), load_cluster(DGX1, 1), images=128)
    assert 800 < 128 / division.step_s < 1400
    assert division.verdict == "fits"


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(LayoutError, match="network alexnet: neither 5 images nor the features of every layer divide"):
        divide_layers(load_network("alexnet"), load_cluster(DGX1, 7), images=5)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["plan", "alexnet", "--cluster", DGX1, "--ranks", "8", "--batch", "1024"]) == 0
    text = capsys.readouterr().out
    assert "convolution1 to convolution5  data parallel" in text
    assert cli(["plan", "alexnet", "--cluster", DGX1, "--ranks", "8", "--batch", "1024", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["interval_s"]["low"] < plain["step_s"] < plain["all_data_s"]
    slower = ["--software", "hugging-face", "--json"]
    assert cli(["plan", "alexnet", "--cluster", DGX1, "--ranks", "8", "--batch", "1024", *slower]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > 1.05 * plain["step_s"]
    assert cli(["plan", "wide-resnet-13b", "--cluster", DGX1, "--ranks", "8", "--batch", "64"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert cli(["plan", "alexnet", "--cluster", DGX1, "--vary", "devices=1..8"]) == 2
    assert "--vary: convolutional networks are planned for one case at a time" in capsys.readouterr().err
    assert cli(["predict", "alexnet", "--cluster", DGX1, "--global-batch", "8"]) == 2
    assert "it is a convolutional network, which `meshwright plan` divides layer by layer" in capsys.readouterr().err
