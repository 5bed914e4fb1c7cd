"""The command line in this process: help, plans, clusters, verification, and short runs on one rank."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright import api, config
from meshwright.catalog import load_cluster
from meshwright.cli import run as cli
from meshwright.cli.calibrate import measure_rank
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.interval import interval
from meshwright.ir.layout import Layout
from meshwright.ir.ledger import Ledger
from meshwright.ir.plan import Plan
from meshwright.ir.program import RankPrograms
from meshwright.ir.software import Software, Spread
from meshwright.ir.summary import RankTimes
from meshwright.ir.trace import Trace
from meshwright.models import classification_loss
from meshwright.runtime.loop import HeldOut
from meshwright.runtime.verify import Record, Verification, compare
from tests.distributed.pool import Ranks

SMALL = ["--model.layers", "1", "--model.width", "32", "--data.sequence_length", "16", "--data.max_bytes", "100000"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a busy machine, the threads of a small model mostly wait for each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "digits.toml"
    path.write_text(
        '[model]\nname = "mlp"\nsizes = [64, 16, 10]\n[data]\nkind = "digits"\nbatch_size = 32\nheld_out = 0.2\n'
        "[optimizer]\nlr = 1e-2\n[train]\nsteps = 6\nlog_every = 2\ncheckpoint_every = 4\nranks = 1\n"
    )
    return path


@pytest.mark.parametrize(
    "command",
    ["demo", "train", "report", "plan", "simulate", "verify", "schedule", "collectives", "calibrate", "clusters", "ui"],
)
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Examples" in text
    assert f"meshwright {command}" in text


def test_help_does_not_wait_for_torch() -> None:
    program = "import sys; from meshwright.cli import run; run(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_version_and_wrong_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["--version"]) == 0
    assert capsys.readouterr().out == f"meshwright {mw.__version__}\n"
    assert cli(["trian"]) == 2
    assert "No such command 'trian'. Did you mean 'train'?" in capsys.readouterr().err
    assert cli(["plan", "gtp"]) == 2
    assert capsys.readouterr().err.startswith("meshwright: gtp: neither a file nor a model\n  -> did you mean `gpt`?")


def test_train_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["train", "any.toml", "--keys"]) == 0
    assert re.search(r"^--optimizer.lr +0.001 +adamw$", capsys.readouterr().out, re.MULTILINE)


def test_a_defect_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(name: str) -> None:
        raise ZeroDivisionError("out of order")

    monkeypatch.setattr(api, "load_cluster", broken)
    assert cli(["clusters", "cpu-local"]) == 1
    text = capsys.readouterr().err
    match = re.fullmatch(r"meshwright: unexpected ZeroDivisionError: out of order\n  -> .* is in (\S+)\n", text)
    assert match
    path = Path(match[1])
    assert "in broken" in path.read_text()
    path.unlink()


# --- plan, clusters, verify ------------------------------------------------------------------------------------------


def test_plan_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["plan", "gpt", "--tp", "2", *SMALL]) == 0
    text = capsys.readouterr().out
    assert text.startswith("GPT on cpu-local: dp=1 x tp=2, 2 ranks, global batch 8\n")
    assert re.search(r"blocks\.\*\.attention\.qkv +h@tp +\w+@tp \+[\d.e-]+ ms", text)


def test_plan_prints_what_a_rank_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt", "--layout.dp", "2", "--layout.pp", "2", "--layout.microbatches", "2", *SMALL, "--program"]
    assert cli([*words, "--rank", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("rank 3, stage 1 of 2\n  holds parameters: ")
    assert re.search(r"^backward: \d+ nodes, [\d.]+ \wFLOP$", text, re.MULTILINE)
    assert re.search(r"  all-reduce over dp \(2 ranks, \w+.*\): [\d.]+ KiB, gradient of ", text)
    assert re.search(r"  receives from the stage before: received \(.*\), [\d.]+ KiB", text)
    assert cli([*words, "--rank", "1", "--json"]) == 0
    decoded = files.decode(capsys.readouterr().out.encode(), RankPrograms, where="output")
    assert [program.stage for program in decoded.programs] == [0]
    assert all(node.outputs for node in decoded.programs[0].phase("forward").nodes)
    assert cli([*words, "--rank", "4"]) == 2
    assert "there is no rank 4" in capsys.readouterr().err
    assert cli(["plan", "llama3-8b", "--cluster", "h100-dgx", "--program"]) == 2
    assert "--program: llama3-8b is not captured; its layouts are compared by its sizes" in capsys.readouterr().err


def test_plan_diff_lists_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("a.json", ["--dp", "2"]), ("b.json", ["--tp", "2"]), ("c.json", ["--dp", "2"])):
        assert cli(["plan", "gpt", *words, *SMALL, "--output", name]) == 0
    capsys.readouterr()
    assert cli(["plan", "diff", "a.json", "c.json"]) == 0
    assert capsys.readouterr().out == "the plans are the same\n"
    assert cli(["plan", "diff", "a.json", "b.json"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"layout +dp2 -> tp2\n", text)
    assert re.search(r"predicted step +[\d.]+ ms -> [\d.]+ ms \([+-][\d.]+%\)", text)
    assert re.search(r"stored blocks\.0\.mlp\.up\.weight +whole -> dim 0@tp", text), text
    assert re.search(r"blocks\.\*\.mlp +b@dp -> f@tp", text), text
    assert cli(["plan", "diff", "a.json", "b.json", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["differences"]
    assert {"what": "layout", "old": "dp2", "new": "tp2"} in rows
    assert cli(["plan", "diff", "a.json"]) == 2
    assert "1 plans are given" in capsys.readouterr().err
    assert cli(["plan", "diff", "a.json", "none.json"]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("dp=1,tp=2", r"why not tp2: [\d.]+ ms a step, .* GiB a rank, [\d.]+% slower: .* ms more of"),
        ("dp=3", r"why not dp3: not possible: dp=3 x tp=1 needs 3 ranks, there are 2"),
    ],
)
def test_plan_says_why_another_layout_was_not_chosen(
    asked: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["plan", "gpt", "--dp", "2", *SMALL, "--why-not", asked]) == 0
    text = capsys.readouterr().out
    assert re.search(answer, text), text


@pytest.mark.parametrize(
    ("asked", "problem"),
    [("dp:2", "'dp:2' is not a size"), ("pd=2", "'pd=2' is not a size or option"), ("zero=7", "zero")],
)
def test_plan_refuses_a_layout_that_is_none(asked: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["plan", "gpt", "--dp", "2", *SMALL, "--why-not", asked]) == 2
    assert problem in capsys.readouterr().err.lower()


def test_searches_of_each_kind_stand_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt", "--ranks", "2", "--cluster", "cpu-local", *SMALL]
    assert cli([*words, "--only", "each", "--json"]) == 0
    rows = {row["only"]: row for row in json.loads(capsys.readouterr().out)["searches"]}
    assert set(rows) == {"both", "intra", "inter"}
    assert "pp2" in rows["inter"]["layout"]
    assert "pp" not in rows["intra"]["layout"]
    assert rows["both"]["step_s"] <= 1.02 * min(rows["intra"]["step_s"], rows["inter"]["step_s"])
    assert rows["inter"]["communicated_bytes"] < rows["intra"]["communicated_bytes"], "stages communicate less"
    assert rows["inter"]["waiting_s"] > rows["intra"]["waiting_s"], "and wait more"
    assert cli([*words, "--only", "intra"]) == 0
    assert "pp2" not in capsys.readouterr().out
    assert cli([*words, "--only", "all"]) == 2
    assert "'all' is no kind of search" in capsys.readouterr().err


def test_plan_names_the_changes_that_make_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Every change that is named fits, if it is made."""
    words = ["plan", "gpt", "--dp", "2", *SMALL]
    assert cli([*words, "--json"]) == 0
    plan = files.decode(capsys.readouterr().out.encode(), Plan, where="output")
    assert plan.prediction is not None
    limit = f"{int(plan.prediction.peak_memory_bytes * 0.8 / 1024)}KiB"
    assert cli([*words, "--memory", limit]) == 0
    changes = re.findall(
        r"it fits with (\w+) = \"?(\w+)\"?: [\d.]+ ms a step, [\d.e-]+ GiB a rank", capsys.readouterr().out
    )
    assert changes
    for name, value in changes:
        if name in ("microbatches", "zero", "recompute"):
            assert cli([*words, "--memory", limit, f"--layout.{name}", value]) == 0
            assert "memory: does not fit" not in capsys.readouterr().out, (name, value)


