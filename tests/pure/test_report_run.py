"""The page of a run: self-contained, with every rank and part, the ledger's numbers, and what is missing by name."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli import run as cli
from meshwright.errors import FileFormatError, MeshwrightError, TraceError
from meshwright.ir import files
from meshwright.ir.layout import Layout
from meshwright.ir.ledger import PARTS, Ledger
from meshwright.ir.make_ledger import make_ledger
from meshwright.ir.plan import Alternative, Bucket, Note
from meshwright.ir.trace import COPY, MemorySample, Span, Trace
from meshwright.ir.units import size
from meshwright.report import read_run, render_run, run_drawing, svg
from tests.pure.test_ledger import BOX, MIB, plan_of, step
from tests.pure.test_report import balanced

PLAN = msgspec.structs.replace(
    plan_of(Layout(pp=2, dp=2, microbatches=2)), microbatches=2, schedule="1f1b",
    stages=tuple(msgspec.structs.replace(stage, first=first) for stage, first in zip(
        plan_of(Layout(pp=2)).stages, ("", "blocks.2.norm:native_layer_norm#0"), strict=True
    )),
    notes=(Note(module="<head>", split="batch over dp", reason="it divides"),),
    buckets=(Bucket(axis="dp", parameters=("a", "b"), num_bytes=3 * MIB),),
    alternatives=(Alternative(layout="tp4", step_s=0.3, peak_memory_bytes=2**30, why="20.0% slower"),),
)  # fmt: skip
BEFORE = {rank: (0.2, 0.01 * rank, 0.05) for rank in range(4)}
AFTER = {rank: (0.25 + 0.003 * rank, 0.02, 0.06) for rank in range(4)}
ROWS = (
    {"step": 0, "held_out": {"loss": 5.5}},
    {"step": 1, "step_s": 0.31, "lr": 0.1, "loss": 5.25},
    {"step": 2, "step_s": 0.33, "lr": 0.1, "loss": 4.125, "grad_norm": float("inf")},
    {"step": 2, "held_out": {"loss": 4.0625}},
)


def actions(trace: Trace) -> Trace:
    """The same with names and streams as a pipeline has them."""
    sent = tuple(Span(rank, "communication", f"{rank}SEND_F0", 0.1, 0.12, bytes=MIB) for rank in range(4))
    named = {"forward": "0F1"}
    spans = tuple(msgspec.structs.replace(span, what=named.get(span.what, span.what)) for span in trace.spans)
    return msgspec.structs.replace(trace, spans=spans + sent)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run's directory with everything in it."""
    folder = tmp_path / "run"
    peaks = {rank: (100 + rank) * MIB for rank in range(4)}
    predicted = actions(step(PLAN, BEFORE, "simulated", dict.fromkeys(range(4), 90 * MIB)))
    measured = actions(step(PLAN, AFTER, peaks=peaks)).shifted(1234.5)
    files.save(PLAN, folder / "plan.json")
    files.save(predicted, folder / "predicted.json")
    files.save(measured, folder / "trace.json")
    files.save(make_ledger(PLAN, predicted, [measured], BOX), folder / "ledger.json")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "run.toml").write_text('[model]\nname = "gpt"  # <small>\n')
    return folder


