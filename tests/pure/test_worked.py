"""Worked numbers: every example is computed, verdicts are those that were checked by hand, steps are all-reduces."""

import json
from functools import cache

import pytest

from meshwright import worked
from meshwright.cli import run as cli
from meshwright.errors import LayoutError
from meshwright.worked.line import compared, predicted

recompute = cache(worked.recompute)

WRONG = {
    "years-412": ["30 s a token, in the same lecture"],
    "footprint": ["GPT-2 has 1.9 B parameters"],
    "allreduce-table": ["parameter server: M N / bandwidth", "the ring has the best latency"],
}
"""Claims that do not hold; all others agree or round."""

MISSED = {
    "megatron-scaling": ["128 V100, tp = 2: 83 %", "512 V100, tp = 8: 74 %"],
    "percent-of-peak": ["AxoNN 40 B, 4,096 A100: 49 %", "AxoNN 160 B, 16,384 GCDs: 26 %"],
    "sparcml": [
        "VGG19, 4 bits, 8 nodes: step 1.55 x, communication 3.31 x as fast",
        "AlexNet, 4 bits, 16 nodes: step 1.3 x, communication 1.36 x as fast",
        "MLP on MNIST, 16 of 512 elements and 4 bits, 8 nodes: step 3.65 x, communication 4.53 x as fast",
        "the same on EC2: step 19.12 x, communication 22.97 x as fast",
        "speech recognition (LSTM of 60 M parameters, 128 GPUs): 2 weeks become 2 days",
    ],
}
"""Measurements that are not predicted within the points that were asked for."""


@pytest.mark.parametrize("name", worked.worked_names())
def test_verdicts(name: str) -> None:
    found = recompute(name)
    assert (found.id, bool(found.about)) == (name, True)
    assert [line.claim for line in found.lines if line.verdict == "claim wrong"] == WRONG.get(name, [])
    assert [line.claim for line in found.lines if line.verdict == "we differ"] == MISSED.get(name, [])
    assert all(line.ours and line.why for line in found.lines)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("ps-resnet50", ["25.56 M", "74.9 GB/s", "50 GB/s: full at 170 workers"]),
        ("years-412", ["1.000 ms", "12.4 M years"]),
        ("years-172", ["GPT-3 at 18.6% of peak"]),
        ("gpt4-layer", ["60 GB", "60 GB"]),
        ("tp-vs-pp", ["1", "7"]),
        # in bytes, 32 bits in place of 4 and the scales of 512 elements are 7.88
        (
            "sparcml",
            [
                "communication 7.92 x at 1 Gbit/s, 7.55 x at 10 Gbit/s; step 1.79 x",
                "communication 7.86 x at 1 Gbit/s, 7.49 x at 10 Gbit/s; step 4.09 x",
                "communication 12.09 x at 1 Gbit/s; step 6.88 x",
            ],
        ),
        ("bubbles", ["0.375", "0.75", "0.1875", "8", "4", "2 and 4 tensors a micro-batch"]),
    ],
)
def test_numbers(name: str, numbers: list[str]) -> None:
    assert [line.ours for line in recompute(name).lines][: len(numbers)] == numbers


def test_the_crossover_of_data_and_tensor_parallelism_is_found() -> None:
    assert recompute("dp-vs-tp").lines[0].ours == "2,731 rows"


def test_how_far_is_rounding() -> None:
    told = [compared("c", 100, found, "", "").verdict for found in (100.5, 104, 120)]
    assert told == ["agrees", "rounds", "claim wrong"]
    assert [predicted("c", 50, found, 5, "").verdict for found in (46, 44)] == ["agrees", "we differ"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["recompute", "bubbles"]) == 0
    assert "0.1875" in capsys.readouterr().out
    assert cli(["recompute", "bubbles", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["lines"][0]) == ["claim", "ours", "verdict", "why"]
    assert cli(["recompute", "buble"]) == 2
    assert "there is no worked example 'buble'\n  -> did you mean `bubbles`?" in capsys.readouterr().err
    with pytest.raises(LayoutError):
        recompute("")
