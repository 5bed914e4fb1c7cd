"""Choose data or tensor parallelism for each layer of a network whose layers differ. All layers use the same ranks.

Dynamic programming over the placement of the values between layers finds the fastest choices (Krizhevsky 2014 chose by
hand).
"""

from typing import Literal

import msgspec

from meshwright.catalog import load_cluster
from meshwright.catalog.models import load_network
from meshwright.cost.collective import Group, Network
from meshwright.cost.convnet import layer_cost
from meshwright.cost.kernels import Rates, element_bytes
from meshwright.cost.occupancy import Occupancy, fit_chance, memory_verdict, taken_bytes
from meshwright.cost.setup import DTYPES, Precision
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster
from meshwright.ir.convnet import ConvNet, NetLayer
from meshwright.ir.interval import Interval, interval, step_deviation

Way = Literal["data", "outputs", "inputs"]
"""The dim of a layer that the ranks divide: the images (``data``), the outputs of the weights (``outputs``), or the
inputs of the weights (``inputs``)."""

Place = Literal["images", "features", "whole"]
"""The part of a value between two layers that each rank has: some images (``images``), some features of all images
(``features``), or the whole value (``whole``)."""

PLACES: dict[Way, tuple[Place, Place]] = {
    "data": ("images", "images"),
    "outputs": ("whole", "features"),
    "inputs": ("features", "whole"),
}
"""Maps each way to two places: the place that the inputs of a layer must have, and the resulting place of its
outputs."""


class LayerChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen way to divide a layer, and its costs. ``compute_s`` is the time of forward and backward, in seconds.
    ``moving_s`` is the seconds to move inputs and their gradients between ranks, and to add up outputs. ``gradients_s``
    is the seconds to add up the gradients of the weights over ranks. ``optimizer_s`` is the seconds to update the
    weights. ``held_bytes`` is the memory that a rank holds for the layer."""

    layer: str
    way: Way
    compute_s: float
    moving_s: float
    gradients_s: float
    optimizer_s: float
    held_bytes: float

    @property
    def total_s(self) -> float:
        """Total seconds of the layer."""
        return self.compute_s + self.moving_s + self.gradients_s + self.optimizer_s


class Layerwise(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of a network, divided over ``ranks`` ranks. ``interval_s`` holds 80 % of the times of such steps;
    ``fit_chance`` is the chance that the network fits in memory. ``all_data_s`` is the time of a step, in seconds, if
    all layers are data parallel, for comparison. It is None if the images do not divide evenly over the ranks."""

    network: str
    ranks: int
    images: int
    choices: tuple[LayerChoice, ...]
    step_s: float
    peak_bytes: float
    verdict: Occupancy
    fit_chance: float
    interval_s: Interval
    all_data_s: float | None


def divide_layers(
    net: ConvNet | str,
    cluster: Cluster | str,
    *,
    devices: int | None = None,
    images: int,
    precision: Precision = "fp16",
) -> Layerwise:
    """Choose the fastest way for every layer of a network on a cluster. ``devices`` is the number of devices of a
    cluster that is given by name. Branches of the network are assumed to run one after the other.

    Raises:
        LayoutError: the network is unknown, or neither the images nor the features of some layer divide by the number
            of devices.
        ClusterError: the cluster is unknown, or cannot have that many devices.
    """
    net = load_network(net) if isinstance(net, str) else net
    cluster = load_cluster(cluster, devices) if isinstance(cluster, str) else cluster
    choices = _best(net, cluster, images, precision, only=None)
    if choices is None:
        raise LayoutError(
            f"neither {images} images nor the features of every layer divide by {cluster.num_devices} devices",
            where=f"network {net.name}",
            remedy="take a batch that they divide, or another number of devices",
        )
    alone = _best(net, cluster, images, precision, only="data")
    software, memory_bytes = cluster.software, cluster.device.memory_bytes
    live = sum(choice.held_bytes for choice in choices) + software.bucket_bytes * (cluster.num_devices > 1)
    peak = taken_bytes(live, software, cluster.device.kind, int(cluster.num_devices > 1))
    step_s = sum(choice.total_s for choice in choices) + software.step_s
    waited = sum(choice.moving_s + choice.gradients_s for choice in choices) / step_s
    return Layerwise(
        network=net.name,
        ranks=cluster.num_devices,
        images=images,
        choices=choices,
        step_s=step_s,
        peak_bytes=peak,
        verdict=memory_verdict(peak, memory_bytes, software.spread.memory),
        fit_chance=fit_chance(peak, memory_bytes, software.spread.memory),
        interval_s=interval(step_s, step_deviation(software.spread, waited)),
        all_data_s=sum(choice.total_s for choice in alone) + software.step_s if alone is not None else None,
    )


