"""Are all splits of our rules correct, and do the rules allow all correct placements? ``make bench-placements``

The calls of ATen operators are those of PyTorch's samples of all operators (OpInfo), forward and backward. The oracle
is ``torch.distributed.tensor._ops.strategy_validation`` of DTensor. It runs an operator on the parts of two ranks under
every combination of Shard, Replicate and Partial, and calls a combination true if the results of both ranks, put
together, equal the result on whole tensors. Our rules allow a combination if the operators into which capture turns the
call can be split so without communication between them. Every split of a rule is run with the rule's rewrite on two
ranks.

A true combination that we do not allow is listed with its reason, or counts as missing. Nothing is timed. Each operator
is judged in a process of its own, because some operators read or write beyond their tensors if parts do not belong
together. If such a process crashes, or does not end, its verdicts do not count: then only our own splits of the
operator are run, and the table gives the reason.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import random
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import report
from meshwright.ir.result import Check, Finding, Settings
from meshwright.ops.base import Call
from meshwright.runtime.launch import num_cores
from tests.distributed import placement_truth as truth
from tests.distributed import placements

COMMAND = "make bench-placements"
CALLS_PER_NAME, CALLS_PER_OPERATOR, SEED = 4, 3, 0
"""The largest number of calls of an operator that are taken from the samples of one name, and that are judged."""
PATIENCE_S, END_S = 900.0, 60.0
"""The time that an operator's process has until it answers, and then until it ends. It is killed after that."""
LEAST = 0.95


@dataclass
class OperatorSummary:
    """The verdicts on one operator's calls together."""

    target: str
    calls: int = 0
    true: int = 0
    allowed: int = 0
    right: int = 0
    listed: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unruled: Counter[str] = field(default_factory=Counter)
    needs: bool = False
    """Whether the operator has no rule, although a training step can contain it."""
    stopped: str = ""
    """How the operator's process ended on parts that do not belong together, if it did not end well: only our own
    splits were run then."""

    def add(self, verdict: placements.Verdict) -> None:
        """Count one call's verdict."""
        self.calls += 1
        self.true, self.allowed, self.right = (
            self.true + verdict.true, self.allowed + verdict.allowed, self.right + verdict.right,
        )  # fmt: skip
        self.listed.update(verdict.listed)
        self.missing.update(verdict.missing)
        self.wrong += verdict.wrong
        self.needs |= verdict.needs
        self.unruled.update([verdict.unruled] if verdict.unruled else [])


def collected(names: Sequence[str]) -> dict[str, list[Call]]:
    """A few calls of each operator, drawn from the samples of all names."""
    calls: dict[str, dict[str, Call]] = defaultdict(dict)
    for name in names:
        for call in truth.calls(name, CALLS_PER_NAME):
            calls[str(call.target)].setdefault(truth.described(call), call)
    chosen = {}
    for target in sorted(calls):
        keys = sorted(calls[target])
        random.Random(f"{SEED} {target}").shuffle(keys)
        chosen[target] = [calls[target][key] for key in keys[:CALLS_PER_OPERATOR]]
    return chosen


