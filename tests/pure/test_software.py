"""Profiles of software: what each number does to a prediction, which profiles there are, and intervals."""

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.catalog import load_cluster, load_software, software_names
from meshwright.catalog.models import load_model
from meshwright.cli import run as cli
from meshwright.cost.memory import Memory, estimate_memory
from meshwright.cost.setup import Setup
from meshwright.cost.step import StepEstimate, estimate_step
from meshwright.cost.uncertainty import memory_interval, reported_bytes, step_interval
from meshwright.errors import ClusterError, FileFormatError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.interval import interval, step_deviation
from meshwright.ir.software import Software, Spread

DGX = "a100-80gb-dgx-hdr200x8"


def setup(**changes: object) -> Setup:
    layout: dict[str, Any] = {"dp": 4, "tp": 2, "pp": 2, "micro_batch": 2, "global_batch": 64, "flash": True}
    return Setup(model=load_model("llama2-7b"), **(layout | changes))


def estimate(software: Software, name: str = DGX, **changes: object) -> StepEstimate:
    asked = setup(**changes)
    return estimate_step(asked, load_cluster(name, asked.world_size, software))


def memory(software: Software, **changes: object) -> Memory:
    asked = setup(**changes)
    return estimate_memory(asked, load_cluster(DGX, asked.world_size, software))


# --- what the numbers do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "slower", "part"),
    [
        ("pace", 1.5, "compute_s"), ("matmul", 0.7, "compute_s"), ("attention", 0.5, "compute_s"),
        ("traffic", 2.0, "compute_s"), ("communication", 2.0, "tensor_comm_s"), ("communication", 2.0, "data_comm_s"),
        ("communication", 2.0, "pipeline_comm_s"), ("host", 3.0, "host_s"), ("optimizer_bytes", 66.0, "optimizer_s"),
        ("loss_bytes", 146.0, "compute_s"), ("step_s", 0.5, "other_s"),
    ],
)  # fmt: skip
def test_a_number_of_the_profile_changes_its_part_of_the_step(number: str, slower: float, part: str) -> None:
    plain, changed = estimate(Software()), estimate(msgspec.structs.replace(Software(), **{number: slower}))
    assert getattr(changed, part) > getattr(plain, part)
    assert changed.step_s > plain.step_s


@given(st.floats(0.5, 2.0))
def test_pace_multiplies_computing_and_nothing_else(pace: float) -> None:
    plain, changed = (
        estimate(software, dp=1, tp=1, pp=1, global_batch=2) for software in (Software(), Software(pace=pace))
    )
    assert changed.compute_s == pytest.approx(pace * plain.compute_s)
    assert changed.optimizer_s == pytest.approx(pace * plain.optimizer_s)
    assert (changed.data_comm_s, changed.tensor_comm_s) == (0.0, 0.0)


