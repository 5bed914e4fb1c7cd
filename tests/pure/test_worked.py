"""Worked numbers: every example has an answer, verdicts are those that were checked by hand, and closed forms equal
brute force."""

import itertools
import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import msgspec
import pytest

from meshwright import worked
from meshwright.catalog import load_cluster, with_software
from meshwright.catalog.models import load_network, make_model
from meshwright.cli import run as cli
from meshwright.cost.setup import Setup
from meshwright.cost.step import estimate_step
from meshwright.errors import FileFormatError, LayoutError
from meshwright.ir import files
from meshwright.ir.result import Result, Utilization
from meshwright.planner.inter_op.stage_prices import StagePrices
from meshwright.planner.layerwise import divide_layers
from meshwright.planner.workspace import KernelChoice
from meshwright.schedules.collectives.operations import ALL_REDUCE, all_reduce
from meshwright.worked import kept, planning, pruning
from meshwright.worked.algorithms import executed
from meshwright.worked.alpa import AlpaPair, Sizes
from meshwright.worked.divisions import every_division
from meshwright.worked.line import compared, predicted

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
recompute = cache(partial(worked.recompute, results=RESULTS))

LECTURES = {
    "allreduce-table", "alexnet", "alexnet-two-gpus", "alpa", "alpa-pruning", "alpha-beta", "bubbles", "cards-petaflop",
    "chain", "cross-entropy-cat", "dp-vs-tp", "footprint", "gpt4-layer", "inter-intra", "jellybean", "megatron-scaling",
    "mu-cudnn", "nvlink-1.75", "percent-more", "percent-of-peak", "ps-resnet50", "sobel", "softmax-784x10", "sparcml",
    "staged", "tp-vs-pp", "tree-7", "utilization", "weak-scaling-axonn", "xor", "years-172", "years-412",
}  # fmt: skip
"""The names of all examples that the lectures have."""

WRONG = {
    "years-412": ["30 s a token, in the same lecture"],
    "footprint": ["GPT-2 has 1.9 B parameters"],
    "allreduce-table": ["parameter server: M N / bandwidth", "the ring has the best latency"],
    "percent-more": [
        "MegaScale: 2,166.3 PF on 12,288 a100-80gb are 55 %",
        "Google: 4,480 PF on 55,094 tpu-v5e are 44.67 %",
    ],
    "cards-petaflop": ["16 a100-80gb: about 1 PFLOP/s"],
}
"""Claims that do not hold; all others agree or round."""

MISSED = {
    "megatron-scaling": ["128 V100, tp = 2: 83 %"],
    "percent-of-peak": ["AxoNN 40 B, 4,096 A100: 49 %", "AxoNN 160 B, 16,384 GCDs: 26 %"],
    "sparcml": [
        "VGG19, 4 bits, 8 nodes: step 1.55 x, communication 3.31 x as fast",
        "AlexNet, 4 bits, 16 nodes: step 1.3 x, communication 1.36 x as fast",
        "MLP on MNIST, 16 of 512 elements and 4 bits, 8 nodes: step 3.65 x, communication 4.53 x as fast",
        "the same on EC2: step 19.12 x, communication 22.97 x as fast",
        "speech recognition (LSTM of 60 M parameters, 128 GPUs): 2 weeks become 2 days",
    ],
    "weak-scaling-axonn": [
        "5 B on 512 a100-40gb: 80.8 PF, 50.6 %",
        "10 B on 1,024 a100-40gb: 197.8 PF, 61.9 %",
        "20 B on 2,048 a100-40gb: 352.5 PF, 55.2 %",
        "40 B on 4,096 a100-40gb: 620.1 PF, 48.5 %",
        "the curve on a100-40gb, with one factor for AxoNN's software",
        "5 B on 512 mi250x: 40.4 PF, 41.2 %",
        "10 B on 1,024 mi250x: 77.3 PF, 39.4 %",
        "20 B on 2,048 mi250x: 145.7 PF, 37.2 %",
        "40 B on 4,096 mi250x: 295.9 PF, 37.7 %",
        "80 B on 8,192 mi250x: 571.4 PF, 36.4 %",
        "the curve on mi250x, with one factor for AxoNN's software",
    ],
    "utilization": [
        "large matrix products reach 80 % of a chip",
        "typical code reaches 10-15 % of a chip",
        "the same, as a product whose rows are multiplied one at a time",
    ],
    "mu-cudnn": ["up to 4.54 x as fast (single convolutions of DeepBench, on GPUs)"],
}
"""Measurements that are not predicted within the points that were asked for."""


