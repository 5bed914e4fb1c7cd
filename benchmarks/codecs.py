"""Are codecs cheap, and coded collectives fast? ``python -m benchmarks.codecs [--only PART]`` prints the verdicts.

Without ``--only``, the result file is written. The exit code is 1 if a target is missed.

kernels    A vector of 64 MiB of normal float32 is encoded and decoded chunk by chunk into another vector, as the
           executor of steps does it. The copy, ``b.copy_(a)`` of the same vectors, and all codecs take turns in one
           process of one thread. A selection is made of the whole vector and written into a vector of zeros.
sparse     Sparse all-reduces beside dense ones in two emulated boxes of two ranks (network namespaces joined by links
           of 1 Gbit/s, ``emulation/network.py``; as root, else nothing is judged). All take turns in the same
           processes, with one thread a rank: ranks wait for links most of the time, so that they may share cores.
steps      Training steps with codecs beside DistributedDataParallel with PyTorch's hooks, and the time to the loss of
           dense training (``benchmarks/codec_steps.py``), in the same boxes at 0.1 and 1 Gbit/s.
auto       Steps with ``codec="auto"`` beside no codec, both predicted (``benchmarks/codec_auto.py``), on two ranks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import codec_auto, codec_steps, report
from benchmarks.report import judged
from meshwright.bench.repeat import alternate
from meshwright.comm.groups import collectives
from meshwright.compress.coder import coder_of, draw_of
from meshwright.compress.stream import Stream
from meshwright.emulation.network import run_in_boxes, why_not
from meshwright.ir.codec import codec_of
from meshwright.ir.result import Check, Finding, Settings, Verdict
from meshwright.ir.statistics import ratio
from meshwright.runtime import launch

COMMAND = "python -m benchmarks.codecs"
GBIT = 1e9
ROUNDS = {"kernels": 31, "sparse": 7, "steps": codec_steps.ROUNDS, "auto": codec_auto.ROUNDS}
NUM_BYTES, DENSITY = 2**26, 0.01
DENSE = ("star+ring@2x2", "star+ring@2x2/8", "shares", "rabenseifner")
STREAMS = (
    "star+ring@2x2",
    "star+butterfly@2x2",
    "butterfly",
    "shares",
    "partitioned",
    "rabenseifner",
    "balanced",
    "dense-gather",
)
"""SparCML's recursive doubling is ``butterfly``; its split and all-gather are ``shares``, ``partitioned``,
``rabenseifner``; its split and dense all-gather is ``dense-gather``; ``balanced`` is Ok-Topk's."""
CHOSEN = ("butterfly", "shares", "star+butterfly@2x2", "star+ring@2x2")
"""Algorithms for elements of which each rank (along levels: each box) first chooses the largest."""
FASTER = 5.0


LIMITS = {"fp16": 2.0, "qsgd(8)": 2.0, "onebit": 3.0, "topk(1%)": 6.0}
"""The most that encoding and decoding may take, in times of a copy."""
COPY = "copy"
SETTINGS = "64 MiB"


# --- kernels ----------------------------------------------------------------------------------------------------------


def round_trip(text: str, values: Tensor, into: Tensor) -> Callable[[], None]:
    """A function that encodes ``values`` and decodes them into ``into``."""
    codec = codec_of(text)
    if codec.exchange == "merges":

        def selected() -> None:
            stream = Stream.select(values, codec)
            into.zero_()
            stream.add_to(into)

        return selected
    coder = coder_of(codec, values.dtype)
    message = torch.empty(coder.num_bytes(coder.chunk), dtype=torch.uint8)
    chunks = list(zip(values.split(coder.chunk), into.split(coder.chunk), strict=True))

    def coded() -> None:
        for place, (chunk, decoded) in enumerate(chunks):
            coder.encode(chunk, message, draw_of(place))
            coder.decode(message, decoded, add=False)

    return coded