def test_the_rest_of_a_step_is_added_once() -> None:
    for pp in (1, 2):
        plain, changed = (estimate(Software(step_s=seconds), pp=pp, dp=8 // pp) for seconds in (0.0, 0.25))
        assert changed.step_s == pytest.approx(plain.step_s + 0.25)


def test_overlap_hides_as_much_as_the_software_can() -> None:
    none, some, most = (
        estimate(Software(hidden=hidden), pp=1, dp=8, tp=2, overlap="all", zero=1).step_s for hidden in (0.0, 0.6, 0.9)
    )
    assert none > some > most


def test_eager_code_is_slower_and_keeps_more_than_fused_or_compiled() -> None:
    fused, eager = (estimate(Software(code=code)).compute_s for code in ("fused", "eager"))
    assert eager > 1.03 * fused
    assert estimate(Software(code="eager"), compiled=True).compute_s == fused
    kept = [memory(Software(code=code)).activations_bytes for code in ("fused", "eager")]
    assert kept[1] > 1.1 * kept[0]
    scores = [estimate(Software(code=code), flash=False).compute_s for code in ("fused", "eager")]
    assert scores[1] - scores[0] > eager - fused, "eager code passes over the scores more often"


def test_float8_operands_are_cast_at_the_cost_that_the_software_has() -> None:
    free, cast = (estimate(Software(float8_bytes=size), "h100-dgx-ndr400x8", precision="fp8") for size in (0.0, 5.0))
    assert cast.compute_s > free.compute_s
    assert (
        estimate(Software(float8_bytes=5.0), "h100-dgx-ndr400x8").compute_s
        == estimate(Software(), "h100-dgx-ndr400x8").compute_s
    ), "bfloat16 is not cast"


@pytest.mark.parametrize(
    ("number", "value", "part"),
    [
        ("activations", 1.5, "activations_bytes"), ("gradient_bytes", 6.0, "gradients_bytes"),
        ("bucket_bytes", 2.0**30, "buffers_bytes"), ("context_bytes", 2.0**32, "context_bytes"),
        ("peer_bytes", 2.0**30, "peers_bytes"),
        ("fragmentation", 0.2, "fragmentation_bytes"),
    ],
)  # fmt: skip
def test_a_number_of_the_profile_changes_its_part_of_memory(number: str, value: float, part: str) -> None:
    plain, changed = memory(Software()), memory(msgspec.structs.replace(Software(), **{number: value}))
    assert getattr(changed, part) > getattr(plain, part)
    assert changed.peak_bytes > plain.peak_bytes


def test_the_parts_of_memory_add_up() -> None:
    memory_estimate = memory(Software(fragmentation=0.1))
    parts = [getattr(memory_estimate, name) for name in memory_estimate.__struct_fields__ if name.endswith("_bytes")]
    assert sum(parts) == pytest.approx(memory_estimate.peak_bytes)
    assert memory_estimate.fragmentation_bytes == pytest.approx(0.1 * memory_estimate.allocated_bytes)


def test_logits_and_scores_take_the_bytes_that_the_software_needs() -> None:
    big = {"pp": 1, "dp": 8, "tp": 2, "micro_batch": 8, "global_batch": 64, "recompute": "full"}
    tokens, words = 8 * 4096, load_model("llama2-7b").vocabulary
    low, high = (memory(Software(logit_bytes=size), **big).ends_bytes for size in (20.0, 30.0))
    assert high - low == pytest.approx(10.0 * tokens * words / 2)
    kept = [memory(Software(score_bytes=size), flash=False).activations_bytes for size in (4.0, 8.0)]
    stage = setup()
    scores = stage.tokens * stage.model.heads / 2 * stage.model.sequence
    assert kept[1] - kept[0] == pytest.approx(4.0 * scores * 16 * 2), "16 layers, 2 micro-batches in flight"


def test_memory_is_reported_as_the_software_logs_it() -> None:
    asked = setup()
    cluster = load_cluster(DGX, asked.world_size)
    peak = estimate_memory(asked, cluster)

    def reported(name: str) -> float:
        software = msgspec.structs.replace(Software(fragmentation=0.1), reported=name)
        return reported_bytes(asked, msgspec.structs.replace(cluster, software=software))

    assert reported("allocated") == pytest.approx(peak.allocated_bytes)
    assert reported("device") == pytest.approx(1.1 * peak.allocated_bytes + peak.context_bytes + peak.peers_bytes)
    assert reported("reserved") == pytest.approx(1.1 * peak.allocated_bytes)
    assert reported("allocated_last") < reported("allocated"), "the first stage has more micro-batches in flight"


# --- profiles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", software_names())
def test_a_profile_of_the_catalog_says_where_its_numbers_are_from(name: str) -> None:
    profile = load_software(name)
    assert profile.name == name
    assert len(profile.source) > 20
    assert profile.runs == 0


def test_the_stacks_of_the_field_have_profiles() -> None:
    wanted = {
        "megatron-lm",
        "megatron-core",
        "nemo",
        "torchtitan",
        "deepspeed",
        "hugging-face",
        "llm-foundry",
        "meshwright",
    }
    assert wanted <= set(software_names())


def test_a_profile_is_found_by_name_in_a_file_and_in_a_cluster_file(tmp_path: Path) -> None:
    profile = Software(name="mine", pace=1.2)
    files.save(profile, tmp_path / "mine.toml")
    files.save(load_cluster(DGX, software=profile), tmp_path / "cluster.toml")
    for name in ("mine.toml", "cluster.toml"):
        assert load_software(tmp_path / name) == profile
    assert load_cluster(str(tmp_path / "cluster.toml")).software == profile
    assert files.load(tmp_path / "cluster.toml", Cluster).software == profile
    files.save(load_cluster(DGX), tmp_path / "plain.toml")
    with pytest.raises(ClusterError, match="the cluster file says nothing of its software"):
        load_software(tmp_path / "plain.toml")
    assert b"software" not in files.encode_toml(load_cluster(DGX)), "a cluster without a profile says nothing of it"


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("MosaicML", "llm-foundry"),
        ("hugging_face", "hugging-face"),
        ("Megatron Core", "megatron-core"),
        ("NeMo", "nemo"),
    ],
)
def test_profiles_have_other_names(alias: str, name: str) -> None:
    assert load_software(alias).name == name