def test_every_example_of_the_lectures_has_an_answer() -> None:
    assert {*worked.worked_names(), *worked.SEARCHED} >= LECTURES
    assert all(recompute(name).lines for name in worked.worked_names())


@pytest.mark.parametrize("name", worked.worked_names())
def test_verdicts(name: str) -> None:
    example = recompute(name)
    assert (example.id, bool(example.about)) == (name, True)
    assert [line.claim for line in example.lines if line.verdict == "claim wrong"] == WRONG.get(name, [])
    assert [line.claim for line in example.lines if line.verdict == "we differ"] == MISSED.get(name, [])
    assert all(line.ours and line.why for line in example.lines)


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
        ("alpha-beta", ["p = 8, 1 MiB: 1450.1 us simulated, 1450.1 us by the formula"]),
        ("tree-7", ["11 and 14", "35, 35, 35, 35, 35, 35, 35"]),
        (
            "percent-more",
            ["55.2 % of 12,288 chips", "56.5 %", "44.6 % of 50,944 chips", "41.3 %"],
        ),
        ("cards-petaflop", ["50.0 % of their 2,000 TFLOP/s", "20.0 % of their 4,992 TFLOP/s"]),
        ("jellybean", ["7.485 $/h at accuracy 56.59"]),
        ("bubbles", ["0.375", "0.75", "0.1875", "8", "4", "2 and 4 tensors a micro-batch"]),
    ],
)
def test_numbers(name: str, numbers: list[str]) -> None:
    assert [line.ours for line in recompute(name).lines][: len(numbers)] == numbers


def test_the_crossover_of_data_and_tensor_parallelism_is_found() -> None:
    assert recompute("dp-vs-tp").lines[0].ours == "2,731 rows"


def test_the_hidden_fraction_of_collectives_gives_the_published_step() -> None:
    cluster = load_cluster(planning.A100, 4096)
    setup = Setup(
        model=make_model("gpt", layers=38, hidden=9216, heads=72, vocabulary=51200, sequence=2048),
        dp=4096, grid=(1, 1, 256), micro_batch=2, global_batch=8192, recompute="full",
    )  # fmt: skip
    step = planning.published_step(setup, cluster, 48.5)
    assert step.percent > 55
    assert 0 < step.hidden < step.usual
    overlapping = msgspec.structs.replace(cluster.software, hidden=step.hidden)
    again = estimate_step(setup, with_software(cluster, overlapping)).step_s
    assert again == pytest.approx(step.published_s, rel=1e-3), "1 % of the collectives is never hidden"
    assert "it follows if collectives were 1" in step.why
    slower = planning.published_step(setup, cluster, 40)
    assert slower.hidden < 0
    assert "even if nothing overlapped, kernels must have been" in slower.why


