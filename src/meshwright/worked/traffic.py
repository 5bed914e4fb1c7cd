"""Worked numbers of communication: bytes of several kinds of parallelism, all-reduces step by step, and pipeline
bubbles."""

import math
from collections.abc import Iterator

import msgspec

from meshwright.catalog import load_cluster
from meshwright.cost.collective import Group, Network
from meshwright.ir.cluster import Cluster
from meshwright.schedules import passes, pipeline
from meshwright.schedules.check import ScheduleReport, check
from meshwright.schedules.collectives.operations import all_reduce, build
from meshwright.schedules.collectives.steps import count
from meshwright.worked.line import Line, compared, held


def nvlink() -> Iterator[Line]:
    """Tensor parallelism inside a box of 8 devices, pipeline stages across boxes."""
    factor = 2 * 7 / 8
    measured = 160e9
    fabric = load_cluster("a100-80gb-dgx-hdr200x8").levels[1]
    yield compared(
        "links in the box must be 1.75 times the network", 1.75, factor, "{}",
        "in an all-reduce over 8, a device sends 2 x 7/8 of a tensor; it hands one tensor to the next stage. This "
        "counts one all-reduce for each stage. Megatron has two in forward of each layer, so a stage of l layers needs "
        f"{2 * factor:g} l: {16 * factor:g} times for 8 layers",
    )  # fmt: skip
    yield compared(
        "8 x HDR200: 200 GB/s nominal, 160 measured", measured / 1e9, fabric.links / fabric.beta_s_per_byte / 1e9,
        "{:.0f} GB/s", "the catalog's rate of the fabric, 80 % of nominal",
    )  # fmt: skip
    for device, link in (("A100", 300e9), ("A800", 200e9)):
        passes_it = link / measured >= factor
        yield held(
            f"{device}, {link / 1e9:.0f} GB/s one way: {'passes' if device == 'A100' else 'is bound by its links'}",
            f"{link / measured:.3g} over the measured network, {link / 200e9:.3g} over the nominal",
            passes_it == (device == "A100"),
            "compared with the nominal network it fails: the verdict depends on the measured rate"
            if passes_it
            else "both ratios are below 1.75",
        )


def tensor_or_pipeline() -> Iterator[Line]:
    """Bytes that tensor parallelism and pipeline parallelism send over a link in forward."""
    for ranks in (2, 8):
        tensor = count(build("reduce_scatter", "ring", ranks, ranks)).moved / ranks / ranks
        pipeline_bytes = 1 / ranks  # every rank of a stage sends its part
        yield compared(
            f"tensor parallelism over P = {ranks} moves P - 1 = {ranks - 1} times a pipeline's bytes",
            ranks - 1,
            tensor / pipeline_bytes,
            "{:g}",
            "in the reduce-scatter of a ring, each rank sends P - 1 pieces of d B / P; between stages, each rank sends "
            "one such piece",
        )


def data_or_tensor() -> Iterator[Line]:
    """A dense layer of 4,096 x 4,096 over two ranks: communication of its gradients or of its activations."""
    width, ranks = 4096, 2
    network, group = _bandwidth_only("a100-80gb-dgx-hdr200x8"), Group(ranks)
    data_s = network.collective_s("all_reduce", width * width, group)

    def tensor_s(rows: int) -> float:  # forward gathers outputs; backward adds up the terms of the input gradient
        gathered_s = network.collective_s("all_gather", rows * width, group)
        return gathered_s + network.collective_s("all_reduce", rows * width, group)

    low, high = 1, width
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if tensor_s(middle) < data_s else (low, middle)
    yield compared(
        "C = 4,096 over 2: tensor parallelism pays below 2,731 rows", 2731, low, "{:,} rows",
        "all-reduce of C x C gradients against all-gather of B x C outputs and all-reduce of B x C gradients: "
        "3 B C = 2 C C, B = 2 C / 3; found by bisection with the collectives' model, without latency",
    )  # fmt: skip
    yield held(
        "data parallelism moves the weights, whatever the batch; tensor parallelism the activations",
        f"B = 512: {tensor_s(512) / data_s:.3f} of data parallel; B = 8,192: {tensor_s(8192) / data_s:.1f}",
        tensor_s(512) < data_s < tensor_s(8192),
        "by the same cost model",
    )