def test_bad_profiles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"unknown software 'torchtitn'\n  -> did you mean `torchtitan`"):
        load_software("torchtitn")
    with pytest.raises(FileFormatError, match="cannot read the file"):
        load_software(tmp_path / "none.toml")
    (tmp_path / "typo.toml").write_text("paze = 1.2\n")
    with pytest.raises(FileFormatError, match="paze"):
        load_software(tmp_path / "typo.toml")
    for text, problem in (("pace = 90", "pace: 90 is not between"), ("[spread]\nstep = -1", "spread.step: -1 is not")):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(ClusterError, match=problem):
            load_software(tmp_path / "bad.toml")
    with pytest.raises(ClusterError, match=r"hidden: 1\.5 is not between 0 and 1"):
        load_cluster(DGX, software=Software(hidden=1.5))


def test_the_command_lists_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["clusters", "--software"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in software_names())
    assert cli(["clusters", "cpu-local", "--software"]) == 2
    assert "leave it out" in capsys.readouterr().err


# --- intervals -------------------------------------------------------------------------------------------------------


@given(st.floats(1e-3, 1e3), st.floats(0.0, 1.0))
def test_an_interval_holds_four_fifths_of_a_lognormal(value: float, deviation: float) -> None:
    limits = interval(value, deviation)
    assert limits.low <= value <= limits.high
    assert limits.low * limits.high == pytest.approx(value**2)
    if deviation > 1e-3:
        law = NormalDist(math.log(value), deviation)
        assert law.cdf(math.log(limits.high)) - law.cdf(math.log(limits.low)) == pytest.approx(0.8)


@given(st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_parts_of_a_step_are_uncertain_by_their_share(communication: float, host: float) -> None:
    spread = Spread(step=0.1, communication=0.4, host=0.5)
    expected = 0.1**2 + (0.4 * communication) ** 2 + (0.5 * host) ** 2
    assert step_deviation(spread, communication, host) ** 2 == pytest.approx(expected)


def test_intervals_follow_from_the_profile() -> None:
    sure, unsure = (Software(spread=Spread(step=step, memory=step)) for step in (0.05, 0.2))
    narrow, wide = (step_interval(estimate(software), software) for software in (sure, unsure))
    assert wide.low < narrow.low < estimate(sure).step_s < narrow.high < wide.high
    peaks = [memory_interval(memory(software), software) for software in (sure, unsure)]
    assert peaks[1].high > peaks[0].high > memory(sure).peak_bytes
