"""Do PyTorch's own distributed tests pass on our backend? ``make conformance`` prints the verdicts.

All tests of ``torch.testing._internal.distributed.distributed_test``, as the wheel of PyTorch has them, run on 2, 3
and 4 ranks of a CPU, three times: on gloo; on our backend in gloo's place, so that tests only for gloo run; and on
our backend under its own name. Not applicable is what gloo skips on CPUs, for the same reason. A test passes on ours
if it passes in gloo's place. Tests that ask C++ for the group's name count under our own name instead. Ranks are
forks of a process that has imported PyTorch once, and one test runs after the other. Nothing is timed.

The scripts with which accelerate tests itself (``accelerate test``) run on 2 ranks of a CPU, on gloo and on ours in
gloo's place. They must end without an error, and print the same.
transformers' own tests of losses are not in its wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks import report
from meshwright.comm.process_group.identity import NAME
from meshwright.ir.result import Check, Finding, Settings

COMMAND = "make conformance"
WORLDS = (2, 3, 4)
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
GLOO, IN_PLACE, OWN = "gloo", "in gloo's place", "own name"
SIDES: Mapping[str, Mapping[str, str]] = {
    GLOO: {"BACKEND": "gloo"}, IN_PLACE: {"BACKEND": "gloo", "MESHWRIGHT_FOR_GLOO": "1"}, OWN: {"BACKEND": NAME},
}  # fmt: skip
NAMED = ("test_ddp_logging_data_cpu",)
"""Tests that compare the name that C++ knows with the name in Python: only under our own name are both ours."""
TIMEOUT_S = 3600.0
SCRIPTS = ("test_script", "test_ops", "test_sync", "test_ddp_comm_hook", "test_distributed_data_loop")
"""The scripts of ``accelerate.test_utils.scripts`` that need no other package."""
REASON = 160
"""The most characters of a reason in the table."""

Outcomes = dict[str, dict[str, Any]]


def run(side: str, world: int, tests: Sequence[str] = ()) -> Outcomes:
    """Run tests (default: all) on one side. Map their names to their outcomes."""
    environment = {**os.environ, **SIDES[side], "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.conformance_case", *tests]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    outcomes = {outcome["name"]: outcome for outcome in _outcomes(process.stdout)}
    if process.returncode or not outcomes:
        raise RuntimeError(f"{side} on {world} ranks ended with {process.returncode}:\n{process.stderr[-4000:]}")
    return outcomes


def _outcomes(text: str) -> Iterator[dict[str, Any]]:
    """The outcomes that a run has printed. A profiler may print other text before them, on the same line."""
    for line in text.splitlines():
        _, marker, outcome = line.partition("RESULT {")
        if marker:
            yield json.loads("{" + outcome)


def ours(name: str, by_backend: Mapping[str, Outcomes]) -> str:
    """The outcome of a test on our backend."""
    outcome: str = by_backend[OWN if name in NAMED else IN_PLACE][name]["outcome"]
    return outcome


def judged(world: int, by_backend: Mapping[str, Outcomes]) -> Check:
    """The share of the tests that pass on gloo and on ours, and the reasons why others are skipped."""
    passed = [name for name, outcome in by_backend[GLOO].items() if outcome["outcome"] == PASSED]
    right = [name for name in passed if ours(name, by_backend) == PASSED]
    skipped = Counter(_reason(each) for each in by_backend[GLOO].values() if each["outcome"] == SKIPPED)
    own = sum(outcome["outcome"] == PASSED for outcome in by_backend[OWN].values())
    failed = [name for side in (IN_PLACE, OWN) for name, each in by_backend[side].items() if each["outcome"] == FAILED]
    wrong = sorted(name for name in set(failed) if name not in NAMED or by_backend[OWN][name]["outcome"] == FAILED)
    notes: dict[str, Any] = {f"not applicable: {reason}": count for reason, count in sorted(skipped.items())}
    notes |= {f"failed or skipped: {name}": ours(name, by_backend) for name in passed if name not in right}
    return Check(
        target=f"{world} ranks: every test that gloo passes on CPUs passes on ours",
        verdict="pass" if right == passed and not wrong else "fail",
        measured=f"{len(right)} of {len(passed)}; {sum(skipped.values())} of {len(by_backend[GLOO])} tests are not "
        f"applicable; under our own name {own} tests run and pass; failed on ours: {', '.join(wrong) or 'none'}",
        passed=len(right),
        total=len(passed),
        notes=notes,
    )


def _reason(outcome: Mapping[str, Any]) -> str:
    """The reason why a test was skipped, in one line."""
    return " ".join(str(outcome["why"]).split())[:REASON]


def launched(script: str, backend: str) -> tuple[bool, list[str], str]:
    """Run a script of accelerate on 2 ranks: whether it passes, the lines that it prints, and its last error."""
    environment = {**os.environ, "BACKEND": backend, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    machine = ("--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no")
    command = [
        sys.executable, "-m", "accelerate.commands.launch", *machine, "--dynamo_backend", "no",
        "-m", "benchmarks.conformance_program", f"accelerate.test_utils.scripts.{script}",
    ]  # fmt: skip
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    errors = [line.strip() for line in process.stderr.splitlines() if "Error: " in line and "CalledProcess" not in line]
    return process.returncode == 0, sorted(process.stdout.splitlines()), (errors or [""])[-1][:REASON]


def programs() -> Check:
    """The share of accelerate's scripts that end without an error on gloo and on ours, and print the same."""
    right, total, notes = 0, 0, {}
    for script in SCRIPTS:
        passes, lines, error = launched(script, "gloo")
        if not passes:
            notes[f"not applicable: {script}"] = error
            continue
        passes, printed, problem = launched(script, NAME)
        equal = passes and printed == lines
        total, right = total + 1, right + equal
        notes[script] = f"{len(lines)} lines, all equal" if equal else problem or "prints other lines"
    return Check(
        target="2 ranks: accelerate's own scripts that pass on gloo and CPUs pass on ours, and print the same",
        verdict="pass" if right == total > 0 else "fail",
        measured=f"{right} of {total}; {len(SCRIPTS) - total} of {len(SCRIPTS)} do not run on gloo and CPUs",
        passed=right,
        total=total,
        notes=notes,
    )