def test_plan_is_for_the_cluster_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["plan", "mlp", "--ranks", "8", "--cluster", "a100-80gb-dgx-hdr200x8", "--json"]) == 0
    plan = files.decode(capsys.readouterr().out.encode(), Plan, where="output")
    assert (plan.cluster, plan.mesh.world_size, plan.layout.dp) == ("a100-80gb-dgx-hdr200x8", 8, 8)


def test_plan_says_whether_memory_holds_it(capsys: pytest.CaptureFixture[str]) -> None:
    for memory, verdict in (("4GiB", "fits"), ("100KiB", "does not fit")):
        assert cli(["plan", "gpt", "--dp", "1", *SMALL, "--memory", memory]) == 0
        text = capsys.readouterr().out
        assert re.search(r"^  predicted: [\d.]+ ms a step, [\d.]+ GiB a rank$", text, re.MULTILINE)
        assert f"  memory: {verdict} in " in text
    assert cli(["plan", "gpt", *SMALL, "--layout.plan", "auto", "--ranks", "1", "--memory", "100KiB"]) == 2
    assert "memory: no layout fits in" in capsys.readouterr().err
    assert cli(["plan", "gpt", "--memory", "much"]) == 2
    assert "--memory: 'much' is not a size" in capsys.readouterr().err
    Path("taken").write_text("")
    assert cli(["plan", "gpt", "--dp", "1", *SMALL, "--output", "taken/plan.json"]) == 2
    assert "cannot write the file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("gpt --batch 4", "--batch"),
        ("gpt --report page.html", "--report"),
        ("llama3-8b --cluster h100-dgx --tp 2", "--tp"),
        ("llama3-8b --cluster h100-dgx --layout.pp 2", "--layout.pp"),
        ("resnet50 --cluster h100-dgx --seq 8", "--seq"),
    ],
)
def test_plan_refuses_what_means_nothing_there(words: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["plan", *words.split()]) == 2
    stderr = capsys.readouterr().err
    assert f"{option}: " in stderr
    assert "-> leave" in stderr