def _judge(calls: Sequence[Call], mesh: DeviceMesh, every_part: bool, plain: bool, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results.send([placements.judged(call, mesh, every_part=every_part, plain=plain) for call in calls])
    results.close()


@dataclass(frozen=True)
class _Judge:
    """A fork of this process that judges an operator. ``stopped``: how an earlier judge of the operator ended, which
    looked at every combination; empty: this is the first."""

    target: str
    stopped: str
    process: Any
    receiver: Any
    deadline: float

    def end(self) -> tuple[list[placements.Verdict], str]:
        """The verdicts, and how the process ended if it did not end well: there are no verdicts then."""
        answer: list[placements.Verdict] = []
        if self.receiver.poll():
            with suppress(EOFError, OSError):  # it crashed
                answer = self.receiver.recv()
            self.process.join(END_S)
        self.receiver.close()
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            return [], "did not end"
        code = self.process.exitcode
        if code or not answer:
            return [], signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return answer, ""


def judged(calls: Mapping[str, Sequence[Call]], mesh: DeviceMesh, plain: bool = False) -> Iterator[OperatorSummary]:
    """Yield the summary of each operator. Forks of this process judge the operators, as many at a time as cores. This
    process itself runs no operator on parts."""
    context = multiprocessing.get_context("fork")
    waiting = [(target, "") for target in reversed(list(calls))]
    running: dict[Any, _Judge] = {}
    while waiting or running:
        while waiting and len(running) < num_cores():
            target, stopped = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            arguments = (calls[target], mesh, not stopped, plain, sender)
            process = context.Process(target=_judge, args=arguments, daemon=True)
            process.start()
            sender.close()
            running[receiver] = _Judge(target, stopped, process, receiver, time.monotonic() + PATIENCE_S)
        first = min(judge.deadline for judge in running.values())
        ready = multiprocessing.connection.wait(list(running), timeout=max(0.0, first - time.monotonic()))
        late = [receiver for receiver, judge in running.items() if judge.deadline <= time.monotonic()]
        for receiver in dict.fromkeys([*ready, *late]):
            judge = running.pop(receiver)
            summary = OperatorSummary(judge.target, stopped=judge.stopped)
            verdicts, problem = judge.end()
            if problem and not judge.stopped:
                waiting.append((judge.target, problem))
                continue
            for verdict in verdicts:
                summary.add(verdict)
            if problem:
                summary.wrong.append(f"our own splits end the operator's process: {problem}")
            yield summary


def share(count: int, total: int) -> str:
    """A share in percent."""
    return f"{100 * count / total:.1f} %" if total else "none"


def findings(summaries: Sequence[OperatorSummary]) -> list[Finding]:
    """The verdicts."""
    wrong = [f"{summary.target} {text}" for summary in summaries for text in summary.wrong]
    right, operators = sum(each.right for each in summaries), sum(bool(each.right) for each in summaries)
    true, allowed = sum(each.true for each in summaries), sum(each.allowed for each in summaries)
    listed: Counter[str] = sum((each.listed for each in summaries), Counter())
    missing = {each.target: sum(each.missing.values()) for each in summaries if each.missing}
    explained = allowed + sum(listed.values())
    needed = [each.target for each in summaries if each.needs]
    ruled = sum(not each.unruled for each in summaries)
    return [
        Check(
            target="Every split that a rule allows is right: the ranks' results, put together, are the whole result",
            verdict="fail" if wrong else "pass",
            measured=f"{right} of {right + len(wrong)} splits of {operators} operators",
            passed=right,
            total=right + len(wrong),
            notes={f"wrong: {text}": True for text in wrong},
        ),
        Check(
            target=f"At least {LEAST:.0%} of what PyTorch's validator finds valid is allowed, or listed with a reason",
            verdict="pass" if explained >= LEAST * true else "fail",
            measured=f"{explained} of {true} ({share(explained, true)}); allowed {allowed} ({share(allowed, true)}); "
            f"without a reason {sum(missing.values())}, of {len(missing)} operators",
            passed=explained,
            total=true,
            least=LEAST,
            notes={f"listed: {reason}": count for reason, count in listed.most_common()}
            | {f"missing: {target}": count for target, count in missing.items()}
            | {f"our splits only: {each.target}": each.stopped for each in summaries if each.stopped},
        ),
        Check(
            target="Every operator that a training step can contain has a rule",
            verdict="fail" if needed else "pass",
            measured=f"{ruled} of {len(summaries)} have one, {len(summaries) - ruled - len(needed)} need none",
            passed=len(summaries) - len(needed),
            total=len(summaries),
            notes={f"without a rule: {target}": True for target in needed},
        ),
    ]


def table(summaries: Sequence[OperatorSummary]) -> str:
    """A row for each operator, then the operators without a rule."""
    lines = ["| operator | calls | true | allowed | listed | missing | splits right | wrong |"]
    lines.append("| --- |" + " ---: |" * 7)
    for each in summaries:
        name = f"{each.target} (our splits only: {each.stopped})" if each.stopped else each.target
        counts = (
            each.calls, each.true, each.allowed, sum(each.listed.values()), sum(each.missing.values()), each.right,
            len(each.wrong),
        )  # fmt: skip
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    reasons: dict[str, list[str]] = defaultdict(list)
    for each in summaries:
        for reason in each.unruled:
            reasons[reason.replace(each.target, "it").replace("|", "/")].append(each.target)
    lines += ["", "| runs whole, because | operators |", "| --- | --- |"]
    lines += [f"| {reason} | {', '.join(sorted(targets))} |" for reason, targets in sorted(reasons.items())]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="only operators with these names in OpInfo; writes no file")
    parser.add_argument(
        "--plain", action="store_true", help="only Shard, Replicate and Partial sums, faster; writes no file"
    )
    parser.add_argument("--details", action="store_true", help="print what is missing and wrong, call by call")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    summaries: list[OperatorSummary] = []
    with truth.validator() as mesh, Console(stderr=True).status("samples") as status:
        calls = collected(options.names or truth.names())
        for summary in judged(calls, mesh, options.plain):
            summaries.append(summary)
            status.update(f"{len(summaries)} of {len(calls)} operators")
            if options.details:
                for text, count in summary.missing.items():
                    print(f"{summary.target}: missing {count} x {text}", flush=True)
                for text in summary.wrong:
                    print(f"{summary.target}: WRONG {text}", flush=True)
                for text in [*summary.unruled, *([f"our splits only: {summary.stopped}"] if summary.stopped else [])]:
                    print(f"{summary.target}: {text} (true: {summary.true})", flush=True)
    summaries.sort(key=lambda each: each.target)
    rows = findings(summaries)
    if not options.names and not options.plain:
        settings = {"operators": Settings(dtype="float64", ranks=2, threads=1)}
        text = (__doc__ or "").partition("\n\n")[2].strip() + "\n\n" + table(summaries)
        report.write("placements_truth", "Placements of operators", COMMAND, "Nothing.", settings, rows, text)
    return report.alone(rows)


if __name__ == "__main__":
    sys.exit(main())
