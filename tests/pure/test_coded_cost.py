"""The times of coded collectives: closed forms equal the simulation of the coded steps."""

import msgspec
import pytest

from meshwright.cost.coded import CodecCosts, coded_s
from meshwright.cost.collective import Group, Network
from meshwright.cost.work import CodedElements
from meshwright.ir.cluster import Cluster, CodecTiming
from meshwright.ir.codec import codec_of
from meshwright.ir.device import Device
from meshwright.ir.level import Level
from meshwright.ir.program import CollectiveKind
from meshwright.schedules.collectives.coded import coded
from meshwright.schedules.collectives.coded_bytes import chunk_of, in_bytes
from meshwright.schedules.collectives.operations import build
from meshwright.simulate.collectives import alone_s, links_of

LENGTH = 2**22
FREE = tuple(
    CodecTiming(codec=text, encode_s_per_byte=0.0, decode_s_per_byte=0.0)
    for text in ("fp16", "qsgd(4)", "qsgd(8)", "onebit", "topk(1%)")
)
"""Codecs that take no time, so that only messages count."""


def cluster(*levels: tuple[int, float], codecs: tuple[CodecTiming, ...] = FREE) -> Cluster:
    """Levels of (fan-out, seconds per byte), innermost first, on CPUs that add up in no time. Every
    rank has a link of its own."""
    device = Device(
        name="core",
        kind="cpu",
        peak_flops_per_s={"float32": 1e11},
        memory_bytes=2**34,
        memory_bandwidth_bytes_per_s=1e15,
    )
    size, cluster_levels = 1, []
    for index, (fan_out, beta) in enumerate(levels):
        cluster_levels.append(
            Level(name=f"level{index}", fan_out=fan_out, alpha_s=1e-5, beta_s_per_byte=beta, links=size)
        )
        size *= fan_out
    return Cluster(name="test", num_devices=size, device=device, levels=tuple(cluster_levels), codecs=codecs)


def simulated_s(cluster: Cluster, operation: str, algorithm: str, text: str, num_ranks: int) -> float:
    codec = codec_of(text)
    steps = coded(build(operation, algorithm, num_ranks, LENGTH), codec)
    return alone_s(in_bytes(steps, codec, 4, chunk_of(codec, 4)), links_of(cluster), 0.0)


@pytest.mark.parametrize("text", ["fp16", "qsgd(4)", "qsgd(8)", "onebit"])
@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [("all_reduce", "ring"), ("all_reduce", "shares"), ("all_reduce", "rabenseifner"), ("reduce_scatter", "star"),
     ("reduce_scatter", "ring"), ("all_gather", "ring"), ("all_gather", "halving")],
)  # fmt: skip
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_closed_forms_equal_the_simulated_steps(
    num_ranks: int, operation: CollectiveKind, algorithm: str, text: str
) -> None:
    here = cluster((num_ranks, 1e-9))
    elements = CodedElements(text, algorithm, 4)
    seconds = coded_s(Network(here), operation, 4 * LENGTH, Group(num_ranks), elements)
    assert seconds == pytest.approx(simulated_s(here, operation, algorithm, text, num_ranks), rel=2e-3)


@pytest.mark.parametrize("text", ["fp16", "qsgd(4)"])
def test_along_levels_only_messages_between_boxes_are_coded(text: str) -> None:
    here = cluster((2, 1e-10), (4, 1e-8))
    seconds = coded_s(Network(here), "all_reduce", 4 * LENGTH, Group(8), CodedElements(text, "star+ring@2x4", 4))
    expected = simulated_s(here, "all_reduce", "star+ring@2x4", text, 8)
    assert seconds == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("algorithm", ["butterfly", "shares", "dense-gather"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_selections_cost_what_their_expected_unions_send(num_ranks: int, algorithm: str) -> None:
    here = cluster((num_ranks, 1e-9))
    seconds = coded_s(
        Network(here), "all_reduce", 4 * LENGTH, Group(num_ranks), CodedElements("topk(1%)", algorithm, 4)
    )
    assert seconds == pytest.approx(simulated_s(here, "all_reduce", algorithm, "topk(1%)", num_ranks), rel=0.05)


def test_measured_codecs_replace_the_count_of_passes() -> None:
    plain = cluster((2, 1e-9), codecs=())
    measured = CodecTiming(codec="qsgd(4)", encode_s_per_byte=3e-9, decode_s_per_byte=1e-9)
    known = msgspec.structs.replace(plain, codecs=(measured,))
    assert CodecCosts(known).seconds_per_byte(codec_of("qsgd(4)")) == (3e-9, 1e-9)
    assert CodecCosts(known).seconds_per_byte(codec_of("qsgd(8)")) == CodecCosts(plain).seconds_per_byte(
        codec_of("qsgd(8)")
    )
    slower = coded_s(Network(known), "all_reduce", 4 * LENGTH, Group(2), CodedElements("qsgd(4)", "shares", 4))
    free = coded_s(
        Network(cluster((2, 1e-9))), "all_reduce", 4 * LENGTH, Group(2), CodedElements("qsgd(4)", "shares", 4)
    )
    # a rank encodes one half and decodes the other; then the sum of its half is encoded and decoded
    assert slower - free == pytest.approx(4 * LENGTH * (3e-9 + 1e-9), rel=1e-6)


def test_one_rank_sends_nothing() -> None:
    here = cluster((1, 1e-9))
    assert coded_s(Network(here), "all_reduce", 4096, Group(1), CodedElements("fp16", "ring", 4)) == 0