def moving_s(network: Network, have: Place, need: Place, num_bytes: float, ranks: int) -> float:
    """Seconds to bring a value from place ``have`` to place ``need``, and its gradient back. ``num_bytes`` is the size
    of the whole value.

    If the layer needs the whole value, the gradient on each rank is a term of a sum. A reduce-scatter brings the
    gradient back. If all ranks had the whole value, it is an all-reduce. Otherwise, the gradient has the place ``need``
    and is brought back to the place ``have``.
    """
    group = Group(ranks)
    if ranks == 1 or have == need != "whole":
        return 0.0
    if have == "whole":
        return network.collective_s("all_reduce" if need == "whole" else "all_gather", num_bytes, group)
    if need == "whole":
        gathered_s = network.collective_s("all_gather", num_bytes, group)
        return gathered_s + network.collective_s("reduce_scatter", num_bytes, group)
    return 2 * network.collective_s("all_to_all", num_bytes / ranks, group)


def ways_of(layer: NetLayer, images: int, ranks: int) -> list[Way]:
    """The ways in which ``ranks`` ranks can divide a layer evenly."""
    ways: list[Way] = ["data"] if images % ranks == 0 else []
    if layer.groups == 1 and layer.outputs % ranks == 0:
        ways.append("outputs")
    if layer.groups == 1 and layer.inputs % ranks == 0:
        ways.append("inputs")
    return ways


def choice_of(
    layer: NetLayer, way: Way, have: Place | None, images: int, cluster: Cluster, precision: Precision
) -> LayerChoice:
    """The cost of a layer that is divided in the given ``way``. ``have`` is the place of its inputs. ``have`` is None
    if the inputs are the images of the batch, which are not moved."""
    ranks, dtype = cluster.num_devices, DTYPES[precision]
    element = element_bytes(dtype)
    rates, network = Rates(cluster.device, cluster.software), Network(cluster)
    split = 1 if way == "data" else ranks
    cost = layer_cost(
        layer, images / ranks if way == "data" else images, rates, dtype, first=have is None,
        outputs=split if way == "outputs" else 1, inputs=split if way == "inputs" else 1,
    )  # fmt: skip
    moved_s = 0.0
    if have is not None:
        moved_s = moving_s(network, have, PLACES[way][0], images * layer.inputs * layer.pixels_in * element, ranks)
    if way == "inputs":
        moved_s += network.collective_s("all_reduce", images * layer.outputs * layer.pixels_out * element, Group(ranks))
    reduced = layer.parameters * element if way == "data" else 0.0
    return LayerChoice(
        layer=layer.name,
        way=way,
        compute_s=cost.forward_s + cost.backward_s,
        moving_s=moved_s,
        gradients_s=network.collective_s("all_reduce", reduced, Group(ranks)) if reduced else 0.0,
        optimizer_s=rates.memory_bound("update", layer.parameters / split * rates.software.optimizer_bytes).seconds,
        held_bytes=cost.saved_bytes + layer.parameters / split * (18 if element == 2 else 16),
    )


def _best(
    net: ConvNet, cluster: Cluster, images: int, precision: Precision, only: Way | None
) -> tuple[LayerChoice, ...] | None:
    """The fastest choices for all layers, by dynamic programming; None if the ranks cannot divide some layer.

    After each layer, the search keeps the fastest choices for each ``Place`` of the layer's outputs. If ``only`` is
    given, no other way is considered.
    """
    best: dict[Place | None, tuple[float, tuple[LayerChoice, ...]]] = {None: (0.0, ())}
    for layer in net.layers:
        reached: dict[Place | None, tuple[float, tuple[LayerChoice, ...]]] = {}
        for way in ways_of(layer, images, cluster.num_devices):
            if only not in (None, way):
                continue
            after = PLACES[way][1]
            for have, (before_s, choices) in best.items():
                choice = choice_of(layer, way, have, images, cluster, precision)
                total_s = before_s + choice.total_s
                if after not in reached or total_s < reached[after][0]:
                    reached[after] = total_s, (*choices, choice)
        best = reached
    return min(best.values(), key=lambda pair: pair[0])[1] if best else None
