"""Real text for the examples: this Python's own library, and how well its bytes are predicted."""

import math

import torch

import meshwright as mw
from meshwright.data.loaders import TextLoader
from meshwright.runtime.corpus import standard_library_text

TRIVIAL = "by the frequencies of bytes"


def texts() -> tuple[bytes, bytes]:
    """Training and held-out text: 2 MB and 50 kB of the help texts and sources of Python's standard library."""
    return standard_library_text(train_bytes=2_000_000, held_out_bytes=50_000)


def frequency_bits(train: bytes, held_out: bytes) -> float:
    """Bits per byte of a trivial prediction: each byte as often as in the training text."""
    counts = torch.bincount(torch.frombuffer(bytearray(train), dtype=torch.uint8).int(), minlength=256) + 1
    bits = -(counts / counts.sum()).log2()
    return float(bits[torch.frombuffer(bytearray(held_out), dtype=torch.uint8).int()].mean())


def held_out_bits(trainer: mw.Trainer, text: bytes, length: int, batch_size: int) -> float:
    """Bits per byte of the model on windows of a text. Metrics ``nats`` and ``bytes`` count, or else the loss."""
    nats = []
    for batch in TextLoader(text, length, batch_size, epochs=1):
        loss = trainer.evaluate(batch)
        metrics = trainer.metrics
        nats.append(float(metrics["nats"] / metrics["bytes"] if "nats" in metrics else loss))
    return sum(nats) / len(nats) / math.log(2)