def kernel_findings(rounds: int) -> list[Finding]:
    """Every codec that has a target, beside a copy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values = torch.randn(NUM_BYTES // 4, generator=torch.Generator().manual_seed(0))
        into = torch.empty_like(values)
        sides: dict[str, Callable[[], object]] = {text: round_trip(text, values, into) for text in LIMITS}
        seconds = alternate({COPY: lambda: into.copy_(values)} | sides, rounds=rounds, steps=1)
    finally:
        torch.set_num_threads(threads)
    return [
        judged(
            f"{text}, {SETTINGS} on one core: encode and decode in at most {limit:g} x a copy",
            {text: seconds[text], COPY: seconds[COPY]},
            text,
            limit,
            settings=SETTINGS,
            num_ranks=1,
            steps=1,
            losses={text: (), COPY: ()},
        )
        for text, limit in LIMITS.items()
    ]


# --- on every rank ---------------------------------------------------------------------------------------------------


def sparse(rounds: int) -> dict[str, list[float]]:
    """Seconds of dense all-reduces; of sparse ones of streams; and of sparse ones that choose their elements first."""
    torch.set_num_threads(1)
    launch.start("cpu")
    world = dist.group.WORLD
    assert world is not None
    ours, length, codec = collectives(world), NUM_BYTES // 4, codec_of(f"topk({100 * DENSITY:g}%)")
    draw = torch.Generator().manual_seed(dist.get_rank())
    given = torch.zeros(length)
    given[torch.randperm(length, generator=draw)[: int(DENSITY * length)]] = 1.0
    stream, total = Stream.select(given, codec), given.clone()
    ours.all_reduce(total, "sum", DENSE[0]).wait()
    full = torch.randn(length, generator=draw)
    value, residual = torch.zeros(length), torch.zeros(length)

    def of_stream(name: str) -> None:
        ours.coded_all_reduce(value, None, codec, 1, name, chosen=stream).wait()

    def of_elements(name: str) -> None:
        value.copy_(full)
        ours.coded_all_reduce(value, residual, codec, 1, name).wait()

    for name in STREAMS:
        if name != "balanced":  # it drops what is small
            of_stream(name)
            if not torch.equal(value, total):
                raise AssertionError(f"{name} differs from the dense sum at {int((value != total).sum())} elements")
    sides: dict[str, Callable[[], object]] = {}
    for name in DENSE:
        sides[f"dense {name}"] = partial(lambda name: ours.all_reduce(full, "sum", name).wait(), name)
    sides |= {f"streams {name}": partial(of_stream, name) for name in STREAMS}
    sides |= {f"elements {name}": partial(of_elements, name) for name in CHOSEN}
    return alternate(sides, rounds=rounds, steps=1, warmup_steps=1)


# --- judged ----------------------------------------------------------------------------------------------------------


def sparse_findings(rounds: int) -> list[Finding]:
    """2 boxes x 2 ranks, 1 Gbit/s: sparse all-reduces against the fastest dense one."""
    if missing := why_not():
        return [Check(target="sparse all-reduce", verdict="reported", measured=f"not measured: {missing}")]
    with tempfile.TemporaryDirectory() as name:
        seconds = run_in_boxes(
            partial(sparse, rounds), boxes=(0, 0, 1, 1), rates_bits_per_s=(GBIT, GBIT), directory=Path(name)
        )
    medians = {side: statistics.median(each) for side, each in seconds.items()}
    results: list[Finding] = []
    dense = _fastest(medians, "dense")
    for kind in ("streams", "elements"):
        best = _fastest(medians, kind)
        faster = ratio(seconds[dense], seconds[best])
        order = sorted((side for side in medians if side.startswith(kind)), key=medians.__getitem__)
        shares = ", ".join(f"{side.partition(' ')[2]} {medians[dense] / medians[side]:.2f}" for side in order)
        verdict: Verdict = "pass" if faster.low >= FASTER else "fail" if faster.high < FASTER else "undecided"
        results.append(
            Check(
                target=f"2 boxes x 2 ranks, emulated 1 Gbit/s, 64 MiB, 1 %: a sparse all-reduce of {kind} is at least "
                f"{FASTER:g} x as fast as a dense one",
                verdict=verdict if kind == "streams" else "reported",
                measured=f"{faster} against {dense.partition(' ')[2]}; {shares}",
                passed=int(verdict == "pass"),
                total=1,
            )
        )
    return results


def _fastest(medians: dict[str, float], kind: str) -> str:
    return min((side for side in medians if side.startswith(kind)), key=medians.__getitem__)


PARTS: dict[str, Callable[[int], list[Finding]]] = {
    "kernels": kernel_findings, "sparse": sparse_findings, "steps": codec_steps.findings, "auto": codec_auto.findings,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; write the result if all parts were measured."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part only")
    parser.add_argument("--rounds", type=int, default=0, help="alternating rounds, at least 5 (default: by part)")
    options = parser.parse_args(arguments)
    if 0 < options.rounds < 5:
        parser.error("a median needs at least 5 rounds")
    results = [finding for part in options.only or PARTS for finding in PARTS[part](options.rounds or ROUNDS[part])]
    if not options.only:
        timed = (
            "Encoding and decoding of all chunks of a vector, a copy of it, an all-reduce, or a training step, from "
            "when all ranks have met; sides take turns."
        )
        sizes = {"bytes": NUM_BYTES, "rounds": options.rounds or ROUNDS["kernels"]}
        settings = {SETTINGS: Settings(dtype="float32", ranks=1, threads=1, sizes=sizes)} | codec_auto.settings()
        text = (__doc__ or "").partition("is missed.")[2].strip()
        report.write("codecs", "Codecs", COMMAND, timed, settings, results, text)
    return report.alone(results)


if __name__ == "__main__":
    sys.exit(main())
