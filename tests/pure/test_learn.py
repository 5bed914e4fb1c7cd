"""Learning from runs: planted numbers are found, priors hold what runs do not tell, and bad tables are refused."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from meshwright.catalog import load_cluster, load_software
from meshwright.catalog.models import load_model
from meshwright.cli import run as cli
from meshwright.cost.memory import estimate_memory
from meshwright.cost.setup import Setup
from meshwright.cost.step import estimate_step
from meshwright.cost.uncertainty import reported_bytes
from meshwright.errors import FileFormatError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.software import Software, Spread
from meshwright.planner.cases import Case, read_cases
from meshwright.planner.learn import MEMORY_NUMBERS, TIME_NUMBERS, learn, with_profile
from meshwright.planner.trials import choose, learning_trials
from meshwright.prediction import learn_step, learn_table
from tests.pure.test_validate import ROW, table

DGX = "a100-80gb-dgx-hdr200x8"
START = load_software("torchtitan")
PREDICT = ["predict", "llama2-7b", "--cluster", DGX, "--global-batch", "8"]


def setups() -> list[Setup]:
    """Layouts of one model that differ in what limits them."""
    all_setups = []
    for name in ("llama2-7b", "gpt3-1b3"):
        for dp, tp, pp in ((8, 1, 1), (2, 4, 1), (2, 1, 4), (2, 2, 2)):
            for micro_batch in (1, 2, 4):
                for recompute in ("none", "full"):
                    all_setups.append(
                        Setup(
                            model=load_model(name), dp=dp, tp=tp, pp=pp, micro_batch=micro_batch, global_batch=64,
                            recompute=recompute, zero=1,
                        )
                    )  # fmt: skip
    return all_setups


def runs_of(truth: Software, *, start: Software = START, noise: float = 0.0, memory: str = "") -> list[Case]:
    """Runs as ``truth`` predicts them. ``memory``: the peak is known, or only whether it exceeds the device."""
    draw = random.Random(1)
    cases: list[Case] = []
    for setup in setups():
        true, known = (load_cluster(DGX, setup.world_size, software) for software in (truth, start))
        peak = estimate_memory(setup, true).peak_bytes
        failed = memory == "verdict" and peak > true.device.memory_bytes
        cases.append(
            Case(
                name=f"run {len(cases)}", setup=setup, cluster=known, out_of_memory=failed,
                measured_s=None if failed else estimate_step(setup, true).step_s * math.exp(draw.gauss(0.0, noise)),
                measured_peak_bytes=reported_bytes(setup, true) if memory == "peak" else None,
            )
        )  # fmt: skip
    return cases


def mean_error(cases: Sequence[Case], software: Software) -> float:
    errors = [
        abs(estimate_step(case.setup, msgspec.structs.replace(case.cluster, software=software)).step_s
            / (case.measured_s or 1.0) - 1)
        for case in cases
    ]  # fmt: skip
    return sum(errors) / len(errors)


# --- times -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"pace": 1.25}, {"attention": 0.6}, {"communication": 3.0}, {"host": 3.0}, {"step_s": 0.4}, {"traffic": 1.8}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_planted_number_is_predicted_on_runs_that_were_not_shown(changes: dict[str, float]) -> None:
    fields = {name: getattr(START, name) * value if name != "step_s" else value for name, value in changes.items()}
    truth = msgspec.structs.replace(START, **fields)
    cases = runs_of(truth, noise=0.01)
    shown, rest = cases[::2], cases[1::2]
    learned = learn(shown, START)
    assert mean_error(rest, learned.software) < 0.4 * mean_error(rest, START)
    assert learned.error is not None
    assert learned.error_before is not None
    assert learned.error < learned.error_before


def test_runs_as_predicted_change_nothing() -> None:
    learned = learn(runs_of(START), START)
    for number in learned.numbers:
        assert number.value == pytest.approx(number.before, rel=0.02, abs=1e-3)
    assert learned.error == pytest.approx(0.0, abs=0.1)
    assert learned.software.spread.step < START.spread.step
    assert learned.software.runs == len(setups())


def test_what_runs_do_not_tell_stays_where_it_was() -> None:
    """Runs on one device say nothing of communication, and what they tell of computing is told as told."""
    cases = [case for case in runs_of(msgspec.structs.replace(START, pace=1.4)) if case.setup.world_size == 8]
    alone = [
        msgspec.structs.replace(
            case,
            setup=msgspec.structs.replace(case.setup, dp=1, tp=1, pp=1, global_batch=64, zero=0),
            cluster=load_cluster(DGX, 1, START),
        )
        for case in cases
        if (case.setup.dp, case.setup.tp) == (8, 1)
    ]
    truth = load_cluster(DGX, 1, msgspec.structs.replace(START, pace=1.4))
    alone = [msgspec.structs.replace(case, measured_s=estimate_step(case.setup, truth).step_s) for case in alone]
    numbers = {number.name: number for number in learn(alone, START).numbers}
    assert set(numbers) == set(TIME_NUMBERS)
    assert not numbers["communication"].is_learned
    assert numbers["communication"].value == pytest.approx(START.communication)
    assert numbers["pace"].is_learned
    assert numbers["pace"].value > 1.2


def test_one_run_moves_the_prediction_about_half_the_way_and_says_what_it_cannot_tell() -> None:
    truth = msgspec.structs.replace(START, pace=1.3 * START.pace)
    cases = runs_of(truth)
    learned = learn(cases[:1], START)
    assert mean_error(cases[:1], learned.software) < 0.6 * mean_error(cases[:1], START)
    assert "one run cannot tell" in learned.notes[0]


def test_a_run_that_was_disturbed_does_not_move_the_others() -> None:
    cases = runs_of(START)
    cases[3] = msgspec.structs.replace(cases[3], measured_s=3 * (cases[3].measured_s or 0.0))
    assert mean_error(cases[4:], learn(cases, START).software) < 0.03


def test_mixed_stacks_in_one_table_are_noticed() -> None:
    halves = [runs_of(msgspec.structs.replace(START, pace=pace)) for pace in (0.8, 1.4)]
    mixed = [halves[index % 2][index] for index in range(0, len(halves[0]), 3)]
    assert any("may be of different software" in note for note in learn(mixed, START).notes)
    assert not learn(halves[0][::3], START).notes


# --- memory ----------------------------------------------------------------------------------------------------------


def test_peaks_teach_memory() -> None:
    truth = msgspec.structs.replace(START, activations=1.3, fragmentation=0.12)
    cases = runs_of(truth, memory="peak")
    learned = learn(cases[::2], START)
    assert set(TIME_NUMBERS) | set(MEMORY_NUMBERS) == {number.name for number in learned.numbers}
    for case in cases[1::2]:
        cluster = msgspec.structs.replace(case.cluster, software=learned.software)
        assert reported_bytes(case.setup, cluster) == pytest.approx(case.measured_peak_bytes, rel=0.06)
    assert learned.software.spread.memory < START.spread.memory


def test_runs_that_failed_teach_memory_too() -> None:
    truth = msgspec.structs.replace(START, activations=1.6)
    cases = runs_of(truth, memory="verdict")
    assert any(case.out_of_memory for case in cases)

    def wrong(software: Software) -> int:
        peaks = [
            estimate_memory(case.setup, msgspec.structs.replace(case.cluster, software=software)).peak_bytes
            for case in cases
        ]
        limits = [case.cluster.device.memory_bytes for case in cases]
        return sum((peak > limit) != case.out_of_memory for peak, limit, case in zip(peaks, limits, cases, strict=True))

    learned = learn(cases, START).software
    assert learned.activations > START.activations
    assert wrong(learned) < wrong(START)


# --- tables, choices and trials --------------------------------------------------------------------------------------


def test_bad_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="there is no run to learn from"):
        learn([], START)
    cases = runs_of(START)
    other = [*with_profile(cases[:1], load_software("deepspeed")), *cases[:2]]
    with pytest.raises(FileFormatError, match=r"the runs are of 2 stacks: deepspeed \(1\), torchtitan \(2\)"):
        learn(other, START)
    slow = msgspec.structs.replace(cases[0], measured_s=1000 * (cases[0].measured_s or 0.0))
    with pytest.raises(FileFormatError, match=r"run 0: step_time_s: .* times the predicted time, which no software"):
        learn([slow, cases[1]], START)
    mixed = table(tmp_path / "mixed.csv", {}, {"cluster": "h100-dgx-ndr400x8"})
    with pytest.raises(FileFormatError, match="the runs are of 2 clusters"):
        learn_table(mixed)
    with pytest.raises(FileFormatError, match="one: the run is of a a100-80gb, the cluster h100-dgx has h100"):
        learn_table(mixed, cluster="h100-dgx")
    with pytest.raises(FileFormatError, match="no row can be used: one: seq: it is blank"):
        learn_table(table(tmp_path / "bad.csv", {"seq": ""}))
    with pytest.raises(FileFormatError, match="a step takes more than 0 seconds"):
        learn_step(cases[0].setup, cases[0].cluster, [1.0, -1.0])
    with pytest.raises(FileFormatError, match="the table has 2 usable rows\n"):
        learning_trials(cases[:2], 2, 1)
    with pytest.raises(FileFormatError, match="0 is less than 1"):
        learning_trials(cases, 0, 1)


def test_a_column_names_the_software_of_a_row(tmp_path: Path) -> None:
    rows = [{"software": "torchtitan"}, {"software": ""}, {"software": "nonesuch"}]
    path = table(tmp_path / "t.csv", *rows, columns=(*ROW, "software"))
    (first, second), (left,) = read_cases(path, "deepspeed")
    assert (first.cluster.software.name, second.cluster.software.name) == ("torchtitan", "deepspeed")
    assert left.reason.startswith("software: unknown software 'nonesuch'")
    assert read_cases(path)[0][1].cluster.software == Software()


def test_the_choice_from_a_sweep_is_the_fastest_that_surely_fits() -> None:
    cases = [case for case in runs_of(START, memory="verdict") if case.setup.model.name == "llama2-7b"]
    choice = choose(cases)
    (sweep,) = choice.choices
    ran = [case for case in cases if case.measured_s]
    fastest = min(case.measured_s or 0.0 for case in ran)
    chosen = next(case for case in cases if case.name == sweep.case)
    assert not sweep.out_of_memory
    assert sweep.slower == pytest.approx((chosen.measured_s or 0.0) / fastest - 1)
    assert (sweep.rows, sweep.layouts, choice.failed) == (len(cases), len(cases), 0)
    assert choice.median == pytest.approx(100 * (sweep.slower or 0.0))


def test_a_choice_that_failed_is_counted() -> None:
    """Runs that failed though they surely fit: the choice is wrong, and says so."""
    cases = [case for case in runs_of(START) if case.setup.model.name == "gpt3-1b3"]
    best = min(cases, key=lambda case: case.measured_s or 0.0)
    failed = [
        msgspec.structs.replace(case, measured_s=None, out_of_memory=True) if case is best else case for case in cases
    ]
    choice = choose(failed)
    assert (choice.failed, choice.choices[0].out_of_memory, choice.choices[0].slower) == (1, True, None)
    assert choose(cases[:1]).choices == ()


def test_trials_judge_runs_that_were_not_learned() -> None:
    cases = runs_of(msgspec.structs.replace(START, pace=1.3), noise=0.02)
    trials = learning_trials(cases, 3, 4)
    assert trials.mape is not None
    assert trials.zero_shot_mape is not None
    assert trials.mape < 0.3 * trials.zero_shot_mape
    assert trials == learning_trials(cases, 3, 4), "draws are repeatable"
    assert trials.coverage is not None
    assert trials.coverage > 0.6


# --- commands --------------------------------------------------------------------------------------------------------


def test_the_commands_learn_and_use_what_was_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"case": f"{mb} {size}", "micro_batch": mb, "hidden": size, "heads": "16", "ffn": "", "kv_heads": "",
             "step_time_s": "1"} for mb in ("1", "2", "4") for size in ("2048", "1024")]  # fmt: skip
    path = table(tmp_path / "plain.csv", *rows)
    rows = [
        row | {"step_time_s": repr(1.3 * estimate_step(case.setup, case.cluster).step_s)}
        for row, case in zip(rows, read_cases(path)[0], strict=True)
    ]
    path = table(tmp_path / "runs.csv", *rows)
    target = tmp_path / "mine.toml"
    assert cli(["calibrate", "--from", str(path), "--output", str(target)]) == 0
    assert "6 runs: mean error of their times 23.1 % before" in capsys.readouterr().out
    learned = files.load(target, Cluster)
    assert learned.software.runs == 6
    assert cli(["validate", str(path), "--software", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mape"] < 3
    assert cli(["validate", str(path), "--choose", "--learn", "3", "--repeats", "2", "--json"]) == 0
    decoded = json.loads(capsys.readouterr().out)
    assert decoded["learning"]["mape"] < 0.5 * decoded["learning"]["zero_shot_mape"]
    assert len(decoded["choices"]["choices"]) == 2
    assert cli(["validate", str(path), "--choose", "--learn", "3", "--repeats", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 sweeps: 0 choices ran out of memory" in out
    assert "learned from 3 random runs, judged on the others, 2 draws" in out


def test_a_user_learns_from_three_logged_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.toml"
    asked = ["predict", "llama2-7b", "--cluster", DGX, "--devices", "8", "--tp", "4", "--global-batch", "16"]
    assert cli([*asked, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["estimate"]["step_s"]
    steps = ",".join(f"{factor * before:.4f}" for factor in (1.19, 1.2, 1.21))
    assert cli([*asked, "--measured", steps, "--output", str(target)]) == 0
    out = capsys.readouterr().out
    assert "learned from the measured steps" in out
    assert "one run cannot tell the numbers apart" in out
    assert cli([*asked[:2], "--cluster", str(target), *asked[4:], "--json"]) == 0
    after = json.loads(capsys.readouterr().out)["estimate"]["step_s"]
    assert 1.1 * before < after < 1.2 * before, "one run is not believed wholly"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["calibrate", "--from", "runs.csv", "--output", "x.json"], "--output: a cluster file ends in .toml, x.json"),
        (["calibrate", "--from", "runs.csv"], "--output: a table says nothing of this machine"),
        (["calibrate", "--from", "a.csv", "--from", "b.csv"], "2 sources are given, and one is a table"),
        (["calibrate", "--software", "torchtitan"], "--software: this machine is measured"),
        (["calibrate", "--from", "nowhere", "--software", "torchtitan"], "--software: the runs are ours"),
        (["calibrate", "--from", "nowhere"], "nowhere: there is no such directory"),
        (["calibrate", "--from", "runs.csv", "--if-stale"], "--if-stale: runs do not become stale"),
        (
            [*PREDICT, "--measured", "fast"],
            "'fast' are no seconds",
        ),
        ([*PREDICT, "--output", "x.toml"], "nothing is learned"),
        (["validate", "runs.csv", "--software", "nonesuch"], "unknown software 'nonesuch'"),
    ],
)
def test_mistakes_are_named(words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "runs.csv", {})
    assert cli(words) == 2
    assert problem in capsys.readouterr().err


def test_the_command_learns_from_peaks_and_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"case": f"{size}", "micro_batch": size, "global_batch": "64", "recompute": "none", "flash": "1",
             "peak_memory_bytes": peak, "status": status, "step_time_s": "" if status == "oom" else "3"}
            for size, peak, status in (("1", "9e9", "ok"), ("2", "1.2e10", "ok"), ("16", "", "oom"))]  # fmt: skip
    path, target = table(tmp_path / "runs.csv", *rows), tmp_path / "mine.toml"
    assert cli(["calibrate", "--from", str(path), "--output", str(target), "--json"]) == 0
    numbers = {number["name"] for number in json.loads(capsys.readouterr().out)["learned"]["numbers"]}
    assert set(MEMORY_NUMBERS) <= numbers
    assert load_software(target) == files.load(target, Cluster).software
    assert cli(["clusters", str(target)]) == 0
    assert "software: unknown: runs 3" in capsys.readouterr().out


def test_a_sure_profile_learns_too() -> None:
    certain = msgspec.structs.replace(START, spread=Spread(step=0.0, communication=0.0, host=0.0, memory=0.0))
    cases = with_profile(runs_of(msgspec.structs.replace(START, pace=1.3 * START.pace), memory="peak"), certain)
    learned = learn(cases[::4], certain)
    assert mean_error(cases, learned.software) < 0.5 * mean_error(cases, certain)


def test_a_table_may_name_cluster_files(tmp_path: Path) -> None:
    cluster = msgspec.structs.replace(load_cluster("a100-80gb-dgx"), name="mine")
    files.save(cluster, tmp_path / "mine.toml")
    path = table(tmp_path / "runs.csv", {"cluster": str(tmp_path / "mine.toml"), "step_time_s": "0.8"})
    assert learn_table(path).cluster.name == "mine"


def test_each_stack_of_a_table_is_learned_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"case": f"{name} {size}", "micro_batch": size, "software": name, "step_time_s": "1"}
            for name in ("megatron-lm", "nemo") for size in ("1", "2", "4", "8")]  # fmt: skip
    path = table(tmp_path / "plain.csv", *rows, columns=(*ROW, "software"))
    factors = {"megatron-lm": 1.5, "nemo": 0.8}
    for row, case in zip(rows, read_cases(path)[0], strict=True):
        row["step_time_s"] = repr(factors[row["software"]] * estimate_step(case.setup, case.cluster).step_s)
    path = table(tmp_path / "runs.csv", *rows, columns=(*ROW, "software"))
    assert cli(["validate", str(path), "--learn", "3", "--repeats", "2"]) == 0
    assert "each learned by itself: megatron-lm, nemo" in capsys.readouterr().out
    trials = learning_trials(read_cases(path)[0], 3, 2)
    assert (trials.software, trials.too_few) == (("megatron-lm", "nemo"), ())
    assert trials.mape is not None
    assert trials.zero_shot_mape is not None
    assert trials.mape < 0.6 * trials.zero_shot_mape


def test_plans_by_sizes_use_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama2-7b", "--cluster", DGX, "--ranks", "8", "--batch", "16", "--json"]
    step_s = {}
    for name in ("megatron-lm", "deepspeed"):
        assert cli([*asked, "--software", name]) == 0
        step_s[name] = json.loads(capsys.readouterr().out)["options"][0]["estimate"]["step_s"]
    assert step_s["deepspeed"] > step_s["megatron-lm"]
    assert cli(["plan", "mlp", "--ranks", "2", "--software", "deepspeed"]) == 2
    assert "is captured as it is" in capsys.readouterr().err
