"""The part ``tests``: tests/gpu, by pytest."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

from benchmarks.gpu import needs
from benchmarks.gpu.context import Context
from meshwright.ir.result import Check


def run(context: Context) -> None:
    """Run the tests, and note which failed and why."""
    report = context.scratch / "tests.xml"
    # Warnings of a PyTorch other than that of the tests are no errors here.
    command = [sys.executable, "-m", "pytest", "-v", "-W", "default", "-p", "no:cacheprovider", "--timeout=60"]
    limit_s = max(10.0, context.left_s - 5)
    try:
        done = subprocess.run(
            [*command, f"--junitxml={report}", "--override-ini=minversion=7.0", "tests/gpu"], cwd=needs.ROOT,
            timeout=limit_s, check=False,
        )  # fmt: skip
        code = done.returncode
    except subprocess.TimeoutExpired:
        code = -1
    if not report.exists():
        context.notes.add_finding(
            Check(target="tests/gpu", verdict="fail", measured=f"pytest gave no report (exit code {code})", total=1)
        )
        return
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed, skipped = {}, 0
    for case in cases:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            failed[str(case.get("name"))] = (problem.get("message") or "").strip().split("\n")[0][:300]
        skipped += case.find("skipped") is not None
    ran = len(cases) - skipped
    context.notes.add_finding(
        Check(
            target="tests/gpu",
            verdict="reported" if not ran else "fail" if failed else "pass",
            measured=f"{ran - len(failed)} of {ran} tests passed, {skipped} were skipped",
            passed=ran - len(failed),
            total=ran,
            notes=failed,
        )
    )