def table(worlds: Mapping[int, Mapping[str, Outcomes]]) -> str:
    """A row for each test that gloo runs, and for each reason why it skips others."""
    names = sorted({name for by_backend in worlds.values() for name in by_backend[GLOO]})
    lines = [f"| test | {' | '.join(f'gloo, {world} ranks | ours' for world in worlds)} |"]
    lines.append("| --- |" + " --- |" * (2 * len(worlds)))
    reasons: Counter[str] = Counter()
    for name in names:
        outcomes = [(by_backend[GLOO][name]["outcome"], ours(name, by_backend)) for by_backend in worlds.values()]
        if all(theirs == SKIPPED for theirs, _ in outcomes):
            reasons[_reason(next(iter(worlds.values()))[GLOO][name])] += 1
        else:
            lines.append(f"| {name} | {' | '.join(f'{gloo} | {own}' for gloo, own in outcomes)} |")
    lines += ["", "| not applicable, because | tests |", "| --- | ---: |"]
    lines += [f"| {reason.replace('|', '/')} | {count} |" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--world", type=int, choices=WORLDS, action="append", help="only this number of ranks; writes no file"
    )
    parser.add_argument("--programs", action="store_true", help="only programs of other packages; writes no file")
    parser.add_argument("tests", nargs="*", help="only these tests; writes no file")
    options = parser.parse_args(arguments)
    worlds: dict[int, dict[str, Outcomes]] = {}
    with Console(stderr=True).status("conformance") as status:
        for world in () if options.programs else options.world or WORLDS:
            worlds[world] = {}
            for side in SIDES:
                status.update(f"{world} ranks, {side}")
                worlds[world][side] = run(side, world, options.tests)
        findings: list[Finding] = [judged(world, outcomes) for world, outcomes in worlds.items()]
        if not options.world and not options.tests:
            status.update("programs of other packages")
            findings.append(programs())
    if not options.world and not options.tests and not options.programs:
        settings = {f"{world} ranks": Settings(ranks=world, threads=1) for world in WORLDS}
        text = (__doc__ or "").partition("\n\n")[2].strip() + "\n\n" + table(worlds)
        report.write("conformance", "PyTorch's own tests", COMMAND, "Nothing.", settings, findings, text)
    return report.alone(findings)


if __name__ == "__main__":
    sys.exit(main())