class Page(HTMLParser):
    """The page's attributes, tables and tooltips."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.rows: list[list[str]] = []
        self.titles: list[str] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "title":
            self.titles.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "title":
            self.titles[-1] += data
        elif inside not in ("style", "script"):
            self.words += data
        if self.rows and {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data


def test_the_page_needs_no_network_and_has_both_colour_schemes(directory: Path) -> None:
    page = render_run(read_run(directory), "meshwright report run")
    balanced(page)
    assert "prefers-color-scheme: dark" in page
    assert "color-scheme: light dark" in page
    assert not [
        attribute
        for attribute in Page(page).attributes
        if attribute[1] in ("src", "href", "srcset", "action", "xlink:href")
    ]
    assert not re.search(r"https?://|<link|@import|url\(", page)
    undefined = set(re.findall(r"var\((--\w+)\)", page)) - set(re.findall(r"(--\w+):", page))
    assert not undefined


def test_the_table_has_the_ledgers_numbers_for_every_rank_and_part(directory: Path) -> None:
    ledger = files.load(directory / "ledger.json", Ledger)
    rows = Page(render_run(read_run(directory))).rows
    start = rows.index(["rank", "part", "predicted", "in 80 % of runs", "measured", "pred/meas"]) + 1
    table_rows = iter(rows[start:])
    for entry in ledger.ranks:
        parts = [part for part in PARTS if part != "waiting for data"]  # nobody waited
        for number, what in enumerate((*parts, "step", "peak memory")):
            row = next(row for row in ledger.rows() if (row.rank, row.what) == (entry.rank, what))
            predicted, measured, ratio = row.texts()
            rank = "" if number else str(entry.rank)
            assert next(table_rows) == [rank, what, predicted, row.between, measured, ratio]
    words = Page(render_run(read_run(directory))).words
    assert ledger.explanation in words
    assert f"pred/meas {ledger.step_ratio:.2f}" in words


def test_timelines_lay_predicted_over_measured_for_every_rank_with_words_on_each_box(directory: Path) -> None:
    page = Page(render_run(read_run(directory)))
    for rank in range(4):
        assert f"0F1 on rank {rank}, predicted compute: 200 ms, from 0 us to 200 ms" in page.titles
        assert (
            f"{rank}SEND_F0 on rank {rank}, measured communication: 20 ms, from 100 ms to 120 ms, 1 MiB" in page.titles
        )
        assert f"rank {rank}, measured: at most {100 + rank} MiB" in page.titles
        assert f"rank {rank}: at most 90 MiB predicted and {100 + rank} MiB measured" in page.words
    waits = [title for title in page.titles if "measured wait" in title]
    assert len(waits) == 8
    assert page.words.count("predicted") >= 4


def test_losses_and_plan_are_told(directory: Path) -> None:
    page = render_run(read_run(directory))
    read = Page(page)
    assert [line for line in read.titles if line in ("training", "held out")] == ["training", "held out"]
    for words in ("4.1250", "5.5000 to 4.0625", "320 ms", "dp2 x pp2, 2 micro-batches, 1f1b", "20.0% slower", "<head>"):
        assert words in read.words
    assert ["1", "1", "blocks.2.norm:native_layer_norm#0"] in read.rows
    assert "&lt;small&gt;" in page


@pytest.mark.parametrize(
    ("file", "gone"),
    [("trace.json", "measured compute"), ("predicted.json", "predicted compute"), ("ledger.json", "The ledger")],
)
def test_what_is_missing_is_said_and_the_rest_is_shown(directory: Path, file: str, gone: str) -> None:
    assert gone in render_run(read_run(directory))
    (directory / file).unlink()
    page = render_run(read_run(directory))
    balanced(page)
    assert gone not in page
    assert f"Missing: {file}: " in page
    assert "Memory over time" in page


def test_without_traces_and_rows_there_is_still_a_page(directory: Path) -> None:
    for name in ("trace.json", "predicted.json", "ledger.json"):
        (directory / name).unlink()
    (directory / "metrics.jsonl").write_text("")
    page = render_run(read_run(directory))
    balanced(page)
    assert "<svg" not in page
    assert "metrics.jsonl has no row with a loss" in page
    assert "Not compared" in page


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        (directory / name).write_bytes(change((directory / name).read_bytes()))

    return spoil


OTHER = b"0123456789abcdef"


@pytest.mark.parametrize(
    ("spoil", "kind", "message"),
    [
        (lambda run: (run / "plan.json").unlink(), FileFormatError, "run: there is no plan.json"),
        (rewritten("plan.json", lambda data: data[:-9]), FileFormatError, "plan.json: not valid JSON"),
        (
            rewritten("trace.json", lambda data: data.replace(PLAN.digest.encode(), OTHER)),
            TraceError,
            f"trace.json: the trace is of plan 0123456789abcdef, the run's plan is {PLAN.digest}",
        ),
        (
            rewritten("predicted.json", lambda data: data.replace(PLAN.digest.encode(), b"")),
            TraceError,
            f"predicted.json: the trace is of no plan, the run's plan is {PLAN.digest}",
        ),
        (
            rewritten("predicted.json", lambda data: data.replace(b'"simulated"', b'"measured"')),
            TraceError,
            "predicted.json: the trace is measured\n  -> trace.json is measured, predicted.json is simulated",
        ),
        (
            rewritten("ledger.json", lambda data: data.replace(PLAN.digest.encode(), OTHER)),
            TraceError,
            "ledger.json: the ledger is of plan 0123456789abcdef",
        ),
        (rewritten("metrics.jsonl", lambda data: b"{}\n" + data), FileFormatError, "metrics.jsonl: line 1: not a row"),
    ],
)
def test_foreign_and_damaged_files_are_named(
    directory: Path, spoil: Callable[[Path], None], kind: type[MeshwrightError], message: str
) -> None:
    spoil(directory)
    with pytest.raises(kind) as caught:
        read_run(directory)
    assert message in str(caught.value)


def test_a_last_row_that_was_not_finished_is_left_out(directory: Path) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert read_run(directory).metrics.losses == [(1.0, 5.25), (2.0, 4.125)]


def test_the_command_writes_page_and_trace(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = directory.parent / "perfetto.json"
    assert cli(["report", str(directory), "--trace", str(events)]) == 0
    output = capsys.readouterr().out
    assert f"-> {directory / 'report.html'}\n-> {events}\n" in output
    assert "off most: computing on rank 3" in output
    names = {
        event["args"]["name"]
        for event in json.loads(events.read_bytes())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert names == {f"{source} rank {rank}" for source in ("simulated", "measured") for rank in range(4)}
    other = directory.parent / "page.html"
    (directory / "trace.json").unlink()
    (directory / "predicted.json").unlink()
    assert cli(["report", str(directory), "-o", str(other)]) == 0
    assert "missing: trace.json: no step was noted" in capsys.readouterr().out
    assert f"meshwright report {directory}" in other.read_text()


def test_the_page_and_the_command_show_the_interval_of_the_highest_peak(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = read_run(directory).ledger
    assert ledger is not None
    about = ledger.interval_bytes
    assert about is not None
    assert cli(["report", str(directory)]) == 0
    assert f"measured, {size(about.low)} to {size(about.high)} in 80 % of runs" in capsys.readouterr().out
    page = (directory / "report.html").read_text()
    assert all(row.between in page for row in ledger.rows())
    assert cli(["report", str(directory), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    peaks = [row["interval"] for row in document["rows"] if row["what"] == "peak memory"]
    assert {"low": about.low, "high": about.high} in peaks
    assert document["ledger"]["memory_deviation"] == ledger.memory_deviation


def test_the_timelines_are_a_picture_of_their_own(directory: Path) -> None:
    picture = directory.parent / "run.svg"
    assert cli(["report", str(directory), "--picture", str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{name}svg"
    assert [node.text for node in root.iter(f"{name}text") if node.get("class") == "strong"] == [
        f"rank {rank}" for rank in range(4)
    ]
    (style,) = root.iter(f"{name}style")
    assert ".comm" in (style.text or "")
    assert len(list(root.iter(f"{name}rect"))) > 8


def test_what_the_command_cannot_do_is_told_in_a_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["report", str(directory / "no")]) == 2
    assert "no: there is no such directory" in capsys.readouterr().err
    for name in ("trace.json", "predicted.json"):
        (directory / name).unlink()
    for option in ("--trace", "--picture"):
        assert cli(["report", str(directory), option, str(directory / "t.json")]) == 2
        text = capsys.readouterr().err
        assert "this run has no traces" in text
        assert f"leave {option} out" in text
    assert cli(["report", str(directory), "-o", str(directory / "plan.json" / "page.html")]) == 2
    assert "cannot write the file" in capsys.readouterr().err


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_marks_are_round_and_inside(low: float, length: float) -> None:
    positions = run_drawing.marks(low, low + length)
    assert 2 <= len(positions) <= 7
    assert all(low - 1e-6 * length <= position <= low + length * (1 + 1e-6) for position in positions)
    mantissa = f"{positions[1] - positions[0]:.3e}"[0]
    assert mantissa in "125"


def test_a_picture_begins_with_the_step_and_has_copies_beside_communication() -> None:
    copies = (Span(0, COPY, "inputs", -5.0, -3.0), Span(0, COPY, "optimizer state", -1.0, 1.0))
    trace = Trace(source="measured", spans=(*copies, Span(0, "compute", "0F0", 0.0, 2.0)))
    assert [(span.what, span.start_s, span.end_s) for span in run_drawing.begun_at_zero(trace).spans] == [
        ("optimizer state", 0.0, 1.0), ("0F0", 0.0, 2.0),
    ]  # fmt: skip
    assert "optimizer state on rank 0, measured copy" in run_drawing.timelines({"measured": trace})


def test_long_timelines_show_their_beginning_and_say_so() -> None:
    spans = tuple(Span(0, "compute", f"0F{i}", i, i + 1.0) for i in range(2 * run_drawing.MOST_SPANS))
    drawn = run_drawing.timelines({"measured": Trace(source="measured", spans=spans)})
    assert drawn.count("<rect") == run_drawing.MOST_SPANS + 1
    assert "the first 6,000 s of 12,000 s" in drawn


def test_memory_is_held_until_the_next_sample_and_of_many_ranks_some_are_drawn() -> None:
    samples = tuple(MemorySample(rank, time_s, 1) for rank in range(50) for time_s in (0.0, 1.0))
    trace = Trace(source="simulated", spans=(Span(0, "compute", "0F0", 0.0, 2.0),), memory=samples)
    drawn = run_drawing.memory_lines({"predicted": trace})
    assert drawn.count("<polyline") == svg.MOST_LINES
    assert "rank 49, predicted: at most" in drawn
    points = re.findall(r'points="([^"]*)"', drawn)[0].split()
    assert len(points) == 5
    assert run_drawing.memory_lines({"measured": msgspec.structs.replace(trace, memory=())}) == ""
