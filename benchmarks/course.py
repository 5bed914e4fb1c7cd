"""What do the experiments of the course take? CPU seconds of all processes, for each chapter and together.

Run as ``make bench-course``. Each experiment runs as its chapter says: its block as a program of one process, and on
two ranks by torchrun if the chapter starts it so. Imports and the start of processes count. CPU seconds depend little
on other programs of the machine; on two quiet cores a program of one process takes about as many seconds by the clock.
An experiment of more than a minute fails, and so do all of more than ten. Each runs once, so that it cannot pass.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from meshwright.ir.result import Duration, Finding, Series, Settings

COMMAND = "make bench-course"
COURSE = Path(__file__).parents[1] / "docs" / "course"
CHAPTERS = {page.stem: page for page in sorted(COURSE.glob("[0-9]*.md"))}
LIMIT_S, TOGETHER_S = 60.0, 600.0
TEXT = """CPU seconds, user and system, of the experiment's process and of all that it starts, once each; with torchrun,
both ways to start it. The machine ran other programs beside them, which change CPU seconds little."""


def experiment(page: Path) -> tuple[str, bool]:
    """The program of a chapter's experiment, and whether the chapter also starts it on two ranks."""
    section = page.read_text().partition("\n## The experiment\n")[2].partition("\n## ")[0]
    programs = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert programs, f"{page.name} has no experiment"
    return "\n".join(programs), "torchrun" in section


def cpu_s(command: Sequence[str], directory: Path) -> float:
    """The CPU seconds of a command and of all processes that it has waited for.

    Raises:
        CalledProcessError: the command fails; it has shown why.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=directory, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def chapter(name: str) -> tuple[float, bool]:
    """The CPU seconds of a chapter's experiment, and whether it ran on two ranks too."""
    program, on_two = experiment(CHAPTERS[name])
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "experiment.py"
        file.write_text(program, encoding="utf-8")
        ways = [[sys.executable, file.name]]
        if on_two:
            ways.append([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", file.name])
        return sum(cpu_s(way, Path(directory)) for way in ways), on_two


def finding(what: str, settings: str, seconds: float, limit_s: float) -> Duration:
    """A duration that was measured once: it can fail, but not pass."""
    return Duration(
        target=f"{what}: under {limit_s:g} CPU seconds",
        verdict="reported" if seconds < limit_s else "fail",
        measured=f"{seconds:.1f} CPU seconds, once",
        series=Series.of([seconds], settings=settings, run=report.new_run()),
        limit_s=limit_s,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=CHAPTERS, action="append", help="run this chapter only; writes no file")
    only = parser.parse_args(arguments).only
    findings: list[Finding] = []
    settings: dict[str, Settings] = {"all": Settings(ranks=1, threads=1, sizes={"chapters": len(CHAPTERS)})}
    together_s = 0.0
    for name in only or CHAPTERS:
        seconds, on_two = chapter(name)
        together_s += seconds
        settings[name] = Settings(ranks=2 if on_two else 1, threads=1, sizes={"chapter": name})
        findings.append(finding(f"chapter {name.replace('-', ' ')}, the experiment", name, seconds, LIMIT_S))
        report.show(findings[-1])
    if only:
        return int(any(row.verdict == "fail" for row in findings))
    findings.append(finding("all experiments", "all", together_s, TOGETHER_S))
    report.show(findings[-1])
    timed = "CPU seconds of all processes of an experiment, from start to end"
    report.write("course", "Experiments of the course", COMMAND, timed, settings, findings, TEXT)
    return int(any(row.verdict == "fail" for row in findings))


if __name__ == "__main__":
    sys.exit(main())
