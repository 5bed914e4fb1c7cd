"""Search and remedies: what is found fits and divides, nothing better was passed over, and advice helps."""

import json
from typing import Any

import pytest

from meshwright.catalog import load_cluster
from meshwright.catalog.models import load_model
from meshwright.cli import run as cli
from meshwright.cli.layouts import varied
from meshwright.cost.memory import estimate_memory, verdict
from meshwright.cost.setup import Setup
from meshwright.cost.step import estimate_step
from meshwright.errors import ClusterError, LayoutError, PlanError
from meshwright.ir.codec import CANDIDATES, codec_of
from meshwright.ir.layout import Layout
from meshwright.ir.pipeline import SCHEDULES
from meshwright.planner.candidates import runs
from meshwright.planner.codecs import GAIN
from meshwright.planner.layout_words import layout_words, setup_of
from meshwright.planner.remedy import single_changes, smallest_change
from meshwright.planner.search import SEARCHED, search
from meshwright.prediction import predict
from meshwright.schedules.check import check
from meshwright.schedules.pipeline import build

DGX = "a100-80gb-dgx-hdr200x8"


@pytest.mark.parametrize(("model", "devices"), [("llama2-7b", 8), ("gpt3-175b", 128), ("mixtral-8x7b", 32)])
def test_what_is_found_uses_all_devices_and_fits(model: str, devices: int) -> None:
    cluster = load_cluster(DGX, devices)
    result = search(load_model(model), cluster, global_batch=256)
    assert result.options
    for option in (*result.options, *result.front):
        assert option.setup.world_size == devices
        assert option.verdict != "does not fit"
        assert option.estimate == estimate_step(option.setup, cluster)
    best = result.options[0]
    assert all(best.estimate.step_s <= other.estimate.step_s for other in result.options if other.verdict == "fits")
    memory = [option.memory.peak_bytes for option in result.front]
    assert memory == sorted(memory, reverse=True)
    assert result.explain().startswith(best.text)


def test_the_search_is_as_good_as_trying_everything() -> None:
    """Brute force over powers of two on 8 devices, without what the search does not weigh."""
    model, cluster = load_model("gpt3-6b7"), load_cluster(DGX, 8)
    result = search(model, cluster, global_batch=32)
    best = float("inf")
    for dp, tp, pp in [(d, t, 8 // d // t) for d in (1, 2, 4, 8) for t in (1, 2, 4, 8) if d * t <= 8]:
        for micro_batch in (1, 2, 4, 8):
            for recompute in ("none", "full"):
                for zero in (0, 1):
                    if 32 % (dp * micro_batch) or (zero and dp == 1):
                        continue
                    setup = Setup(
                        model=model, dp=dp, tp=tp, pp=pp, micro_batch=micro_batch, global_batch=32, zero=zero,
                        recompute=recompute, sequence_parallel=tp > 1,
                    )  # fmt: skip
                    if verdict(estimate_memory(setup, cluster), cluster) == "fits":
                        best = min(best, estimate_step(setup, cluster).step_s)
    assert result.options[0].estimate.step_s <= best


def test_devices_without_bfloat16_are_planned_in_float16(capsys: pytest.CaptureFixture[str]) -> None:
    """V100: the search, a prediction and the words of a layout take fp16, and bf16 is refused where it is asked for."""
    name, model = "v100-dgx2h-edr100x8", load_model("gpt3-6b7")
    cluster = load_cluster(name, 64)
    result = search(model, cluster, global_batch=64)
    assert result.options
    assert {option.setup.precision for option in (*result.options, *result.front)} == {"fp16"}
    assert any(option.setup.grid for option in search(model, cluster, global_batch=64, grids="only").options)
    assert predict(model, cluster, devices=64, global_batch=64, tp=8).setup.precision == "fp16"
    best = result.options[0].setup
    assert "precision=fp16" in layout_words(best)
    assert setup_of(layout_words(best), model, 64, 64, cluster.device) == best
    assert setup_of("tp=8", model, 64, 64, cluster.device).precision == "fp16"
    assert setup_of("tp=8", model, 64, 64, load_cluster(DGX, 64).device).precision == "bf16"
    for asked in (
        lambda: search(model, cluster, global_batch=64, precision="bf16"),
        lambda: predict(model, cluster, devices=64, global_batch=64, precision="bf16"),
        lambda: setup_of("tp=8,precision=bf16", model, 64, 64, cluster.device),
    ):
        with pytest.raises(LayoutError, match=r"precision 'bf16', which v100 does not compute in\n.*use fp16"):
            asked()
    arguments = ["gpt3-6b7", "--cluster", name, "--devices", "64", "--global-batch", "64", "--tp", "8"]
    assert cli(["predict", *arguments, "--precision", "bf16"]) == 2
    assert "use fp16" in capsys.readouterr().err
    assert cli(["plan", "gpt3-6b7", "--cluster", name, "--ranks", "64", "--batch", "64"]) == 0


def test_where_nothing_fits_the_nearest_is_named() -> None:
    result = search(load_model("megatron-1t"), load_cluster(DGX, 8), global_batch=8)
    assert not result.options
    assert result.explain() == "nothing fits"
    assert result.nearest is not None
    assert result.nearest.memory.peak_bytes > 80e9


def test_where_nothing_divides_it_is_said() -> None:
    with pytest.raises(LayoutError, match="no layout of 7 devices divides 32 heads, 32 layers and a batch of 5"):
        search(load_model("gpt3-6b7"), load_cluster("a100-80gb-box7"), global_batch=5)


def test_the_smallest_change_makes_it_fit() -> None:
    cluster = load_cluster(DGX, 64)
    setup = Setup(model=load_model("gpt3-175b"), tp=8, pp=8, global_batch=64, flash=False, precision="fp16")
    assert verdict(estimate_memory(setup, cluster), cluster) == "does not fit"
    change = smallest_change(setup, cluster)
    assert change is not None
    assert change.setup is not None
    assert verdict(estimate_memory(change.setup, cluster), cluster) != "does not fit"
    times = [
        estimate_step(changed_setup, cluster).step_s
        for _, changed_setup in single_changes(setup)
        if verdict(estimate_memory(changed_setup, cluster), cluster) == "fits"
    ]
    assert change.step_s == min(times)
    assert smallest_change(change.setup, cluster) is None


def test_predict_fills_in_dp_and_refuses_what_does_not_multiply() -> None:
    prediction = predict("llama2-7b", DGX, devices=16, tp=2, global_batch=64, zero=1)
    assert (prediction.setup.dp, prediction.verdict) == (8, "fits")
    assert 0.3 < prediction.mfu < 0.75
    with pytest.raises(ClusterError, match="the layout has 6 ranks, not 8"):
        predict("llama2-7b", DGX, devices=8, dp=3, tp=2, global_batch=6)
    with pytest.raises(ClusterError, match="it cannot have 16 devices"):
        predict("llama2-7b", "a100-80gb-dgx", devices=16, global_batch=16)


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("devices=64..512", "devices", [64, 128, 256, 512]),
        ("seq=2048,8192", "seq", [2048, 8192]),
        ("cluster=a,b", "cluster", ["a", "b"]),
    ],
)
def test_what_ifs(text: str, key: str, values: list[Any]) -> None:
    asked = {"cluster": "c", "devices": 8, "seq": 0, "batch": 512}
    assert [request[key] for request in varied(text, asked)] == values


