"""Are the placements that our rules allow true, and do they allow those that are? ``make bench-placements``

Calls are those that PyTorch's own samples of all operators (OpInfo) make of ATen operators, forward and backward. What
is true of a call is what ``torch.distributed.tensor._ops.strategy_validation``, DTensor's oracle, finds: it runs the
operator on the parts of two ranks under every combination of Shard, Replicate and Partial, and compares what comes
together with the whole. What we allow are the splits of our rules, and of the operators that capture makes of an
operator, without communication between them. Every split of a rule is run with the rule's own rewrite on two ranks.

A true combination that we do not allow is listed with its reason, or counts as missing. Nothing is timed. Each operator
has a process of its own, since some operators read beyond their tensors if parts do not belong together: of these, only
our own splits are run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import random
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
OF_A_NAME, OF_AN_OPERATOR, SEED = 4, 3, 0
"""Calls of each operator that the samples of one name give at most, and that are judged."""
PATIENCE_S = 900.0
LEAST = 0.95


@dataclass
class Summary:
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
    """Whether a training step can hold it, and it has no rule."""
    stopped: bool = False
    """Whether the operator ended its process on parts that do not belong together."""

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
    """Calls by operator: a few of each, drawn from what the samples of all names give."""
    found: dict[str, dict[str, Call]] = defaultdict(dict)
    for name in names:
        for call in truth.calls(name, OF_A_NAME):
            found[str(call.target)].setdefault(truth.described(call), call)
    chosen = {}
    for target in sorted(found):
        keys = sorted(found[target])
        random.Random(f"{SEED} {target}").shuffle(keys)
        chosen[target] = [found[target][key] for key in keys[:OF_AN_OPERATOR]]
    return chosen


def _judge(calls: Sequence[Call], mesh: DeviceMesh, every_part: bool, plain: bool, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results.send([placements.judged(call, mesh, every_part=every_part, plain=plain) for call in calls])
    results.close()


def judged(calls: Mapping[str, Sequence[Call]], mesh: DeviceMesh, plain: bool = False) -> Iterator[Summary]:
    """The summary of each operator, from forks of this process, as many at a time as there are cores."""
    context = multiprocessing.get_context("fork")
    waiting = [(target, True) for target in reversed(list(calls))]
    running: dict[Any, tuple[Any, str, bool]] = {}
    while waiting or running:
        while waiting and len(running) < num_cores():
            target, every_part = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_judge, args=(calls[target], mesh, every_part, plain, sender))
            process.start()
            sender.close()
            running[receiver] = process, target, every_part
        ready: list[Any] = multiprocessing.connection.wait(list(running), timeout=PATIENCE_S)
        if not ready:
            raise RuntimeError(f"no answer in {PATIENCE_S:g} s: {', '.join(one[1] for one in running.values())}")
        for receiver in ready:
            process, target, every_part = running.pop(receiver)
            summary = Summary(target, stopped=not every_part)
            try:
                for verdict in receiver.recv():
                    summary.add(verdict)
            except EOFError:
                if not every_part:
                    summary.wrong.append("the operator ends its process under our own splits")
            process.join()
            receiver.close()
            if not summary.calls and not summary.wrong:
                waiting.append((target, False))
            else:
                yield summary


def share(of: int, all_: int) -> str:
    """A share in percent."""
    return f"{100 * of / all_:.1f} %" if all_ else "none"


def findings(summaries: Sequence[Summary]) -> list[Finding]:
    """The verdicts."""
    wrong = [f"{one.target} {text}" for one in summaries for text in one.wrong]
    right, operators = sum(each.right for each in summaries), sum(bool(each.right) for each in summaries)
    true, allowed = sum(each.true for each in summaries), sum(each.allowed for each in summaries)
    listed: Counter[str] = sum((each.listed for each in summaries), Counter())
    missing = {each.target: sum(each.missing.values()) for each in summaries if each.missing}
    told = allowed + sum(listed.values())
    needed = [each.target for each in summaries if each.needs]
    ruled = sum(not each.unruled for each in summaries)
    return [
        Check(
            target="No split that a rule allows is wrong: all ranks' results together are the whole",
            verdict="fail" if wrong else "pass",
            measured=f"{right} of {right + len(wrong)} splits of {operators} operators",
            passed=right,
            total=right + len(wrong),
            notes={f"wrong: {text}": True for text in wrong},
        ),
        Check(
            target=f"At least {LEAST:.0%} of what PyTorch's validator calls valid are allowed, or listed with a reason",
            verdict="pass" if told >= LEAST * true else "fail",
            measured=f"{told} of {true} ({share(told, true)}); allowed {allowed} ({share(allowed, true)}); without a "
            f"reason {sum(missing.values())}, of {len(missing)} operators",
            passed=told,
            total=true,
            least=LEAST,
            notes={f"listed: {reason}": count for reason, count in listed.most_common()}
            | {f"missing: {target}": count for target, count in missing.items()},
        ),
        Check(
            target="Every operator that a training step can hold has a rule",
            verdict="fail" if needed else "pass",
            measured=f"{ruled} of {len(summaries)} have one, {len(summaries) - ruled - len(needed)} need none",
            passed=len(summaries) - len(needed),
            total=len(summaries),
            notes={f"without a rule: {target}": True for target in needed},
        ),
    ]


def table(summaries: Sequence[Summary]) -> str:
    """A row for each operator; then those without a rule."""
    lines = ["| operator | calls | true | allowed | listed | missing | splits right | wrong |"]
    lines.append("| --- |" + " ---: |" * 7)
    for each in summaries:
        name = f"{each.target} (our splits only)" if each.stopped else each.target
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
    parser.add_argument("names", nargs="*", help="only operators of these names of OpInfo; no file")
    parser.add_argument("--plain", action="store_true", help="only Shard, Replicate and Partial sums, faster; no file")
    parser.add_argument("--details", action="store_true", help="print what is missing and wrong, call by call")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    summaries: list[Summary] = []
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
                for text in [*summary.unruled, *(["stopped"] if summary.stopped else [])]:
                    print(f"{summary.target}: {text} (true: {summary.true})", flush=True)
    summaries.sort(key=lambda each: each.target)
    found = findings(summaries)
    if not options.names and not options.plain:
        settings = {"operators": Settings(dtype="float64", ranks=2, threads=1)}
        text = (__doc__ or "").partition("\n\n")[2].strip() + "\n\n" + table(summaries)
        report.write("placements_truth", "Placements of operators", COMMAND, "Nothing.", settings, found, text)
    return report.alone(found)


if __name__ == "__main__":
    sys.exit(main())
