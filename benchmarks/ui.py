"""Seconds in which the explorer's views are there, in a browser, for 1,024 ranks and 10,000 micro-batch actions.

The limit is a second a view. Chromium and the server share this machine. The part ``server`` counts the CPU seconds of
the server alone, which other programs on the machine change little.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from playwright.sync_api import sync_playwright
from starlette.testclient import TestClient

from benchmarks.report import alone, at_most, measured, new_run, show, write
from meshwright import prediction
from meshwright.ir import files
from meshwright.ir.layout import Layout
from meshwright.ir.plan import Plan
from meshwright.ir.result import Duration, Finding, Series, Settings
from meshwright.ir.statistics import median
from meshwright.ir.trace import MemorySample, Span, Trace
from meshwright.runtime.launch import num_cores
from meshwright.ui.explorer import Explorer, Question
from meshwright.ui.run_list import RunFolders
from meshwright.ui.server import application, listening, server_of
from tests.pure.test_ledger import plan_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

COMMAND = "python -m benchmarks.ui"
ROUNDS = 7
LIMIT_S, SERVER_LIMIT_S = 1.0, 0.4
RANKS, ACTIONS, RUNS = 1024, 10_000, 10_000
MODEL, CLUSTER, BATCH = "gpt3-175b", "a100-80gb-dgx-hdr200x8", 1536
ASKED = f"model={MODEL}&cluster={CLUSTER}&devices={RANKS}&batch={BATCH}"
LONG = "tp=8,pp=16,chunks=2,schedule=interleaved,sequence_parallel=true"
"""A layout of 1,024 ranks whose schedule has about 12,000 actions: 16 stages, 2 chunks, 192 micro-batches, forward and
backward."""
MODELS = ("megatron-530b", "llama3-405b", "llama3-70b", "turing-nlg-17b", "megatron-145b", "mixtral-8x22b", MODEL)
DEVICES = (128, 256, 384, 512, 768, 1536, 2048)
SEQUENCES = (512, 1024, 4096, 8192)
"""What the other what-if questions ask for, in turn."""
PORT = 8600
"""The port in the addresses of requests that reach the server's functions without a network."""
SETTINGS = {
    "explorer": Settings(
        dtype="bfloat16", ranks=1, threads=1,
        sizes={"model": MODEL, "cluster": CLUSTER, "devices": RANKS, "batch": BATCH},
    ),
    "run": Settings(dtype="float32", ranks=1, threads=1, sizes={"ranks of the run": RANKS, "spans": ACTIONS}),
    "list": Settings(dtype="float32", ranks=1, threads=1, sizes={"runs": RUNS}),
}  # fmt: skip
TEXT = """Seconds from an action (a click, a key, an address) to the frame in which the view's content is drawn, in a
headless Chromium beside the server on this machine. Batches and speeds of links change from round to round, so that
every such answer has its search; before the other questions, links get a new speed, which is not timed. The first page
is that of a program that was just started, in a browser that has not seen it. The timelines have a row for each of
1,024 ranks. CPU seconds are those of the server for the answer and its timeline."""
ANSWERED = "#answer[data-shown]:not([aria-busy])"