def test_simulate_compares_schedules_under_jitter(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file.write_text(run_file.read_text().replace("[64, 16, 10]", "[64, 64, 64, 64, 10]"))
    layout = ["--layout.dp", "1", "--layout.pp", "2", "--layout.microbatches", "4", "--ranks", "2"]
    names = ["--schedule", "1f1b", "--schedule", "message-driven"]
    arguments = ["simulate", str(run_file), *layout, *names, "--seeds", "3", "--jitter", "0.3"]
    assert cli([*arguments, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["schedules"]
    assert (first["schedule"], second["schedule"]) == ("1f1b", "message-driven")
    for times in (first, second):
        assert times["quiet_s"] > 0
        assert times["worst_s"] >= times["mean_s"] > 0
    assert second["peak_bytes"] >= first["peak_bytes"]
    limited = ["simulate", str(run_file), *layout, "--layout.in_flight", "2", *names, "--seeds", "1", "--json"]
    assert cli(limited) == 0, "only the schedule that has a limit takes it"
    assert json.loads(capsys.readouterr().out)["schedules"][1]["peak_bytes"] < second["peak_bytes"]
    assert cli(["simulate", str(run_file), "--seeds", "3"]) == 2
    assert "one step is simulated, without --schedule" in capsys.readouterr().err


def test_simulate_plays_a_step(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--layout.dp", "1", "--layout.pp", "2", "--layout.microbatches", "4", "--ranks", "2"]
    assert cli(["simulate", str(run_file), *layout, "--trace", "step.json"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^a step takes [\d.]+ ms$", text, re.MULTILINE)
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["0", "1"]
    assert json.loads(Path("step.json").read_text())["traceEvents"]
    seconds = []
    for more in ([], ["--slow", "1=1e6"]):
        assert cli(["simulate", str(run_file), *layout, *more, "--json"]) == 0
        seconds.append(files.decode(capsys.readouterr().out.encode(), Trace, where="output").duration_s)
    assert seconds[1] > 1.2 * seconds[0]
    assert cli(["simulate", str(run_file), *layout, "--slow", "2=3"]) == 2
    assert "there is no rank 2" in capsys.readouterr().err
    assert cli(["simulate", str(run_file), *layout, "--slow", "fast"]) == 2
    assert "'fast' is not RANK=FACTOR" in capsys.readouterr().err


def test_a_written_plan_is_what_train_runs(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["plan", str(run_file), "--dp", "1", "--output", "plan.json"]) == 0
    assert cli(["train", str(run_file), "--layout.plan", "plan.json", "--train.steps", "1"]) == 0
    capsys.readouterr()
    ran = files.load("runs/digits/plan.json", Plan)
    assert ran == files.load("plan.json", Plan)


def test_clusters_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["clusters"]) == 0
    assert re.search(r"^cpu-local +2\+ +generic-cpu", capsys.readouterr().out, re.MULTILINE)
    assert cli(["clusters", "cpu-local", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_devices"] == 2
    assert cli(["clusters", "a100-80gb-dgx-hdr200x8"]) == 0
    assert "8 together" in capsys.readouterr().out


def test_verify_passes_on_one_rank(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["verify", str(run_file), "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["pass"] * 4
    assert "update: model after 2 steps" in lines[-1]


def verified(layout: Layout) -> tuple[Verification, ...]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = {"inputs": torch.randn(4, 8), "label": torch.tensor([0, 1, 2, 3])}
    rows = mw.verify(model, classification_loss, batch, layout, max_grad_norm=0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return rows


def test_verify_compares_two_ranks_with_one(ranks: Ranks) -> None:
    for layout in (Layout(dp=2), Layout(tp=2)):
        first, second = ranks(2, verified, layout)
        assert first == second
        assert [row.quantity for row in first] == [
            "forward: loss", "backward: gradients", "losses of 3 steps", "update: model after 3 steps",
        ]  # fmt: skip
        assert all(row.ok and row.difference <= row.allowed for row in first)


class Casting(torch.nn.Module):
    """Normalises in float32, as many models do: in float64 that is two more operators."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.float()
        scale = hidden.square().mean(-1, keepdim=True).rsqrt().to(inputs.dtype)
        scores: torch.Tensor = self.down(self.up(inputs * scale).relu())
        return scores


CASTING = {"inputs": torch.arange(32.0).sin().view(4, 8), "label": torch.tensor([0, 1, 2, 3])}


def verified_by_plan(path: str) -> tuple[Verification, ...]:
    torch.manual_seed(0)
    return mw.verify(Casting(), classification_loss, CASTING, path)


def test_verify_takes_a_plan_of_the_model_s_own_dtype(ranks: Ranks, tmp_path: Path) -> None:
    graph = mw.capture(Casting(), classification_loss, CASTING)
    doubled = {**CASTING, "inputs": CASTING["inputs"].double()}
    assert graph.fingerprint != mw.capture(Casting().double(), classification_loss, doubled).fingerprint
    path = tmp_path / "plan.json"
    files.save(mw.plan(graph, devices=2, layout=Layout(tp=2)), path)
    for rows in ranks(2, verified_by_plan, str(path)):
        assert len(rows) == 4
        assert all(row.ok for row in rows)


def test_a_difference_is_named_and_fails() -> None:
    def record(weight: float) -> Record:
        loss = [torch.tensor(2.0), torch.tensor(1.5)]
        state = {"v": torch.zeros(2), "w": torch.tensor([10.0, weight], dtype=torch.float64)}
        return Record(loss, {"w": torch.ones(2)}, state)

    assert [row.ok for row in compare(record(1.0), record(1.0))] == [True] * 4
    rows = compare(record(1.0 + 2e-8), record(1.0))
    assert [row.ok for row in rows] == [True, True, True, False]
    assert rows[-1].where == "w"
    assert rows[-1].difference == pytest.approx(2e-8, rel=1e-6)
    assert rows[-1].allowed == pytest.approx(1e-8)
    assert not compare(record(float("nan")), record(1.0))[-1].ok
    lost = Record([torch.tensor(2.0)], {}, {})
    assert [row.where for row in compare(lost, Record([torch.tensor(2.0)], {"w": torch.zeros(1)}, {}))][1].startswith(
        "w"
    )


def test_a_failed_verification_has_exit_code_1(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Verification(quantity="forward: loss", difference=1.0, allowed=1e-9, where="step 1", ok=False)
    monkeypatch.setattr(api, "verify_run", lambda *_: (wrong,))
    assert cli(["verify", str(run_file)]) == 1
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "FAIL",
        "forward:",
        "loss",
        "1.00e+00",
        "1.00e-09",
        "step",
        "1",
    ]


def test_captured_plans_take_the_software_of_their_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step_s = {}
    for name, pace in (("usual", 1.0), ("slow", 2.0)):
        software = Software(name=name, pace=pace, spread=Spread(step=0.1))
        files.save(load_cluster("cpu-local", software=software), tmp_path / f"{name}.toml")
        asked = ["plan", "mlp", "--ranks", "1", "--cluster", str(tmp_path / f"{name}.toml")]
        assert cli(asked) == 0
        text = capsys.readouterr().out
        assert re.search(rf"a step takes [\d.]+ to [\d.]+ ms in 80 % of runs \(software {name}\)", text)
        assert re.search(r"memory: fits in [\d.]+ GiB a rank \(chance 100%\)", text)
        assert cli([*asked, "--json"]) == 0
        prediction = files.decode(capsys.readouterr().out.encode(), Plan, where="output").prediction
        assert prediction is not None
        assert prediction.interval_s == interval(prediction.step_s, 0.1)
        step_s[name] = prediction.step_s
    assert step_s["slow"] == pytest.approx(2 * step_s["usual"])


# --- train, demo -----------------------------------------------------------------------------------------------------


def test_train_tells_and_keeps_what_it_does(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["train", str(run_file)]) == 0
    text = capsys.readouterr().out
    line = r"step (\d)/6  loss \d\.\d{4}  samples/s [\d,]+  mfu \d+\.\d%  mem \d\.\d\dGiB"
    line += r"(?:  data \d+%)?  pred/meas \d+\.\d\d"  # a busy machine may wait for data
    assert re.findall(rf"^{line}$", text, re.MULTILINE) == ["2", "4", "6"]
    assert "starting 1 rank in runs/digits\n" in text
    assert re.search(r"^held out: after step 0: loss \d\.\d{4}, accuracy", text, re.MULTILINE)
    assert text.endswith("checkpoints; `meshwright report runs/digits` makes a page of it\n")
    rows = [json.loads(line) for line in Path("runs/digits/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "held_out" in row] == [0, 6]
    assert rows[-1]["held_out"]["loss"] < rows[0]["held_out"]["loss"]
    assert sorted(path.name for path in Path("runs/digits/checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    assert config.load("runs/digits/run.toml").optimizer.lr == 0.01
    # The ledger: all that the run measured is of the plan that it ran.
    ledger = files.load("runs/digits/ledger.json", Ledger)
    plan = files.load("runs/digits/plan.json", Plan)
    traces = [files.load(f"runs/digits/{name}.json", Trace) for name in ("trace", "predicted")]
    assert {ledger.plan, *(trace.plan for trace in traces)} == {plan.digest}
    assert (ledger.num_steps, ledger.predicted_by, ledger.measured_by) == (5, "simulated", "measured")
    assert ledger.measured_step_s > 0
    assert ledger.predicted_step_s == pytest.approx(traces[1].duration_s)
    assert ledger.table() in text
    assert cli(["report", "runs/digits"]) == 0
    page = Path("runs/digits/report.html").read_text()
    assert ledger.worst.part in page
    text = capsys.readouterr().out
    assert "missing" not in text
    assert ledger.software == "meshwright"
    # What the run teaches: a report names the command, and predictions with the learned cluster file are right.
    offered = re.search(r"learn from this run: meshwright (calibrate .*)\n", text)
    assert offered is not None
    assert offered[1] == "calibrate --from runs/digits --cluster cpu-local --output mine.toml"
    assert cli(["calibrate", "--from", "runs/digits"]) == 2
    assert "--from: there is nothing to correct: this machine was not calibrated" in capsys.readouterr().err
    assert cli(["calibrate", "--from", "runs/digits", "--cluster", "cpu-local"]) == 2
    assert "--output: no file is named that ends in .toml" in capsys.readouterr().err
    slower = [  # as if all had taken 1.5 times as long as predicted
        msgspec.structs.replace(entry, measured=scaled(entry.predicted, 1.5)) for entry in ledger.ranks
    ]
    files.save(msgspec.structs.replace(ledger, ranks=tuple(slower)), "runs/digits/ledger.json")
    assert cli(offered[1].split()) == 0
    learned = files.load("mine.toml", Cluster).software
    assert (learned.name, learned.runs) == ("meshwright", 1)
    assert 1.4 < learned.pace < 1.5, "where rates are assumed, one run goes nearly all the way"
    assert "uncertain by" in capsys.readouterr().out
    assert cli(["calibrate", "--from", "runs/digits", "--cluster", "mine.toml", "--output", "again.toml"]) == 0
    assert "1 of 1 runs have taught this cluster before" in capsys.readouterr().out
    assert files.load("again.toml", Cluster) == files.load("mine.toml", Cluster)


def scaled(times: RankTimes, factor: float) -> RankTimes:
    seconds = {name: factor * getattr(times, name) for name in times.__struct_fields__ if name.endswith("_s")}
    return msgspec.structs.replace(times, **seconds)


def test_a_run_may_leave_its_layout_to_the_planner_and_goes_on_with_what_it_chose(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "calibrated", lambda: api.load_cluster("cpu-local"))  # measuring takes seconds
    short = ["--train.steps", "2", "--layout.plan", "auto", "--train.directory", "run"]
    assert cli(["train", str(run_file), *short]) == 0
    chosen = files.load("run/plan.json", Plan)
    assert chosen.prediction is not None
    assert cli(["train", str(run_file), *short, "--train.steps", "3"]) == 0
    assert files.load("run/plan.json", Plan) == chosen
    assert cli(["train", str(run_file), *short, "--recalibrate", "--train.steps", "5"]) == 2
    assert "there is nothing to correct: this machine was not calibrated" in capsys.readouterr().err


def test_the_same_command_goes_on_where_the_run_stopped(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["train", str(run_file), "--train.directory", "whole"]) == 0
    assert cli(["train", str(run_file), "--train.steps", "4"]) == 0
    capsys.readouterr()
    # A run that died after its last checkpoint has rows that will be made again.
    with Path("runs/digits/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 9.0}\n{"step": 6, "lo')
    assert cli(["train", str(run_file), "--optimizer.lr", "0.01"]) == 0
    text = capsys.readouterr().out
    assert "going on at step 4 of 6\nchanged since: train.steps: 4 -> 6\n" in text
    stopped, whole = (
        [json.loads(line) for line in Path(f"{name}/metrics.jsonl").read_text().splitlines()]
        for name in ("runs/digits", "whole")
    )
    losses = [[(row["step"], row["loss"]) for row in rows if "loss" in row] for rows in (stopped, whole)]
    assert losses[0] == losses[1]
    assert cli(["train", str(run_file)]) == 0
    assert "this run is complete at step 6 of 6\n" in capsys.readouterr().out


def test_a_factory_and_a_loss_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "import torch\n"
        "def net(width): return torch.nn.Linear(3, width)\n"
        "def loss(model, batch): return (model(batch['x']) - batch['y']).square().mean()\n"
    )
    torch.save({"x": torch.randn(40, 3), "y": torch.randn(40, 2)}, "data.pt")
    Path("mine.toml").write_text(
        '[model]\nfactory = "mine:net"\nloss = "mine:loss"\narguments = {width = 2}\n'
        '[data]\nkind = "tensors"\npath = "data.pt"\nbatch_size = 8\nheld_out = 0.25\n'
        '[optimizer]\nname = "sgd"\nlr = 0.1\n[schedule]\nname = "linear"\nwarmup_steps = 2\n'
        '[train]\nsteps = 4\nranks = 1\nmax_grad_norm = 1.0\ndtype = "float64"\n'
    )
    assert cli(["train", "mine.toml"]) == 0
    assert re.search(r"step 4/4  loss \S+  grad_norm \S+  samples/s", capsys.readouterr().out)
    rates = [json.loads(line).get("lr") for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    assert rates[1:-1] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.01])
    assert cli(["train", "mine.toml", "--model.arguments.depth", "2"]) == 2
    assert "model.arguments: mine:net cannot be called with them: got an unexpected" in capsys.readouterr().err


def test_the_demo_is_a_run_file_that_writes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(api, "calibrate", lambda **how: measured.append(how))  # it takes half a minute
    assert cli(["demo", "--print"]) == 0
    text = capsys.readouterr().out
    assert config.make(config.tables(text.encode(), where="demo"), where="demo").train.steps >= 100
    assert (
        cli(
            ["demo", "--steps", "2", "--train.ranks", "1", "--sample.length", "20", *SMALL, "--model.sequence_length=0"]
        )
        == 0
    )
    assert measured == [{"measured_by": measure_rank, "device": "cpu"}]
    text = capsys.readouterr().out
    assert "measuring this machine, once" in text
    assert re.search(r"--- it writes, after 'The':\n.*\n---\n", text, re.DOTALL)
    assert re.search(r"held out: after step 0: loss \S+ \S+ bits per byte\n +after step 2: loss \S+ \S+ bits", text)
    (directory,) = Path("runs").iterdir()
    assert re.fullmatch(r"demo-\d{8}-\d{6}", directory.name)
    assert f"the run lies in {directory}:" in text


def test_held_out_results_read_well() -> None:
    assert str(HeldOut(step=1, loss=2.0)) == "loss 2.0000"
    assert str(HeldOut(step=1, loss=2.0, bits_per_byte=2.885)) == "loss 2.0000, 2.885 bits per byte"
    assert str(HeldOut(step=1, loss=2.0, accuracy=0.9876)) == "loss 2.0000, accuracy 98.76%"


def test_a_search_may_be_given_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "mlp", "--ranks", "2", "--layout.plan", "auto", "--cluster", "cpu-local"]
    assert cli([*words, "--seconds", "600"]) == 0
    assert "stopped after" not in capsys.readouterr().out
    assert cli([*words, "--fresh", "--seconds", "1e-9"]) == 2
    assert "seconds: no layout that fits was found in 1e-09 s: 0 of" in capsys.readouterr().err
    for seconds in ("0", "nan", "-3"):
        assert cli([*words, f"--seconds={seconds}"]) == 2
        assert f"seconds: {float(seconds)!r} is not a time limit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["clusters", "h100-box99999999999"],
            "cluster h100-box99999999999: 99999999999 devices are more than 1,000,000",
        ),
        (["plan", "mlp", "--dp", "1000000000000"], "cluster cpu-local: 1000000000000 devices are more than 1,000,000"),
        (["plan", "mlp", "--layout.pp", "1000000000"], "cluster cpu-local: 1000000000 devices are more than 1,000,000"),
        (["simulate", "mlp", "--dp", "1000000000000"], "1000000000000 devices are more than 1,000,000"),
        (["simulate", "mlp", "--dp", "2", "--jitter", "1e300"], "faults: jitter: jitter is 1e+300"),
        (["plan", "gpt", "--model.layers", "1000000000"], "--model.layers: '1000000000': Expected `int` <= 10000"),
        (
            ["plan", "gpt", "--data.batch_size", "1000000000000000"],
            "there is not enough memory for 10240",
        ),
        (
            ["verify", "mlp", "--layout.dp", "100000"],
            "ranks: 100000 ranks on one machine are more than 256\n  -> start fewer: each is a process",
        ),
    ],
)
def test_sizes_that_no_machine_has_are_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(words) == 2
    assert problem in capsys.readouterr().err
