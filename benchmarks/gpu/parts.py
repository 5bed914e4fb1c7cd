"""The parts of ``make gpu``, the most valuable first, and the seconds that each may take."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """A part. It is started only if ``least_s`` are left, and stopped after ``most_s``. ``several``: it needs several
    GPUs."""

    name: str
    what: str
    least_s: float
    most_s: float
    several: bool = False


PARTS = (
    Part("machine", "the devices, the driver, and a matrix product", 5, 90),
    Part("tests", "tests/gpu", 20, 110),
    Part("parity", "layouts and models beside one process, in float64 and in bfloat16", 20, 90),
    Part("gpt", "a GPT of 1.3 B parameters beside eager PyTorch and torch.compile", 40, 170),
    Part("ranks", "layouts of several GPUs beside one process, DDP, FSDP2, tensor parallel, pipelining", 60, 200, True),
    Part("launches", "a small GPT with and without graphs, compiled and not, beside PyTorch", 20, 80),
    Part("attention", "attention at 8,192 tokens", 15, 60),
    Part("float8", "products in float8 beside those of the rounded numbers, and steps beside bfloat16", 25, 60),
    Part("calibrate", "kernels, launches, copies and links of this machine", 20, 90),
    Part("llama", "a Llama-like model of 1.2 B parameters beside eager PyTorch and torch.compile", 40, 150),
    Part("foretold", "dry runs and predictions, by the catalog and as calibrated, beside what was measured", 20, 120),
)