def test_how_far_is_rounding() -> None:
    verdicts = [compared("c", 100, computed, "", "").verdict for computed in (100.5, 104, 120)]
    assert verdicts == ["agrees", "rounds", "claim wrong"]
    assert [predicted("c", 50, prediction, 5, "").verdict for prediction in (46, 44)] == ["agrees", "we differ"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["recompute", "bubbles"]) == 0
    assert "0.1875" in capsys.readouterr().out
    assert cli(["recompute", "bubbles", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["lines"][0]) == ["claim", "ours", "verdict", "why"]
    assert cli(["recompute", "buble"]) == 2
    assert "there is no worked example 'buble'\n  -> did you mean `bubbles`?" in capsys.readouterr().err
    with pytest.raises(LayoutError):
        recompute("")


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_values_are_summed_as_the_steps_say(name: str) -> None:
    values = [float(2**rank) for rank in range(7)]
    assert executed(all_reduce(name, 7, 1), values)[-1] == [127.0] * 7


def every_pipeline(prices: StagePrices, devices: int, layer: int = 0) -> Iterator[list[float]]:
    """The seconds of the stages of every way to cut the layers from ``layer`` on, on exactly so many devices."""
    if layer == prices.num_layers and devices == 0:
        yield []
    for last, (index, submesh) in itertools.product(range(layer, prices.num_layers), enumerate(prices.submeshes)):
        if submesh.devices <= devices:
            seconds = float(prices.seconds[layer, last, index].min())
            for rest in every_pipeline(prices, devices - submesh.devices, last + 1):
                yield [seconds, *rest]


def test_pruning_finds_what_trying_every_pipeline_finds() -> None:
    pair = AlpaPair("gpt", "small", Sizes(8, 512, 8), 4, (None, None, None, None), batch=256)
    prices = pruning.prices_of(pair)
    best = min(sum(each) + (pruning.MICROBATCHES - 1) * max(each) for each in every_pipeline(prices, 4))
    whole, pruned = pruning.both(prices, 4)
    assert whole.step_s == pytest.approx(best, rel=1e-12)
    assert pruned.step_s == pytest.approx(best, rel=1e-12)
    assert pruned.entries < whole.entries / 2


def test_divisions_are_enumerated() -> None:
    table = [KernelChoice("a", 1, 1.0, 0), KernelChoice("b", 2, 1.0, 0), KernelChoice("c", 3, 1.0, 0)]
    divisions = {"".join(piece.name for piece in pieces) for pieces in every_division(table, 4)}
    assert divisions == {"aaaa", "aab", "bb", "ac"}


def test_towers_take_half_of_the_time_of_one_gpu_and_some_for_their_exchange() -> None:
    net, cluster = load_network("alexnet-2012"), load_cluster(planning.GPUS, 2)
    towers_s = planning.towers_s(net, cluster)
    free = msgspec.structs.replace(cluster.levels[0], alpha_s=0.0, beta_s_per_byte=1e-18)
    assert towers_s > planning.towers_s(net, msgspec.structs.replace(cluster, levels=(free,)))
    alone = divide_layers(net, load_cluster("gtx-580-box1", 1), images=planning.BATCH, precision="fp32")
    assert 0.5 * alone.step_s < towers_s < 0.6 * alone.step_s


# --- result files ----------------------------------------------------------------------------------------------------


def test_without_a_result_file_nothing_is_measured(tmp_path: Path) -> None:
    example = worked.recompute("utilization", results=tmp_path)
    assert [(line.verdict, line.ours) for line in example.lines] == [
        ("not measured", "there is no utilization.json")
    ] * 4
    assert example.lines[1].claim == "typical code reaches 10-15 % of a chip"
    assert "`make bench-utilization` in a checkout writes the file" in example.lines[0].why


def test_a_result_file_without_the_finding_is_refused(tmp_path: Path) -> None:
    result = files.load(RESULTS / "serving.json", Result)
    files.save(msgspec.structs.replace(result, findings=result.findings[1:]), tmp_path / "serving.json")
    with pytest.raises(FileFormatError, match="result serving: it has no finding that begins with 'published"):
        worked.recompute("jellybean", results=tmp_path)


def test_utilization_is_read_from_the_file_of_the_benchmark() -> None:
    result = files.load(Path(__file__).parent / "results" / "honest.json", Result)
    (utilization,) = (each for each in result.findings if isinstance(each, Utilization))
    product = msgspec.structs.replace(utilization, target="matrix product: part of the peak", fraction=0.81)
    step = msgspec.structs.replace(utilization, target="naive step: part of the peak", fraction=0.35)
    small = msgspec.structs.replace(utilization, target="step of small operators: part of the peak", fraction=0.12)
    lines = list(kept.utilization(msgspec.structs.replace(result, findings=(step, product, small))))
    assert [(line.claim, line.verdict) for line in lines] == [
        ("large matrix products reach 80 % of a chip", "agrees"),
        ("typical code reaches 10-15 % of a chip", "we differ"),
        ("the same, as a step of small operators", "agrees"),
        ("the same, as a product whose rows are multiplied one at a time", "not measured"),
    ]
    assert "of 112 GFLOP/s (nominal: 3.5 GHz" in lines[0].why


def test_a_part_of_a_nominal_peak_is_also_one_of_the_measured_peak() -> None:
    result = files.load(Path(__file__).parent / "results" / "honest.json", Result)
    (utilization,) = (each for each in result.findings if isinstance(each, Utilization))
    notes = {"other_peaks": {"measured: the fastest product": utilization.peak.flops_per_s / 2}}
    product = msgspec.structs.replace(utilization, target="matrix product: part of the peak", fraction=0.4, notes=notes)
    line = next(kept.utilization(msgspec.structs.replace(result, findings=(product,))))
    assert line.verdict == "we differ"
    assert line.ours == "40.0% of the peak, 80% of the 56 GFLOP/s of the fastest product that was measured"
    assert "a nominal peak counts all cores as whole ones" in line.why


def test_examples_with_models_are_computed_by_what_is_given() -> None:
    line = compared("c", 1, 1, "one", "told")
    assert worked.recompute("chain", captured=lambda name: [line]).lines == (line,)