def answers(rounds: int) -> list[Finding]:
    """The views of the explorer."""
    with _page(Path(tempfile.gettempdir())) as (page, home):
        page.goto(f"{home}/#{ASKED}")
        _drawn(page, ANSWERED)
        batches = iter(BATCH + 512 * (index + 1) for index in range(4 * rounds))

        def ask() -> None:
            page.locator("#batch").fill(str(next(batches)))
            _drawn(page, ANSWERED)

        speeds = iter(1 + index / 16 for index in range(1, 8 * rounds))

        def link() -> None:
            page.locator("#between").fill(str(next(speeds)))
            _drawn(page, ANSWERED)

        results: list[Finding] = [
            _duration("a new batch: front, parts, memory, timeline", "explorer", rounds, ask),
            _duration("other links: front, parts, memory, timeline", "explorer", rounds, link),
        ]
        page.locator("#layouts > summary").click()
        choices = page.locator('input[name="choice"]:not(:checked)')

        def choose() -> None:
            choices.nth(2).click()  # `check` would look for the box again, after the answer has replaced it
            _drawn(page, ANSWERED)

        results.append(_duration("another layout of the front", "explorer", rounds, choose))
        results += _questions(page, rounds, link)
        results.append(_compared_layouts(page, rounds))
        page.locator("#batch").fill(str(BATCH))
        page.locator("#between").fill("1")
        page.locator("#layout").fill(LONG)
        page.locator("#layout").press("Enter")
        _drawn(page, ANSWERED)
        page.locator(".tools select").select_option(label=f"all {RANKS:,} ranks")
        spans = _num_actions(LONG)
        assert spans >= ACTIONS, f"{LONG} has {spans} actions"
        results += _timeline_findings(page, rounds, f"{RANKS:,} ranks, {spans:,} actions of the schedule", "explorer")

        def redraw() -> None:
            page.locator(".tools select").select_option(index=0)
            _next_frame(page)

        results.append(_duration("the long schedule as one rank of each stage", "explorer", rounds, redraw))
        return results


def _questions(page: "Page", rounds: int, link: Callable[[], None]) -> list[Finding]:
    """The other what-if questions. Before each, untimed, ``link`` asks for a new speed of links, so that no answer is
    there already; after the last, the question is as before."""

    def fill(field: str, values: Sequence[int]) -> Callable[[], None]:
        turn = cycle(values)

        def act() -> None:
            page.locator(field).fill(str(next(turn)))
            _drawn(page, ANSWERED)

        return act

    models, kinds = cycle(MODELS), cycle(("full", "selective", "none", "any"))

    def model() -> None:
        page.locator("#model").select_option(label=next(models))
        _drawn(page, ANSWERED)

    def recompute() -> None:
        page.locator(f'input[value="{next(kinds)}"]').click()
        _drawn(page, ANSWERED)

    results: list[Finding] = []
    for what, act in (
        ("another model", model),
        ("other devices", fill("#devices", DEVICES)),
        ("other sequences", fill("#seq", SEQUENCES)),
        ("another recomputation", recompute),
    ):
        target = f"{what}: front, parts, memory, timeline"
        results.append(_duration(target, "explorer", rounds, act, before=link))
        page.goto(page.url.partition("#")[0] + "runs")
        page.goto(page.url.removesuffix("runs") + f"#{ASKED}")
        _drawn(page, ANSWERED)
    page.locator("#layouts > summary").click()
    return results


def _compared_layouts(page: "Page", rounds: int) -> Finding:
    """Two layouts line by line: the fastest, and one that is kept."""
    page.locator("#pin").click()
    page.locator('input[name="choice"]:not(:checked)').nth(2).click()
    _drawn(page, ANSWERED)
    here, address = page.url, page.locator("#compare").get_attribute("href")
    home = here.partition("/#")[0]

    def compare() -> None:
        page.goto(f"{home}{address}")
        _drawn(page, "main.compare td")

    duration = _duration("two layouts of 1,024 ranks line by line", "explorer", rounds, compare)
    page.goto(here)
    _drawn(page, ANSWERED)
    return duration


def cold(rounds: int) -> list[Finding]:
    """The first page of a program that has just been started: nothing is known yet. The start itself does not count."""
    seconds = []
    command = [sys.executable, "-m", "meshwright.cli", "ui", "--no-browser"]
    for _ in range(rounds):
        with (
            tempfile.TemporaryDirectory() as folder,
            subprocess.Popen([*command, folder], stdout=subprocess.PIPE, text=True) as program,
            sync_playwright() as driver,
        ):
            try:
                assert program.stdout is not None
                address = next(line.strip() for line in program.stdout if line.startswith("http://"))
                browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                page = browser.new_page()
                page.set_default_timeout(120_000)
                started = time.perf_counter()
                page.goto(f"{address}#{ASKED}")
                _drawn(page, ANSWERED)
                seconds.append(time.perf_counter() - started)
                browser.close()
            finally:
                program.terminate()
    return [_judged("the first page after the program's start", "explorer", seconds)]


