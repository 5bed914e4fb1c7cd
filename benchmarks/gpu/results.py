"""The results of ``make gpu`` so far, and the files that hold them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import msgspec

from benchmarks.gpu.findings import Line, broken, lines_of
from benchmarks.gpu.parts import PARTS, Part
from meshwright.bench.lint import lint
from meshwright.ir import files
from meshwright.ir.result import Check, Finding, Machine, Result, Settings, series_of

COMMAND = "make gpu"
TIMED = (
    "a step: zero_grad, forward, loss, backward, update of AdamW; from when the device was idle until it is again. "
    "Sides take turns in one process, several steps a round"
)


class Results:
    """Collects the findings of the parts. ``folder`` holds the result files, ``scratch`` the files of the parts.
    ``only``: the names of the chosen parts. The result files are then named after these parts, and the files of a whole
    run stay."""

    def __init__(self, folder: Path, scratch: Path, commit: str, *, rehearsed: bool, only: Sequence[str] = ()) -> None:
        self._folder, self._scratch, self._commit, self._rehearsed = folder, scratch, commit, rehearsed
        self._only = [part.name for part in PARTS if part.name in only]
        self._command = f'{COMMAND} GPU="--only {" ".join(self._only)}"' if self._only else COMMAND
        self.log = folder / "gpu.log"
        self.log.write_bytes(b"")
        self._machine = Machine()
        self._versions: dict[str, str] = {}
        self._settings: dict[str, Settings] = {}
        self._findings: list[Finding] = []
        self._parts: list[tuple[str, str]] = []
        self.exit_code = 0

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that the part ``machine`` has found."""
        return len(self._machine.accelerators)

    def take(self, part: Part, why: str, taken_s: float) -> None:
        """Take the findings of a part that has ended, well or not (``why``)."""
        for line in lines_of(self._scratch / f"{part.name}.jsonl"):
            self._take(line)
        self._parts.append((part.name, f"{taken_s:.0f} s" + f", {why}" * bool(why)))
        if why:
            self.exit_code = 1
            self._findings.append(broken(f"{part.name}: {part.what}", re.sub(r"\d+ s\b", "its limit", why)))

    def missed(self, part: Part, why: str) -> None:
        """Note a part that was not run."""
        self._parts.append((part.name, why))

    def _take(self, line: Line) -> None:
        self._machine = line.machine or self._machine
        self._versions |= line.versions
        self._settings |= line.settings
        finding = line.finding
        if finding is None:
            return
        if self._rehearsed and not isinstance(finding, Check):  # times of small sizes on a CPU
            finding = msgspec.structs.replace(finding, verdict="reported")
        self._findings.append(finding)
        self.exit_code |= finding.verdict == "fail"

    def write(self) -> None:
        """Write the results so far."""
        device = self._machine.accelerators[0] if self._machine.accelerators else "cpu"
        name = "-".join(["gpu", re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-"), *self._only])
        result = Result(
            name=name, command=self._command, script="benchmarks/gpu/__main__.py", commit=self._commit,
            date=date.today().isoformat(), machine=self._machine, versions=self._versions, timed=TIMED,
            settings=self._settings, findings=tuple(self._findings),
        )  # fmt: skip
        refusals = [str(each) for each in lint(result)]
        for old in (f"{name}.json", f"{name}.refused.json"):
            (self._folder / old).unlink(missing_ok=True)
        files.save(result, self._folder / f"{name}{'.refused' if refusals else ''}.json")
        (self._folder / f"{name}.md").write_text(self._page(result, refusals), encoding="utf-8")
        shutil.copyfile(self.log, self._folder / f"{name}.log")
        if (cluster := self._scratch / "cluster.toml").exists():
            shutil.copyfile(cluster, self._folder / f"{name}.toml")

    def summary(self) -> str:
        """The findings and the parts, for the end of the output."""
        lines = ["", "parts"]
        lines += [f"  {name:<10} {text}" for name, text in self._parts]
        lines += ["findings"]
        lines += [f"  {each.verdict:<9} {each.target}: {each.measured}" for each in self._findings]
        return "\n".join(lines)

    def _page(self, result: Result, refusals: list[str]) -> str:
        rows = [f"| {each.target} | {each.verdict} | {each.measured} |" for each in result.findings]
        series = []
        for finding in result.findings:
            for key, each in series_of(finding, finding.target.split(":")[0]):
                values = (each.value_s, min(each.seconds), max(each.seconds)) if each.seconds else ()
                times = " | ".join(f"{value * 1e3:.2f} ms" for value in values)
                losses = ", ".join(f"{loss:.5f}" for loss in each.losses[:3])
                series.append(f"| {key.rpartition('.series')[0]} | {key.rpartition('.')[2]} | {times} | {losses} |")
        devices = result.machine.accelerators
        count = {name: devices.count(name) for name in devices}
        where = ", ".join(f"{number} {name}" for name, number in count.items()) or "no GPU"
        head = "A rehearsal on a CPU with small sizes: nothing is judged by it.\n\n" * self._rehearsed
        refused = "".join(f"\nRefused by lint: {text}\n" for text in refusals)
        versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
        nl = "\n"
        return f"""# On GPUs: {where}

{head}Made by `{result.command}` on {result.machine.cores} cores ({result.machine.cpu}), {where}; {versions}; on \
{result.date} at commit {result.commit or "(unknown)"}.

| target | verdict | measured |
| --- | --- | --- |
{nl.join(rows)}

| part | |
| --- | --- |
{nl.join(f"| {name} | {text} |" for name, text in self._parts)}

Timed: {result.timed}.
{refused}
| comparison | side | median | least | most | first losses |
| --- | --- | ---: | ---: | ---: | --- |
{nl.join(series)}
"""
