"""The evaluation of Alpa with captured models: its models, small searches in its spaces, and the command."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import meshwright as mw
from benchmarks import alpa as benchmark
from benchmarks import report
from meshwright.api.alpa import model_of, planned_pair
from meshwright.api.gshard import MoE, MoEConfig
from meshwright.bench.lint import lint
from meshwright.bench.provenance import CHANGED
from meshwright.cli import run as cli
from meshwright.cost.optimizer import OptimizerCost
from meshwright.ir import files
from meshwright.ir.result import Result
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, WideResNet, language_model_loss
from meshwright.planner.candidates import Space, more_microbatches, runs
from meshwright.planner.layout_search import Search
from meshwright.planner.time_limit import TimeLimit
from meshwright.worked import alpa
from meshwright.worked.alpa import KINDS, AlpaPair, Compared, PlannerResult, Sizes

TINY = AlpaPair("gpt", "tiny", Sizes(4, 64, 4), 2, (1.0, 1.0, 1.0, 1.0), batch=32)
SPARSE = AlpaPair("moe", "tiny", Sizes(2, 64, 4, 4), 2, (1.0, 1.0, 1.0, 1.0), batch=64)


def test_every_planner_of_a_pair_finds_a_plan_in_its_space() -> None:
    messages: list[str] = []
    result = planned_pair(SPARSE, messages.append)
    layouts = {kind: result.results[kind].layout for kind in KINDS}
    assert all(planner_result.step_s > 0 for planner_result in result.results.values()), result.results
    assert all("recompute full" in layout for layout in layouts.values()), layouts
    assert "pp" not in layouts["intra"]
    assert layouts["inter"].startswith("pp2, ")
    assert "1f1b" in layouts["inter"]
    assert result.joint_ratio >= 0.98
    assert any(SPARSE.title in message for message in messages)


@pytest.mark.parametrize(
    ("factors", "verdicts"),
    [
        ((1.0, 1.0, 1.0, 1.0), ["pass", "pass", "fail"]),  # Alpa's own joint plans are slower than others in places
        ((1.3, 1.3, 1.3, 1.3), ["fail", "pass", "fail"]),
        ((1.0, 1.0, 1.0, 1.1), ["pass", "pass", "pass"]),
        ((9.0, 1.0, 1.0, 1.1), ["pass", "fail", "pass"]),
    ],
)
def test_the_result_file_judges_errors_winners_and_the_joint_plan(
    factors: tuple[float, ...], verdicts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Predictions are given: those published, times a factor for each planner."""

    def predicted(pair: AlpaPair) -> Compared:
        each = pair.flops / pair.devices / 1e12
        results = {
            kind: PlannerResult(layout="dp1", step_s=each / rate / factor)
            if rate
            else PlannerResult(problem="too large")
            for kind, rate, factor in zip(KINDS, pair.published, factors, strict=True)
        }
        return Compared(pair, results)

    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "COMMIT", "0123456789ab")
    benchmark.write(list(benchmark.findings([predicted(pair) for pair in alpa.PAIRS])))
    written = files.load(tmp_path / "alpa.json", Result)
    assert lint(written) == ()
    assert [finding.verdict for finding in written.findings] == [*verdicts, *["reported"] * len(alpa.PAIRS)]


def test_finished_pairs_are_kept_for_their_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned: list[str] = []

    def plan(pair: AlpaPair) -> Compared:
        planned.append(report.COMMIT)
        return Compared(pair, {"manual": PlannerResult(layout="dp2", step_s=float(len(planned)))})

    monkeypatch.setattr(report, "RUNS", tmp_path)
    monkeypatch.setattr(benchmark, "planned_pair", plan)
    for commit in ("0123456789ab", "0123456789ab", "ba9876543210", f"ba9876543210{CHANGED}", f"ba9876543210{CHANGED}"):
        monkeypatch.setattr(report, "COMMIT", commit)
        assert benchmark.compared(TINY).results["manual"].step_s == len(planned)
    assert planned == ["0123456789ab", "ba9876543210", *[f"ba9876543210{CHANGED}"] * 2], "changed files are not kept"


def test_models_have_the_published_sizes() -> None:
    def billions(pair: AlpaPair) -> float:
        tied = alpa.VOCABULARY[pair.family] * pair.sizes.width  # the names count one matrix of embedding and head
        return (sum(parameter.numel() for parameter in model_of(pair).parameters()) - tied) / 1e9

    for pair in alpa.PAIRS:
        named = float(pair.name[:-1]) / (1 if pair.name.endswith("B") else 1e3)
        assert billions(pair) == pytest.approx(named, rel=0.05), pair.title


def test_attention_that_writes_its_scores_gives_the_same_logits() -> None:
    torch.manual_seed(0)
    fused = GPT(GPTConfig(layers=2, width=16, heads=2, vocabulary=11, sequence_length=8)).double()
    written = GPT(GPTConfig(layers=2, width=16, heads=2, vocabulary=11, sequence_length=8, writes_scores=True)).double()
    written.load_state_dict(fused.state_dict())
    tokens = torch.randint(11, (3, 6))
    torch.testing.assert_close(written(tokens), fused(tokens))