def all_reduces() -> Iterator[Line]:
    """Parameters moved, rounds and time of all-reduces of M parameters over N = 8 workers."""
    workers = 8
    star, naive, ring, tree, butterfly = (
        count(all_reduce(name, workers, workers, server=True))
        for name in ("star", "naive", "ring", "tree", "butterfly")
    )
    level = load_cluster("a100-80gb-dgx-hdr200x8").levels[1]
    alpha, beta, rounds = level.alpha_s, level.beta_s_per_byte, math.log2(workers)
    crossover = alpha * (2 * (workers - 1) - 2 * rounds) / (beta * (2 * rounds - 2 * (workers - 1) / workers))
    shift = "the step list moves 2 (N - 1) M; the lecture has N in place of N - 1"
    all_send = f"{butterfly.rounds} rounds, in each of which all N send M"
    moved, slowest = "{:g} M", "{:g} M / bandwidth"
    yield compared("parameter server: 2 N M moved, 16 M", 16, star.moved / workers, moved, "to the server and back")
    yield compared(
        "naive: N (N - 1) M, 56 M", 56, naive.moved / workers, moved, "the lecture also prints N^2 M, which is 64 M"
    )
    for name, counted in (("ring", ring), ("tree", tree)):
        yield Line(
            claim=f"{name}: 2 N M, 16 M", ours=moved.format(counted.moved / workers), verdict="rounds", why=shift
        )
    yield compared("butterfly: N M log N, 24 M", 24, butterfly.moved / workers, moved, all_send)
    yield held(
        "parameter server: M N / bandwidth",
        slowest.format(star.busiest / workers),
        False,
        "N M enter the server and N M leave it; the claim holds only if both directions overlap",
    )
    limit = "2 (N - 1) / N tends to 2"
    yield compared("ring: 2 M / bandwidth", 2, ring.busiest / workers, slowest, limit, exact=0.15)
    yield compared("tree: 2 log N M / bandwidth", 6, tree.busiest / workers, slowest, "up the tree and down again")
    yield held(
        "a server receives O(N) messages at once, a rank of a ring O(1)",
        f"{star.fan_in} and {ring.fan_in}",
        (star.fan_in, ring.fan_in) == (workers, 1),
        f"rounds: server {star.rounds}, naive {naive.rounds}, ring {ring.rounds}, tree {tree.rounds}, butterfly "
        f"{butterfly.rounds}",
    )
    yield held(
        "the ring has the best latency",
        f"only above {crossover / 1e3:.0f} kB",
        False,
        f"for shorter vectors, a tree is faster: 2 log N messages follow each other, not 2 (N - 1) (HDR: "
        f"{alpha * 1e6:g} us and {1e-9 / beta:.0f} GB/s)",
    )


def bubbles() -> Iterator[Line]:
    """Idle time of pipelines, and the number of micro-batches that are in progress."""
    gpipe, plain, short = _report("gpipe", 4, 8), _report("1f1b", 4, 8), _report("1f1b", 4, 4)
    twice = _report("interleaved", 4, 8, 2)
    sent = [max(rank.sent_per_microbatch for rank in report.ranks) for report in (plain, twice)]
    timed = "the schedule, simulated action by action; backward takes twice as long as forward"
    counted = "counted in the schedule"
    more = f"{counted}; interleaved holds more, {twice.live_microbatches:g}"
    yield compared("p = 4, m = 8: (p - 1) / m = 0.375", 0.375, plain.bubble, "{:g}", timed)
    yield compared("p = 4, m = 4: 0.75", 0.75, short.bubble, "{:g}", timed)
    yield compared("two chunks: (p - 1) / (v m) = 0.1875", 0.1875, twice.bubble, "{:g}", timed)
    yield compared("GPipe keeps m = 8 micro-batches alive", 8, gpipe.live_microbatches, "{:g}", counted)
    yield compared("1F1B at most p = 4", 4, plain.live_microbatches, "{:g}", more)
    yield held(
        "interleaving sends v times as much",
        f"{sent[0]} and {sent[1]} tensors a micro-batch",
        sent[1] == 2 * sent[0],
        "sent by an inner rank, in both directions",
    )


def _report(name: str, ranks: int, microbatches: int, chunks: int = 1) -> ScheduleReport:
    return check(passes.add_communication(pipeline.build(name, ranks, microbatches, chunks)))


def _bandwidth_only(name: str) -> Network:
    """A cluster's network without latency, and without the losses of short rings."""
    cluster = load_cluster(name)
    levels = tuple(msgspec.structs.replace(level, alpha_s=0.0) for level in cluster.levels)
    device = msgspec.structs.replace(cluster.device, kind="cpu")  # CPU collectives need no kernel launch
    return Network(Cluster(name="without latency", num_devices=cluster.num_devices, device=device, levels=levels))