@pytest.mark.parametrize("text", ["speed=1", "devices", "devices=x", "seq=0"])
def test_a_what_if_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        varied(text, {})


def test_what_ifs_say_what_costs_least_and_what_has_no_price(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama2-7b", "--cluster", DGX, "--ranks", "16", "--batch", "64", "--vary"]
    assert cli([*asked, f"cluster={DGX},a800-dgx-hdr200x8"]) == 0
    text = capsys.readouterr().out
    assert "no price is known of a800-dgx-hdr200x8: give one with --price" in text
    assert "no other cluster and layout takes as little time, memory and money for a sequence:" in text
    assert "$ " in text
    assert cli([*asked, "seq=2048,4096"]) == 0
    assert "no other" not in capsys.readouterr().out  # sequences of unlike lengths are not the same work
    assert cli([*asked, "devices=8..16", "--json"]) == 0
    what_ifs = json.loads(capsys.readouterr().out)
    assert all(option["usd"] > 0 for what_if in what_ifs for option in what_if["joint_front"])


@pytest.mark.parametrize("pp", [2, 3, 8])
def test_every_run_that_a_search_considers_can_be_built_and_checked(pp: int) -> None:
    seen = set()
    for layout in runs(Layout(pp=pp), 48):
        check(build(layout.schedule, layout.pp, layout.microbatches, layout.chunks))
        assert layout.resolved(pp) == layout
        seen.add(layout.schedule)
    assert seen == set(SCHEDULES) - {"gpipe", "message-driven"}


def test_the_nearer_axis_and_the_schedules_are_searched() -> None:
    model = load_model("gpt3-175b")
    result = search(model, load_cluster(DGX, 64), global_batch=512)
    setups = [option.setup for option in (*result.options, *result.front)]
    assert {setup.schedule for setup in setups if setup.pp > 1} == set(SEARCHED) - {"1f1b"}
    older = search(model, load_cluster(DGX, 64), global_batch=512, schedules=("1f1b", "interleaved", "zb-h1"))
    assert {option.setup.inner for option in (*older.options, *older.front)} == {"dp", "pp"}
    plain = search(model, load_cluster(DGX, 64), global_batch=512, schedules=("1f1b",))
    assert {option.setup.schedule for option in (*plain.options, *plain.front)} == {"1f1b"}
    assert plain.considered < result.considered


def test_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--devices", "64", "--tp", "8", "--pp", "8", "--global-batch", "64"]
    assert cli(["predict", "gpt3-175b", "--cluster", DGX, *layout, "--no-flash"]) == 1
    text = capsys.readouterr().out
    assert "does not fit" in text
    assert "smallest change: " in text
    assert cli(["predict", "gpt3-175b", "--cluster", DGX, *layout, "--recompute", "full", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "fits"
    assert cli(["plan", "llama2-7b", "--cluster", DGX, "--batch", "64"]) == 0
    assert "setups weighed" in capsys.readouterr().out
    assert cli(["plan", "llama2-7b", "--cluster", DGX, "--batch", "64", "--vary", "devices=8..32", "--json"]) == 0
    assert [what_if["devices"] for what_if in json.loads(capsys.readouterr().out)] == [8, 16, 32]
    assert cli(["plan", "llama2-7b", "--cluster", DGX, "--vary", "devices=8..16", "--scaling", "weak"]) == 0
    assert capsys.readouterr().out.startswith("weak scaling: the batch grows with the devices")
    assert cli(["plan", "llama2-7b"]) == 2
    assert "--cluster: no cluster is named" in capsys.readouterr().err
    assert cli(["models"]) == 0
    assert "llama3-405b" in capsys.readouterr().out
    assert cli(["models", "lama3-8b"]) == 2
    assert "did you mean `llama3-8b`" in capsys.readouterr().err


# --- codecs of gradients ---------------------------------------------------------------------------------------------

SLOW = "a100-40gb-box1-eth10x1"


def test_no_search_with_one_codec_finds_more_than_auto() -> None:
    """By its sizes, gpt2 on four devices over slow Ethernet: every codec in a search of its own."""
    cluster, model = load_cluster(SLOW, 4), load_model("gpt2")
    best_s = {
        codec: search(model, cluster, global_batch=16, codec=codec).options[0].step_s
        for codec in ("none", *CANDIDATES, "auto")
    }
    auto_s = best_s.pop("auto")
    assert auto_s <= (1 + GAIN) * min(best_s.values())
    assert auto_s < 0.7 * best_s["none"]
    assert best_s["none"] == search(model, cluster, global_batch=16).options[0].step_s


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("codec", ["qsgd(4)", "topk(1%)", "onebit"])
def test_codecs_change_the_exchange_and_the_memory_of_a_setup(codec: str, zero: int) -> None:
    sizes: dict[str, Any] = {"devices": 4, "global_batch": 16, "zero": zero}
    dense, coded = (predict("gpt2", SLOW, codec=text, **sizes) for text in ("", codec))
    assert dense.exchange is not None
    assert coded.exchange is not None
    saved_s = dense.exchange.seconds - coded.exchange.seconds
    assert coded.estimate.data_comm_s == pytest.approx(dense.estimate.data_comm_s - saved_s)
    assert dense.exchange.num_bytes is not None
    assert coded.exchange.num_bytes is not None
    assert coded.exchange.num_bytes < 0.4 * dense.exchange.num_bytes
    assert coded.exchange.coding_s > 0
    kept = 2 * 4 * dense.setup.model.parameters if codec_of(codec).feedback else 0
    assert coded.memory.residuals_bytes == pytest.approx(kept, rel=1e-4)


def test_codecs_by_sizes_decline_or_are_refused() -> None:
    shared = predict("gpt2", "generic-cpu-box2", devices=2, global_batch=2, precision="fp32", codec="auto")
    assert not shared.setup.codec, "ranks share memory"
    alone = predict("gpt2", SLOW, devices=1, global_batch=1, codec="auto")
    assert not alone.setup.codec
    assert alone.exchange is None
    for codec, zero, words in (("powersgd(4)", 0, "shape of each parameter"), ("randk(1%)", 1, "zero=1")):
        with pytest.raises(LayoutError, match=words):
            predict("gpt2", SLOW, devices=4, global_batch=4, codec=codec, zero=zero)
    with pytest.raises(PlanError, match="3 bits"):
        search(load_model("gpt2"), load_cluster(SLOW, 4), codec="qsgd(3)")


def test_the_command_line_takes_codecs_by_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["gpt2", "--cluster", SLOW]
    assert cli(["predict", *arguments, "--devices", "4", "--global-batch", "16", "--codec", "qsgd(4)"]) == 0
    assert "gradients coded with qsgd(4)" in capsys.readouterr().out
    assert cli(["plan", *arguments, "--ranks", "4", "--batch", "16", "--codec", "auto"]) == 0
    assert "codec=" in capsys.readouterr().out