def test_only_the_wide_convolution_of_a_reduced_block_is_widened() -> None:
    with torch.device("meta"):
        block: Any = cast(Any, WideResNet((1,), width=8, widened=4, reduced=1).groups)[0][0]
    assert [getattr(block, f"conv{number}").weight.shape[0] for number in (1, 2, 3)] == [8, 32, 32]


def test_experts_take_the_two_best_as_far_as_they_have_room() -> None:
    torch.manual_seed(0)
    config = MoEConfig(layers=1, width=8, heads=2, experts=4, vocabulary=11, sequence_length=8, group=16)
    mixture: Any = MoE(config).double().blocks[0].mlp
    for parameter in (mixture.up, mixture.down):
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(mixture(x), by_hand(mixture, x))


def by_hand(mixture: Any, x: Tensor) -> Tensor:
    """Every token goes through its two best experts. In a group, first choices come before second choices; what finds
    no place is dropped."""
    groups = x.reshape(-1, mixture.group, x.shape[-1])
    result = torch.zeros_like(groups)
    for number, tokens in enumerate(groups):
        weights, chosen = mixture.gate(tokens).softmax(-1).topk(2)
        room = [mixture.capacity] * mixture.experts
        for choice in range(2):
            for token in range(len(tokens)):
                expert = int(chosen[token, choice])
                if room[expert] > 0:
                    room[expert] -= 1
                    inner = torch.relu(mixture.up[expert] @ tokens[token])
                    result[number, token] += weights[token, choice] * (mixture.down[expert] @ inner)
    return result.view_as(x)


def test_the_state_of_the_largest_mixture_is_smaller_than_its_devices_only_with_adafactor() -> None:
    pair = next(pair for pair in alpa.PAIRS if pair.title == "MoE 70B on 64 V100")
    parameters = sum(parameter.numel() for parameter in model_of(pair).parameters())
    memory = alpa.MEMORY * mw.Cluster.load(alpa.CLUSTER, pair.devices).device.memory_bytes * pair.devices

    def fits(optimizer: OptimizerCost) -> bool:
        return parameters * 2 * (2 + optimizer.states) < memory

    assert fits(alpa.optimizer_of("moe", "both"))
    assert not fits(alpa.optimizer_of("moe", "manual"))
    assert alpa.optimizer_of("gpt", "both") == alpa.optimizer_of("gpt", "manual") == alpa.MASTER_ADAM


def test_more_microbatches_are_considered_where_few_do_not_fit() -> None:
    single = mw.Layout(microbatches=32)
    assert more_microbatches(single, 1024) == mw.Layout(microbatches=64)
    assert more_microbatches(mw.Layout(microbatches=1024), 1024) is None
    few, last = mw.Layout(pp=2, microbatches=16), mw.Layout(pp=2, microbatches=32)
    assert more_microbatches(few, 1024) is None  # ``runs`` has 32
    assert more_microbatches(last, 1024) == mw.Layout(pp=2, microbatches=64)
    assert [run.microbatches for run in runs(mw.Layout(), 64, fewest=8)] == [8, 16, 32]


def test_a_search_in_another_space_shares_prices_and_finds_what_a_new_one_finds() -> None:
    cluster = mw.Cluster.load("v100-16gb-p3-eth25", 2)
    config = GPTConfig(layers=8, width=64, heads=4, vocabulary=128, sequence_length=64)
    with torch.device("meta"):
        tokens = torch.zeros(32, 64, dtype=torch.int64)
        graph = mw.capture(GPT(config), language_model_loss, {"tokens": tokens, "targets": tokens})

    def search(space: Space) -> Search:
        clock = TimeLimit(None, lambda what: None)
        return Search(graph, 2, cluster, PlanLowering, alpa.MASTER_ADAM, False, 1e10, "both", False, clock, space=space)

    stages = Space(schedules=("1f1b",), recompute=("selective", "full"), holds=lambda shape: shape.pp == 2)
    first = search(Space())
    first.run()
    again, new = first.within("both", stages), search(stages)
    for each in (again, new):
        each.run()
    plans = [each.best() for each in (again, new)]
    assert again.prices is first.prices
    assert plans[0].layout == plans[1].layout
    assert (plans[0].layout.pp, plans[0].layout.schedule, plans[0].layout.recompute) == (2, "1f1b", "selective")


def test_the_command_compares_the_pairs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(alpa, "PAIRS", (TINY,))
    assert cli(["recompute", "alpa-gpt", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    pair, error, winners, joint, memory = output["lines"]
    assert pair["claim"] == "GPT tiny on 2 V100: manual = intra = inter = both fastest"
    assert pair["why"].count("1f1b") >= pair["why"].count("pp2") > 0
    assert (error["verdict"], winners["ours"], joint["verdict"]) == ("claim wrong", "1 of 1", "agrees")
    assert memory["ours"] == "4 of 4 right"
