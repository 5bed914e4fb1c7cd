"""CPU seconds that the files of tests take, in all processes: what a run takes, however busy the machine is."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

LONG_S, SLOWEST_FILES = 60.0, 40
"""A run of more CPU seconds ends with a table of so many files."""


HEAD = "| file | CPU s | s |\n|---|---:|---:|"
OPTION = "--write-times"


def tree_cpu_s() -> float:
    """CPU seconds of this process, of the processes that descend from it, and of those that they have waited for."""
    children, cpu_s = defaultdict(list), dict[int, float]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            process = int(path.parent.name)
            children[int(fields[1])].append(process)
            cpu_s[process] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    total, left = sum(os.times()[:4]), list(children[os.getpid()])
    while left:
        process = left.pop()
        total += cpu_s[process]
        left += children[process]
    return total


class CpuTimes:
    """Measures the files that this process runs, and collects what its workers have measured."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._before_s = tree_cpu_s()
        self.cpu_s: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        result = yield
        if nextitem is None or nextitem.path != item.path:
            now_s = tree_cpu_s()
            self.cpu_s[item.nodeid.partition("::")[0]] += max(0.0, now_s - self._before_s)
            self._before_s = now_s
        return result

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["cpu_s"] = dict(self.cpu_s)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        for file, cpu_s in getattr(node, "workeroutput", {}).get("cpu_s", {}).items():
            self.cpu_s[file] += cpu_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total_s = sum(self.cpu_s.values())
        if total_s < LONG_S:
            return
        seconds: dict[str, float] = defaultdict(float)
        for reports in terminalreporter.stats.values():
            for report in reports:
                if isinstance(report, pytest.TestReport):
                    seconds[report.nodeid.partition("::")[0]] += report.duration
        rows = [("all", total_s, sum(seconds.values()))]
        for file, cpu_s in sorted(self.cpu_s.items(), key=lambda item: -item[1])[:SLOWEST_FILES]:
            rows.append((f"`{file.removeprefix('tests/')}`", cpu_s, seconds[file]))
        table = "\n".join([HEAD, *(f"| {name} | {cpu_s:.1f} | {s:.1f} |" for name, cpu_s, s in rows)])
        terminalreporter.section("files that take long")
        terminalreporter.write_line(table)
        if page := self._config.getoption(OPTION):
            path = Path(page)
            before, _, after = path.read_text().partition(HEAD)
            path.write_text(before + table + "\n\n" + after.partition("\n\n")[2])
