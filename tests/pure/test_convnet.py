"""Convolutional networks by their layers: parameters and products as published, and errors that name the layer."""

import pytest

from meshwright.catalog.models.convolutional import load_network, network_names
from meshwright.errors import LayoutError
from meshwright.ir.convnet import NetLayer

TORCHVISION = {
    "alexnet": 61_100_840, "vgg16": 138_357_544, "vgg19": 143_667_240, "resnet50": 25_557_032, "resnet101": 44_549_160,
    "wide-resnet50": 68_883_240,
}  # fmt: skip
"""Parameters of torchvision's models of these names."""

PRINTED = {"250m": 250e6, "500m": 500e6, "1b": 1e9, "2b": 2e9, "4b": 4e9, "6b8": 6.8e9, "13b": 13e9}


@pytest.mark.parametrize("name", TORCHVISION)
def test_parameters_are_exactly_those_of_torchvision(name: str) -> None:
    assert load_network(name).parameters == TORCHVISION[name]


@pytest.mark.parametrize("size", PRINTED)
def test_wide_networks_have_the_size_in_their_name(size: str) -> None:
    assert load_network(f"wide-resnet-{size}").parameters == pytest.approx(PRINTED[size], rel=0.05)


# Multiply-adds of one image of 224 x 224, in 10^9, as torchvision's page of weights prints them (GFLOPS there).
@pytest.mark.parametrize(
    ("name", "products"),
    [("alexnet", 0.71), ("vgg16", 15.47), ("vgg19", 19.63), ("resnet50", 4.09), ("resnet101", 7.80)],
)
def test_products_are_those_that_were_published(name: str, products: float) -> None:
    assert load_network(name).forward_flops / 2e9 == pytest.approx(products, rel=0.01)


@pytest.mark.parametrize("name", network_names())
def test_every_network_says_where_it_is_from(name: str) -> None:
    net = load_network(name)
    assert (net.name, net.image[0]) == (name, 3)
    assert net.source
    assert net.step_flops(2) < 6 * net.forward_flops


def test_two_towers_have_fewer_parameters() -> None:
    assert load_network("alexnet-2012").parameters == 60_965_224


def test_an_unknown_network_says_what_is_near() -> None:
    with pytest.raises(LayoutError, match="unknown network 'resnet-50'\n  -> did you mean `resnet50`"):
        load_network("resnet-50")


@pytest.mark.parametrize(
    ("inputs", "groups", "problem"),
    [
        (0, 1, "one: inputs is 0, less than 1"),
        (3, 2, "one: 3 and 4 channels do not divide into 2 groups"),
    ],
)
def test_impossible_sizes_name_their_layer(inputs: int, groups: int, problem: str) -> None:
    with pytest.raises(LayoutError) as caught:
        NetLayer(name="one", kind="convolution", inputs=inputs, outputs=4, groups=groups)
    assert str(caught.value).startswith(problem)
