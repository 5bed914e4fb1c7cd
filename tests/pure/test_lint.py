"""Results that mislead are refused by rule, key and remedy; honest ones, and all of our own, are not."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.bench.lint import RULES, STALE, lint
from meshwright.bench.provenance import commit_of, imported
from meshwright.cli import run as cli
from meshwright.ir import files
from meshwright.ir.result import (
    Accuracy,
    Check,
    Comparison,
    Duration,
    Machine,
    Result,
    Scaling,
    ScalingPoint,
    Series,
    Settings,
    Utilization,
    Verdict,
)
from meshwright.ir.statistics import median, ratio

PLANTED = Path(__file__).parent / "results"
OURS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
FIRST = "findings[0]"
REFUSED = {
    "no-command": ("command", "command", "give the command that makes it"),
    "no-day": ("date", "date", "give the day on which it was measured"),
    "no-commit": ("commit", "commit", "give the commit"),
    "no-versions": ("versions", "versions", "give those of python and of every library"),
    "no-machine": ("machine", "machine", "give machine.cpu and machine.cores"),
    "nothing-says-what-is-timed": ("timed", "timed", "say what lies between start and end"),
    "no-sizes": ("sizes", "settings.2 ranks.sizes", "give the sizes of model, batch or problem"),
    "one-run": ("repetitions", f"{FIRST}.series.ours.seconds", "repeat it at least 5 times"),
    "best-instead-of-median": ("median", f"{FIRST}.series.ours.statistic", "show the median"),
    "best-called-median": ("ratio", f"{FIRST}.series.ours.value_s", "compute it from the numbers of the file"),
    "a-time-in-a-check": ("hidden-times", f"{FIRST}.notes.step_s", 'make it a finding of kind "duration"'),
    "a-speed-in-words": ("hidden-times", f"{FIRST}.measured", 'make it a finding of kind "duration"'),
    "no-baseline": ("baseline", f"{FIRST}.baseline", "name one of series"),
    "scaling-over-what": ("baseline", f"{FIRST}.base", "say whether it is one rank of the same program"),
    "the-slower-peer": ("best-peer", f"{FIRST}.baseline", "compare with 'DDP', the best of the peers"),
    "baseline-of-another-run": ("same-run", f"{FIRST}.series.DDP.run", "measure both sides in one run, by turns"),
    "baseline-of-another-machine": ("same-run", f"{FIRST}.series.DDP.machine", "measure both on one machine"),
    "peer-at-another-precision": ("alike", f"{FIRST}.series.DDP.settings", "with the same dtype"),
    "peer-with-fewer-threads": ("alike", f"{FIRST}.series.DDP.settings", "with the same threads"),
    "ratio-from-nowhere": ("ratio", f"{FIRST}.ratio", "compute it from the numbers of the file"),
    "speedup-from-nowhere": ("ratio", f"{FIRST}.points[1].speedup", "compute it from the numbers of the file"),
    "error-from-nowhere": ("ratio", f"{FIRST}.error", "compute it from the numbers of the file"),
    "far-from-predicted": ("verdict", f"{FIRST}.verdict", 'say "fail"'),
    "no-spread": ("spread", f"{FIRST}.interval", "give [low, high] that hold 95 %"),
    "passes-over-its-limit": ("verdict", f"{FIRST}.verdict", 'say "fail"'),
    "passes-with-half-its-interval": ("verdict", f"{FIRST}.verdict", 'or "undecided"'),
    "passes-without-a-case": ("verdict", "findings[4].verdict", 'say "fail"'),
    "passes-without-a-limit": ("verdict", f"{FIRST}.verdict", "give the limit"),
    "more-ranks-than-cores": ("cores", f"{FIRST}.verdict", 'say "reported"'),
    "scaling-without-a-kind": ("scaling-kind", f"{FIRST}.scaling", "say strong (nothing grows), batch or model"),
    "weak-shown-as-strong": ("scaling-as-named", f"{FIRST}.points[1].batch", "name the kind that was measured"),
    "percent-of-an-unnamed-peak": ("peak", f"{FIRST}.peak", "give peak.flops_per_s"),
    "peak-of-another-precision": ("peak", f"{FIRST}.peak.dtype", "take the peak of the precision"),
    "more-than-the-peak": ("peak", f"{FIRST}.fraction", "find the right one"),
    "accuracy-of-other-settings": ("one-setting", "findings[1].settings", "from the same settings"),
}


def planted(name: str) -> Result:
    return files.load(PLANTED / f"{name}.json", Result)


@pytest.mark.parametrize("name", REFUSED)
def test_what_misleads_is_refused(name: str) -> None:
    rule, key, remedy = REFUSED[name]
    refusals = lint(planted(name))
    assert (refusals[0].rule, refusals[0].key) == (rule, key)
    assert remedy in refusals[0].remedy
    assert {refusal.rule for refusal in refusals} <= {rule, "spread"}, "one planted fault, one rule"


def test_what_is_honest_passes_and_has_every_kind_of_finding() -> None:
    honest = planted("honest")
    assert lint(honest) == ()
    assert len({type(finding) for finding in honest.findings}) == 7


@pytest.mark.parametrize(("verdict", "rules"), [("pass", []), ("fail", ["cores"]), ("undecided", ["cores"])])
def test_a_duration_may_pass_although_ranks_share_cores(verdict: Verdict, rules: list[str]) -> None:
    example = planted("more-ranks-than-cores")
    first = example.findings[0]
    assert isinstance(first, Comparison)
    ours = first.series["ours"]
    duration = Duration(target="a step", verdict=verdict, measured="0.201 s", notes={}, series=ours, limit_s=5.0)
    result = msgspec.structs.replace(example, findings=(duration,))
    assert [refusal.rule for refusal in lint(result) if refusal.rule == "cores"] == rules


@pytest.mark.parametrize(("busy_cores", "rules"), [(0.8, []), (2.0, []), (2.1, ["cores"])])
def test_ranks_that_sleep_are_judged_by_the_cores_that_they_keep_busy(busy_cores: float, rules: list[str]) -> None:
    example = planted("more-ranks-than-cores")
    busy = {name: msgspec.structs.replace(setting, busy_cores=busy_cores) for name, setting in example.settings.items()}
    result = msgspec.structs.replace(example, settings=busy)
    assert [refusal.rule for refusal in lint(result) if refusal.rule == "cores"] == rules


def test_every_rule_and_every_file_is_tried() -> None:
    assert {path.stem for path in PLANTED.glob("*.json")} == {*REFUSED, "honest"}
    assert {rule for rule, _, _ in REFUSED.values()} == {rule.name for rule in RULES}


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_our_own_results_pass(path: Path) -> None:
    assert lint(files.load(path, Result)) == ()


def test_there_are_results_of_ours() -> None:
    assert "foundation" in {path.stem for path in OURS}


# --- any numbers -----------------------------------------------------------------------------------------------------

SECONDS = st.lists(st.floats(1e-6, 1e3), min_size=5, max_size=9)
SETTINGS = {
    name: Settings(dtype="float32", ranks=ranks, threads=1, sizes={"batch": 8}) for name, ranks in (("1", 1), ("2", 2))
}


def result(*findings: Comparison | Scaling) -> Result:
    return Result(
        name="any", command="make any", date="2026-11-23",
        machine=Machine(cpu="any", cores=2), versions={"python": "3", "torch": "2"},
        timed="a step", settings=SETTINGS, findings=findings,
    )  # fmt: skip


def comparison(ours: list[float], theirs: list[float]) -> Comparison:
    estimate = ratio(ours, theirs)
    series = {name: Series.of(values, settings="2", run="one") for name, values in (("ours", ours), ("theirs", theirs))}
    return Comparison(
        target="any", verdict="pass" if estimate.high <= 1 else "undecided", measured=str(estimate), series=series,
        ours="ours", baseline="theirs", ratio=estimate.value, interval=estimate.interval, limit=1.0,
    )  # fmt: skip


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), min_size=5, max_size=9), st.floats(1.01, 3.0))
def test_a_ratio_of_any_times_passes_and_a_better_one_does_not(
    pairs: list[tuple[float, float]], flattery: float
) -> None:
    honest = comparison([ours for ours, _ in pairs], [theirs for _, theirs in pairs])
    assert lint(result(honest)) == ()
    better = msgspec.structs.replace(honest, ratio=honest.ratio / flattery)
    assert "ratio" in {refusal.rule for refusal in lint(result(better))}


@given(SECONDS, st.sampled_from(["strong", "batch", "model"]), st.sampled_from(["strong", "batch", "model"]))
def test_a_kind_of_scaling_passes_under_its_own_name_only(seconds: list[float], kind: str, name: str) -> None:
    points = []
    for growth in (1, 2):
        work = 1.0 if kind == "strong" else float(growth)
        batch = 8 * (growth if kind == "batch" else 1)
        points.append(
            ScalingPoint(
                series=Series.of(seconds, settings=str(growth), run="one"), batch=batch,
                parameters=100 * (growth if kind == "model" else 1), work=work, speedup=work, interval=(work, work),
                efficiency=work / growth,
            )
        )  # fmt: skip
    scaling = Scaling(
        target="any",
        verdict="reported",
        measured="",
        scaling=name,
        base="1 rank",
        work_unit="tok",
        points=tuple(points),
    )
    assert {refusal.rule for refusal in lint(result(scaling))} == (set() if name == kind else {"scaling-as-named"})


@given(SECONDS)
def test_the_interval_holds_the_median(seconds: list[float]) -> None:
    middle = median(seconds)
    assert middle.value == statistics.median(seconds)
    assert min(seconds) <= middle.low <= middle.value <= middle.high <= max(seconds)
    rate = middle.inverse().times(2.0)
    assert rate.low <= rate.value == pytest.approx(2 / middle.value)
    assert rate.value <= rate.high


# --- code that has changed since -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_other_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of git tells its programs which repository they are in."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=any", "-c", "user.email=any@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a benchmark that imports one module of two, and a result of it in ``results``."""
    for name, text in {
        "src/used.py": '"""Of use."""\nSIZE = 3\n',
        "src/unused.py": "SIZE = 4\n",
        "src/kernel.cpp": "int main() { return 0; }\n",
        "benchmarks/example.py": "def main() -> None:\n    from used import SIZE\n    print(SIZE)\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "measured")
    measured = msgspec.structs.replace(
        planted("honest"), script="benchmarks/example.py", commit=git(tmp_path, "rev-parse", "--short=12", "HEAD")
    )
    (tmp_path / "results").mkdir()
    files.save(measured, tmp_path / "results" / "example.json")
    return tmp_path


def refused(checkout: Path) -> list[str]:
    path = checkout / "results" / "example.json"
    return [refusal.problem for refusal in lint(files.load(path, Result), path.parent) if refusal.rule == STALE]


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("src/used.py", '"""Of much use."""\nSIZE = 3  # as before\n', ""),
        ("src/unused.py", "SIZE = 5\n", ""),
        ("src/used.py", "SIZE = 5\n", "src/used.py changed since "),
        ("src/kernel.cpp", "int main() { return 1; }\n", "src/kernel.cpp changed since "),
        ("benchmarks/example.py", "print(3)\n", "benchmarks/example.py changed since "),
    ],
)
@pytest.mark.parametrize("committed", [False, True])
def test_a_result_is_stale_once_its_program_has_changed(
    checkout: Path, file: str, text: str, problem: str, committed: bool
) -> None:
    assert refused(checkout) == []
    (checkout / file).write_text(text)
    if committed:
        git(checkout, "commit", "-q", "-a", "-m", "changed")
    problems = refused(checkout)
    assert len(problems) == bool(problem)
    assert all(problem in reason for reason in problems)


