"""Worked numbers of gradient compression: what coded all-reduces can gain by their bytes, beside what was published."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.ir.codec import codec_of
from meshwright.schedules.collectives.coded import coded
from meshwright.schedules.collectives.coded_bytes import chunk_of, sent_bytes
from meshwright.schedules.collectives.operations import DENSE_GATHER, build
from meshwright.worked.line import Line, held

ITEM_BYTES = 4
LENGTH = 2**20
"""Elements of the vector: shares of bytes do not depend on it."""


class _Run(NamedTuple):
    """A published run: how much faster the step and its communication were."""

    what: str
    num_ranks: int
    codec: str
    algorithm: str
    step: float
    communication: float


RUNS = (
    _Run("VGG19, 4 bits, 8 nodes", 8, "qsgd(4)", "shares", 1.55, 3.31),
    _Run("AlexNet, 4 bits, 16 nodes", 16, "qsgd(4)", "shares", 1.30, 1.36),
    _Run("MLP on MNIST, 16 of 512 elements and 4 bits, 8 nodes", 8, "topk(3.125%)+qsgd(4)", DENSE_GATHER, 3.65, 4.53),
    _Run("the same on EC2", 8, "topk(3.125%)+qsgd(4)", DENSE_GATHER, 19.12, 22.97),
)
"""Renggli et al., "SparCML: High-Performance Sparse Communication for Machine Learning", SC 2019, arXiv:1802.08021, as
a lecture prints them."""


def byte_gain(num_ranks: int, text: str, algorithm: str) -> float:
    """How many times as many bytes a rank sends in a dense all-reduce, 2 (P-1)/P n, as in the coded one."""
    codec = codec_of(text)
    steps = coded(build("all_reduce", algorithm, num_ranks, LENGTH), codec)
    dense = 2 * (num_ranks - 1) / num_ranks * LENGTH * ITEM_BYTES
    return dense / max(sent_bytes(steps, codec, ITEM_BYTES, chunk_of(codec, ITEM_BYTES)))


def sparcml() -> Iterator[Line]:
    """Speed-ups of SparCML's quantized and sparse all-reduces, of the step and of its communication."""
    for run in RUNS:
        gain = byte_gain(run.num_ranks, run.codec, run.algorithm)
        share = (1 - 1 / run.step) / (1 - 1 / run.communication)
        least_s = 1 - share + share / gain
        within = run.communication <= gain and share <= 1
        why = f"so {share:.0%} of the step was communication; {run.codec} sends 1/{gain:.1f} of the dense bytes"
        if not within:
            why += ": bytes do not explain this gain, so the dense all-reduce beside it was slower than its bytes"
        yield Line(
            claim=f"{run.what}: step {run.step} x, communication {run.communication} x as fast",
            ours=f"at most {gain:.1f} x by bytes, step {1 / least_s:.2f} x",
            verdict="agrees" if within else "we differ",
            why=why,
        )
    yield held(
        "speech recognition (LSTM of 60 M parameters, 128 GPUs): 2 weeks become 2 days",
        f"{14 / 1.78:.1f} x: 14 days and 1.78 days",
        abs(14 / 1.78 / 7 - 1) < 0.15,
        f"a factor of 7; 4 bits alone send 1/{byte_gain(128, 'qsgd(4)', 'shares'):.1f} of the bytes",
    )
