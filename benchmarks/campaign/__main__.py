"""Does a run survive everything? ``python -m benchmarks.campaign [--faults 1000] [--seed 0]``, as root for all kinds.

Faults are inflicted on tiny runs of ``meshwright train`` and ``meshwright launch``, one on each core. Each round
inflicts every kind once. The seed draws their order, the run, the moment and the victim, so that fault n of a seed is
always the same fault, except for the scheduling of the machine. A journal has a line for each fault. After a stop, the
same command continues the campaign after the last line.

After each fault, the same command is given until the run is complete. Then the following must hold:

lost         A checkpoint that was complete before the fault, and that the fault itself did not touch, has the bytes
             that were written. The run went on from it or from a later checkpoint.
wrong        Losses are those of the uninterrupted run: bit for bit where layout and ranks are the same, within 1e-9
             where hosts came or went. Under rules that mix replicas, they are finite.
hung         No command has taken longer than its timeout and some slack.
unexplained  Each command has ended with a code that the fault allows, and without a traceback. If the run was not
             complete, a message of at most one screen names value, place and remedy.
left         No process, shared memory, temporary file, port, mount or file of a failed save is left.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from benchmarks import report
from benchmarks.campaign.checks import CATEGORIES, Problem
from benchmarks.campaign.journal import Entry, append, counts, drawn, read
from benchmarks.campaign.kinds import KINDS, missing
from benchmarks.campaign.site import HungError, LateError, Site, references
from benchmarks.campaign.warm import Starter
from meshwright.emulation.network import why_not
from meshwright.ir.result import Check, Duration, Finding, Series, Settings
from meshwright.ir.statistics import median
from meshwright.runtime.launch import num_cores
from meshwright.runtime.lock import locked

COMMAND = "python -m benchmarks.campaign"
FAULTS, LEAST_KINDS, TRIES = 1000, 20, 4
MOST_AT_ONCE = 4
"""As many faults as the machine has cores are inflicted at the same time, but no more: most of a fault is waiting."""
FOLDER = Path("runs/campaign")


def inflict(
    starter: Starter, folder: Path, number: int, seed: int, names: tuple[str, ...],
    expected: Mapping[str, Mapping[int, float]], *, boxes: bool = True, keep: bool = False,
) -> Entry:  # fmt: skip
    """Inflict fault ``number`` and judge the run. If the run ends before the moment of the fault, the fault is tried
    again at another moment, at most ``TRIES`` times in all.

    ``expected`` maps a configuration to its losses by step. ``boxes``: whether commands run in network namespaces.
    ``keep``: leave the folders of faults with problems."""
    begun, tries = time.monotonic(), 0
    name, run, draw = drawn(seed, number, names)
    while True:
        tries, missed = tries + 1, ""
        place = folder / f"{number}-{tries}"
        shutil.rmtree(place, ignore_errors=True)
        site = Site(starter, place, run, expected[run], draw, num_boxes=KINDS[name].hosts if boxes else 0)
        with site.inhabited():
            try:
                KINDS[name].inflict(site)
                site.verdict()
            except LateError as late:
                missed = f"{late}"
            except HungError as hung:
                site.problem("hung", f"{hung}")
        if not (keep and (site.problems or missed)):
            shutil.rmtree(place, ignore_errors=True)
        if site.problems or not missed or tries == TRIES:
            break
    return Entry(
        number, seed, name, run, report.COMMIT, tuple(command.code or 0 for command in site.commands),
        tuple(Problem(each.category, _short(each.text, place)) for each in site.problems),
        {key: f"{value}" for key, value in site.notes.items()}, tries, missed, round(time.monotonic() - begun, 2),
    )  # fmt: skip


def _short(text: str, place: Path) -> str:
    return re.sub(r"\s+", " ", text.replace(f"{place}/", ""))[:400]


def findings(entries: list[Entry], left_out: Mapping[str, str]) -> list[Finding]:
    """The results of a campaign. ``left_out`` maps the kinds that were not inflicted to the reasons."""
    inflicted = [entry for entry in entries if not entry.missed]
    kinds = [(name, count, failed) for name, count, failed in counts(entries) if count]
    text = f"{len(inflicted)} faults of {len(kinds)} kinds; {sum(entry.tries for entry in entries)} tries"
    rows: list[Finding] = [
        Check(
            target=f"the campaign: at least {FAULTS} faults of at least {LEAST_KINDS} kinds",
            verdict="pass" if len(inflicted) >= FAULTS and len(kinds) >= LEAST_KINDS else "fail",
            measured=text + (f"; left out here: {', '.join(left_out)}" if left_out else ""),
            passed=min(len(inflicted), FAULTS), total=FAULTS,
            notes={"faults by kind": {name: count for name, count, _ in kinds}},
        ),
        report.share(
            "the campaign: the moment of each fault came", len(inflicted), len(entries),
            f"the runs of {len(entries) - len(inflicted)} of {len(entries)} faults ended too early {TRIES} times",
        ),
    ]  # fmt: skip
    for category, words in CATEGORIES.items():
        bad = [entry for entry in inflicted if any(problem.category == category for problem in entry.problems)]
        where = Counter(entry.kind for entry in bad)
        kinds_of_bad = ", ".join(f"{kind} {count}" for kind, count in where.most_common(8))
        rows.append(report.share(
            f"after each fault: no {words}", len(inflicted) - len(bad), len(inflicted),
            f"{len(bad)} {words} after {len(inflicted)} faults" + (f": {kinds_of_bad}" if kinds_of_bad else ""),
        ))  # fmt: skip
    for name, count, failed in kinds:
        doc = " ".join((KINDS[name].inflict.__doc__ or "").split())
        good = count - failed
        rows.append(report.share(f"{name}: {doc}", good, count, f"{good} of {count} faults survived"))
    seconds = [entry.seconds for entry in inflicted]
    rows.append(Duration(
        target="a fault: its commands, and the checks after them", verdict="reported",
        measured=f"{median(seconds)} s; all of them {sum(seconds) / 3600:.2f} h",
        series=Series.of(seconds, settings="runs", run=report.new_run()),
    ))  # fmt: skip
    return rows


def memory_disk(folder: Path, stack: ExitStack) -> Path:
    """Mount a file system in memory for the folders of faults: on a disk, tiny runs would mostly wait for flushes.
    File systems that a killed campaign has left in the same folder are unmounted first."""
    place = folder / "work"
    place.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        mounted = [Path(line.split()[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for stale in reversed([path for path in mounted if path.is_relative_to(place)]):
            subprocess.run(["umount", "--lazy", str(stale)], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "campaign", str(place)], check=True)
        stack.callback(lambda: subprocess.run(["umount", "--lazy", str(place)], check=True))
    return place


def main(arguments: Sequence[str] | None = None) -> int:
    """Inflict faults until there are enough, print each, and write the result."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=FAULTS, help=f"of the whole journal ({FAULTS})")
    parser.add_argument("--seed", type=int, default=0, help="draws order, runs, moments and victims (0)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind, without a result file")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"of the journal and the runs ({FOLDER})")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs with problems")
    options = parser.parse_args(arguments)
    left_out = missing()
    names = tuple(name for name in options.kind or KINDS if name not in left_out)
    some = f"-{zlib.crc32(' '.join(options.kind).encode()):08x}" if options.kind else ""
    journal = options.folder / f"journal-{options.seed}{some}.jsonl"
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, why in left_out.items():
        print(f"left out  {name}: {why}")
    entries = read(journal)
    boxes = not why_not()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and leave nothing behind
    with locked(options.folder, ".lock", option="--folder"), ExitStack() as stack:
        work = memory_disk(options.folder.resolve(), stack)
        count = min(MOST_AT_ONCE, num_cores())
        starters = [stack.enter_context(Starter({"OMP_NUM_THREADS": "1"})) for _ in range(count)]
        runs = {run for name in names for run in KINDS[name].runs}
        expected = references(starters[0], work, options.folder / "references.json", sorted(runs))
        free = SimpleQueue[Starter]()
        for starter in starters:
            free.put(starter)

        def next_fault(number: int) -> Entry:
            starter = free.get()
            try:
                return inflict(starter, work, number, options.seed, names, expected, boxes=boxes, keep=options.keep)
            finally:
                free.put(starter)

        pool = ThreadPoolExecutor(count)
        stack.callback(pool.shutdown, cancel_futures=True)
        for entry in pool.map(next_fault, range(len(entries), options.faults)):
            append(journal, entry)
            entries.append(entry)
            _show(entry)
            if options.keep and (entry.problems or entry.missed):
                place = work / f"{entry.number}-{entry.tries}"
                kept = options.folder / f"kept-{entry.number}"
                subprocess.run(["cp", "-r", place, kept], capture_output=True, check=False)
    results = findings(entries, left_out)
    if options.kind:
        return report.alone(results)
    settings = {"runs": Settings(dtype="float64", ranks=2, threads=1, sizes={"faults": len(entries)})}
    timed = "From the first command of a fault until all checks are done."
    text = (__doc__ or "").partition("as root for all kinds.")[2].strip()
    report.write("campaign", "The campaign", COMMAND, timed, settings, results, text)
    return report.alone(results)


def _show(entry: Entry) -> None:
    state = "missed" if entry.missed else "FAIL" if entry.problems else "pass"
    codes = " ".join(map(str, entry.codes))
    print(
        f"{state:<6}  {entry.number:>4}  {entry.kind} of {entry.run}: codes {codes}; {entry.seconds:.1f} s", flush=True
    )
    for problem in entry.problems:
        print(f"          {problem.category}: {problem.text}")
    if entry.missed:
        print(f"          {entry.missed}")


if __name__ == "__main__":
    sys.exit(main())