def test_a_script_that_is_started_by_its_name_counts(checkout: Path) -> None:
    (checkout / "src" / "unused.py").unlink()
    (checkout / "src" / "package").mkdir()
    for name in ("__init__", "started"):
        (checkout / "src" / "package" / f"{name}.py").write_text("")
    script = checkout / "benchmarks" / "example.py"
    script.write_text('COMMAND = ["python", "-m", "package.started"]\n')
    paths = {path.relative_to(checkout).as_posix() for path in imported(checkout, script)}
    assert paths == {"benchmarks/example.py", "src/package/__init__.py", "src/package/started.py"}


def test_where_there_is_no_checkout_nothing_is_known(tmp_path: Path) -> None:
    measured = msgspec.structs.replace(planted("honest"), script="benchmarks/example.py", commit="0123abc")
    assert lint(measured, tmp_path) == ()


def test_a_result_of_no_commit_is_refused(checkout: Path) -> None:
    clean = commit_of(checkout / "benchmarks")
    assert clean == git(checkout, "rev-parse", "--short=12", "HEAD")
    (checkout / "src" / "used.py").write_text("SIZE = 6\n")
    assert commit_of(checkout / "benchmarks") == f"{clean}+"
    honest = planted("honest")
    for commit, problem in (
        (f"{clean}+", f"files differed from {clean}"),
        ("0123abc", "this checkout has no commit '0123abc'"),
    ):
        measured = msgspec.structs.replace(honest, script="benchmarks/example.py", commit=commit)
        assert problem in next(iter(lint(measured, checkout))).problem
    elsewhere = msgspec.structs.replace(honest, script="benchmarks/other.py", commit=clean)
    assert next(iter(lint(elsewhere, checkout))).problem == "there is no file 'benchmarks/other.py'"
    assert lint(honest, checkout) == (), "what is no script's is as old as its versions say"


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_names_file_rule_key_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = (str(PLANTED / f"{name}.json") for name in ("honest", "no-command"))
    assert cli(["bench", "lint", good]) == 0
    assert capsys.readouterr().out == f"{good}: nothing to refuse by {len(RULES)} rules\n"
    assert cli(["bench", "lint", good, bad]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"{bad}: command: nothing says how the file is made again  [command]",
        "  -> give the command that makes it",
        f"{bad}: 1 refusal",
    ]
    assert cli(["bench", "lint", bad, "--json"]) == 1
    assert [refusal["rule"] for refusal in json.loads(capsys.readouterr().out)[bad]] == ["command"]