def server(rounds: int) -> list[Finding]:
    """The CPU seconds of the server for the explorer's requests."""
    asked: dict[str, str | int | float] = {"model": MODEL, "cluster": CLUSTER, "devices": RANKS, "batch": BATCH}
    with tempfile.TemporaryDirectory() as directory:
        app = application(Explorer(), RunFolders(Path(directory)), "token", PORT)
        client = TestClient(app, base_url=f"http://127.0.0.1:{PORT}")
        client.get("/", params={"token": "token"})

        def answered(**changes: str | int | float) -> str:
            question = asked | changes
            answer = client.get("/explore/answer", params=question)
            assert answer.status_code == 200, answer.text
            client.get("/explore/timeline.json", params=question).raise_for_status()
            return answer.text

        batches = iter(BATCH + 512 * (index + 1) for index in range(4 * rounds))
        speeds = iter(1 + index / 16 for index in range(1, 4 * rounds))
        words = re.findall('name="choice" value="([^"]*)"', answered())
        choices = iter(words * (1 + rounds // len(words)))
        acts: dict[str, Callable[[], Any]] = {
            "a new batch": lambda: answered(batch=next(batches)),
            "other links": lambda: answered(between=next(speeds)),
            "another layout": lambda: answered(layout=next(choices)),
            f"a schedule of {_num_actions(LONG):,} actions": lambda: answered(layout=LONG),
        }
        return [
            _duration(f"CPU time of the server: {what}", "explorer", rounds, act, time.process_time, SERVER_LIMIT_S)
            for what, act in acts.items()
        ]


def runs(rounds: int) -> list[Finding]:
    """The page of a run of 1,024 ranks, and the list of 10,000 runs."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        _write_run(folder / "wide")
        _write_run(folder / "other", microbatches=4)
        for number in range(RUNS - 2):
            other = folder / f"run-{number:05d}"
            other.mkdir()
            (other / "run.toml").touch()
        with _page(folder) as (page, home):

            def listed() -> None:
                page.goto(f"{home}/runs")
                _next_frame(page)

            def opened() -> None:
                page.goto(f"{home}/run?name=wide")
                _drawn(page, "figure.ready")

            results: list[Finding] = [_duration(f"the list of {RUNS:,} runs", "list", rounds, listed)]
            results.append(_duration(f"a run of {RANKS:,} ranks with {ACTIONS:,} spans", "run", rounds, opened))
            results += _timeline_findings(page, rounds, f"{RANKS:,} ranks, {ACTIONS:,} spans of a run", "run")

            def compared() -> None:
                page.goto(f"{home}/compare?old=run:wide&new=run:other")
                _drawn(page, "main.compare td")

            return [*results, _duration("the plans of two runs line by line", "run", rounds, compared)]


PARTS: dict[str, Callable[[int], list[Finding]]] = {"server": server, "cold": cold, "answers": answers, "runs": runs}


@contextmanager
def _page(folder: Path) -> Iterator[tuple["Page", str]]:
    """A browser's page at an explorer in a thread of this process, and the explorer's address."""
    opened = listening(0)
    port = opened.getsockname()[1]
    server = server_of(application(Explorer(), RunFolders(folder), "token", port))
    thread = threading.Thread(target=server.run, args=([opened],))
    thread.start()
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page()
            page.set_default_timeout(120_000)
            page.goto(f"http://127.0.0.1:{port}/?token=token")
            yield page, f"http://127.0.0.1:{port}"
            browser.close()
    finally:
        server.should_exit = True
        thread.join()


def _timeline_findings(page: "Page", rounds: int, what: str, settings: str) -> list[Finding]:
    """How long it takes to zoom, and to move, in the timeline that is shown."""
    scroller = page.locator("figure.timeline .scroller")
    scroller.focus()
    turn = iter(range(10**6))

    def zoom() -> None:
        scroller.press("+" if next(turn) % 6 < 3 else "-")
        _next_frame(page)

    def move() -> None:
        scroller.press("ArrowDown" if next(turn) % 2 else "ArrowRight")
        _next_frame(page)

    return [_duration(f"zoom: {what}", settings, rounds, zoom), _duration(f"next span: {what}", settings, rounds, move)]


def _drawn(page: "Page", selector: str) -> None:
    """Wait until the browser has drawn an element that ``selector`` finds. It looks at every frame;
    ``wait_for_selector`` would look every 0.5 s."""
    page.wait_for_function("selector => document.querySelector(selector)", arg=selector, polling="raf")
    _next_frame(page)


def _next_frame(page: "Page") -> None:
    """Wait until the browser has drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def _duration(
    what: str, settings: str, rounds: int, act: Callable[[], Any],
    clock: Callable[[], float] = time.perf_counter, limit_s: float = LIMIT_S,
    before: Callable[[], Any] | None = None,
) -> Duration:  # fmt: skip
    act()  # warm
    seconds = []
    for _ in range(rounds):
        if before is not None:
            before()
        started = clock()
        act()
        seconds.append(clock() - started)
    return _judged(what, settings, seconds, limit_s)


def _judged(what: str, settings: str, seconds: list[float], limit_s: float = LIMIT_S) -> Duration:
    estimate = median(seconds)
    return Duration(
        target=f"{what}: within {limit_s:g} s",
        verdict=at_most(estimate, limit_s),
        measured=f"{estimate} s",
        series=Series.of(seconds, steps=1, settings=settings, run=new_run()),
        limit_s=limit_s,
    )


def _num_actions(words: str) -> int:
    question = Question(model=MODEL, cluster=CLUSTER, devices=RANKS, batch=BATCH, layout=words)
    model = prediction.load_model(MODEL)
    cluster = prediction.load_cluster(question.cluster, RANKS)
    trace = prediction.rehearsed_trace(prediction.setup_of(words, model, BATCH, RANKS, cluster.device), cluster)
    assert trace is not None
    return len(trace.spans)


def _write_run(folder: Path, microbatches: int = 1) -> None:
    """A run of 1,024 ranks, with about 10,000 measured spans and as many predicted ones."""
    plan: Plan = msgspec.structs.replace(plan_of(Layout(dp=2, microbatches=microbatches)), model="synthetic")
    each = ACTIONS // RANKS + 1
    spans = tuple(
        Span(rank, "compute", f"0{'FB'[index % 2]}{index // 2}", index + 0.001 * rank, index + 0.9 + 0.001 * rank)
        for rank in range(RANKS)
        for index in range(each)
    )
    memory = tuple(MemorySample(rank, float(index), 2**30 + rank) for rank in range(RANKS) for index in range(each))
    files.save(plan, folder / "plan.json")
    files.save(Trace(source="measured", plan=plan.digest, spans=spans, memory=memory), folder / "trace.json")
    files.save(Trace(source="simulated", plan=plan.digest, spans=spans, memory=memory), folder / "predicted.json")
    (folder / "metrics.jsonl").write_text('{"step": 1, "step_s": 0.3, "loss": 5.0}\n')
    (folder / "run.toml").write_text("")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the result."""
    measurement = measured(COMMAND, __doc__, PARTS, ROUNDS, arguments)
    if not measurement.whole:
        return alone(measurement.findings)
    for finding in measurement.findings:
        show(finding)
    write(
        "ui", "The explorer's views", COMMAND, "from an action to the frame that shows its view", SETTINGS,
        measurement.findings, f"{TEXT} {measurement.rounds} rounds each, on {num_cores()} cores.",
    )  # fmt: skip
    return int(any(row.verdict == "fail" for row in measurement.findings))


if __name__ == "__main__":
    sys.exit(main())