def test_the_command_lists_rules_and_refuses_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "lint", "--rules"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [rule.name for rule in RULES]
    assert cli(["bench", "lint"]) == 2
    assert "give a file" in capsys.readouterr().err
    path = tmp_path / "other.json"
    path.write_text('{"name": "x", "finding": []}')
    assert cli(["bench", "lint", str(path)]) == 2
    text = capsys.readouterr().err
    assert "unknown field `finding`" in text
    assert "did you mean `findings`?" in text


def test_lint_does_not_wait_for_torch() -> None:
    program = (
        f"import sys; from meshwright.cli import run; run(['bench', 'lint', {str(PLANTED / 'honest.json')!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize(("passed", "least", "is_refused"), [(95, 0.95, False), (94, 0.95, True), (99, 1.0, True)])
def test_a_check_passes_with_the_least_share_of_its_cases(passed: int, least: float, is_refused: bool) -> None:
    result = files.load(next(path for path in OURS if path.stem == "conformance"), Result)
    check = Check(target="cases", verdict="pass", measured=f"{passed} of 100", passed=passed, total=100, least=least)
    rules = {refusal.rule for refusal in lint(msgspec.structs.replace(result, findings=(check,)))}
    assert ("verdict" in rules) == is_refused


@pytest.mark.parametrize(
    ("value", "least", "most", "is_refused"),
    [
        (0.9, 0.8, None, False), (0.7, 0.8, None, True), (-1.1, -1.2, None, False), (3.9, None, 4.1, False),
        (4.2, None, 4.1, True), (0.9, None, None, True),
    ],
)  # fmt: skip
def test_a_quality_passes_within_its_limit(
    value: float, least: float | None, most: float | None, is_refused: bool
) -> None:
    result = files.load(PLANTED / "honest.json", Result)
    quality = Accuracy(
        target="any", verdict="pass", measured=f"{value}", metric="any", value=value, least=least, most=most
    )
    rules = [refusal.rule for refusal in lint(msgspec.structs.replace(result, findings=(quality,)))]
    assert ("verdict" in rules) == is_refused


@pytest.mark.parametrize(
    ("low", "limit", "is_refused"), [(0.6, 0.55, False), (0.5, 0.55, True), (0.6, None, True)]
)  # fmt: skip
def test_a_utilization_passes_if_its_whole_interval_keeps_the_limit(
    low: float, limit: float | None, is_refused: bool
) -> None:
    result = files.load(PLANTED / "honest.json", Result)
    reached = Utilization(
        target="any", verdict="pass", measured="65 %", series=Series(), fraction=0.65, interval=(low, 0.7), limit=limit
    )
    rules = [refusal.rule for refusal in lint(msgspec.structs.replace(result, findings=(reached,)))]
    assert ("verdict" in rules) == is_refused
