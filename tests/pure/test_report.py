"""Reports: one self-contained page that says verdict, parts, timeline, scaling and alternatives, and escapes names."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from meshwright.catalog import load_cluster
from meshwright.catalog.models import load_model
from meshwright.cli import run as cli
from meshwright.ir import units
from meshwright.ir.trace import MemorySample, Span, Trace
from meshwright.planner.search import search
from meshwright.prediction import explain
from meshwright.report import PageContent, StepShare, SweepPoint, WeighedLayout, drawing, render
from meshwright.report.front import front_plot
from meshwright.report.template import packaged, script_digest

DGX = "a100-80gb-dgx-hdr200x8"
TRACE = Trace(
    source="simulated",
    spans=(
        Span(0, "compute", "0F0", 0.0, 1.0),
        Span(1, "compute", "1F0", 1.0, 2.0),
        Span(1, "compute", "1B0", 2.0, 4.0),
    ),
    memory=(MemorySample(0, 0.0, 2**30), MemorySample(0, 4.0, 2**31), MemorySample(1, 0.0, 2**30)),
)
REPORT = PageContent(
    model="m<1>", cluster="c", devices=2, verdict="fits", sentence="It <fits>.", facts=(("step", "1 s"),),
    layout=(("dp", "2", "replicas"),), time=(StepShare(name="compute", size=0.75), StepShare(name="bubble", size=0.25)),
    memory=(StepShare(name="parameters", size=2**30),), memory_limit_bytes=2**32, trace=TRACE,
    scaling=(
        SweepPoint(devices=2, step_s=1.0, sequences_per_s=2.0, usd_per_1000_sequences=None, layout="dp=2"),
        SweepPoint(devices=4, step_s=0.6, sequences_per_s=3.4, usd_per_1000_sequences=None, layout="dp=4"),
        SweepPoint(devices=1, step_s=0.0, sequences_per_s=0.0, usd_per_1000_sequences=None, layout=""),
    ),
)  # fmt: skip


class Balanced(HTMLParser):
    """That every tag is closed, in order."""

    VOID = ("meta", "br", "hr", "img", "input", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """``<rect .../>`` closes itself."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def balanced(page: str) -> None:
    parser = Balanced()
    parser.feed(page)
    assert not parser.open


def test_the_page_says_what_it_is_given_and_nothing_is_fetched() -> None:
    page = render(REPORT)
    balanced(page)
    assert "m&lt;1&gt; on 2 devices of c" in page
    assert "It &lt;fits&gt;." in page
    assert "<strong>Fits</strong>" in page
    assert "75.0 %" in page
    assert "nothing fits" in page
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"https?://|<link|@import|url\(|src=", page)
    assert "default-src 'none'" in page


def test_the_page_has_one_script_which_its_policy_names_and_data_that_ends_no_script() -> None:
    name = "</script><script>alert(1)</script>"
    hostile = msgspec.structs.replace(TRACE, spans=(Span(0, "compute", name, 0.0, 1.0),))
    page = render(msgspec.structs.replace(REPORT, trace=hostile))
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    assert [attributes for attributes, _ in scripts] == [' type="application/json"', ""]
    data, code = (content for _, content in scripts)
    assert json.loads(data)["names"] == [name]
    assert code == packaged("timeline.js")
    assert f"script-src '{script_digest(code)}'" in page
    assert "<script" not in render(msgspec.structs.replace(REPORT, trace=None))


def test_without_a_trace_nothing_is_drawn_over_time() -> None:
    page = render(msgspec.structs.replace(REPORT, trace=None, scaling=()))
    balanced(page)
    assert "over time" not in page
    assert 'role="img"' not in page


@pytest.mark.parametrize(("verdict", "style"), [("fits", "fits"), ("marginal", "marginal"), ("does not fit", "does")])
def test_each_verdict_has_its_colour(verdict: str, style: str) -> None:
    page = render(msgspec.structs.replace(REPORT, verdict=verdict))
    assert f'class="verdict {style}"' in page
    assert verdict == "fits" or f".verdict.{style} {{" in page


def test_the_timeline_has_a_box_for_each_action() -> None:
    drawn = drawing.timeline(TRACE)
    assert re.findall(r'<rect class="(\w+)"', drawn) == ["f", "f", "b"]
    assert "stage 1: 2 s to 4 s" in drawn


def test_long_timelines_show_their_beginning_and_say_so() -> None:
    spans = tuple(Span(0, "compute", f"0F{i}", i, i + 1.0) for i in range(3 * drawing.MOST_SPANS))
    drawn = drawing.timeline(Trace(source="simulated", spans=spans))
    assert drawn.count("<rect") == drawing.MOST_SPANS + 1
    assert "the first 4,000 s of 12,000 s" in drawn


def luminance(colour: str) -> float:
    """The relative luminance of a colour ``#rrggbb`` (WCAG 2.2)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
def test_texts_and_edges_have_the_contrast_that_readers_need(scheme: int) -> None:
    style = packaged("style.css").split("@media (prefers-color-scheme: dark)")[scheme]
    colours = dict(re.findall(r"--(\w+): (#\w{6})", style.partition("}")[0] if scheme == 0 else style))
    texts = [(text, ground) for text in ("ink", "soft", "f", "good", "close", "bad") for ground in ("page", "card")]
    texts += [("inside", box) for box in ("f", "b", "w", "rest", "s3")]  # numbers on a canvas, which axe cannot see
    for pairs, least in ((texts, 4.5), ([("edge", "page"), ("edge", "card")], 3.0)):
        for mark, ground in pairs:
            low, high = sorted((luminance(colours[mark]), luminance(colours[ground])))
            assert (high + 0.05) / (low + 0.05) >= least, (mark, ground)


def test_the_front_is_stairs_and_marks_the_chosen_layout() -> None:
    first = WeighedLayout(layout="", step_s=1.0, peak_bytes=8 * 2**30, verdict="fits", usd=None, why="", words="zero=0")
    change = msgspec.structs.replace
    points = [change(first, step_s=1.0 + n, peak_bytes=(8 - n) * 2**30, words=f"zero={n}") for n in range(4)]
    drawn = front_plot(points, 10 * 2**30, "zero=2", beside=[change(first, step_s=99.0, words="far")])
    assert drawn.count("<circle") == 4  # the slowest is too far away to be drawn
    assert re.findall(r'class="dot chosen"[^>]*data-key="([^"]*)"', drawn) == ["zero=2"]
    (line,) = re.findall(r'class="line front" points="([^"]*)"', drawn)
    corners = [tuple(map(float, corner.split(","))) for corner in line.split()]
    assert len(corners) == 2 * 4  # and on to the memory of the device
    for (x, y), (right, below) in pairwise(corners):
        assert (right == x) != (below == y)
        assert right >= x
        assert below >= y
    assert front_plot([], 2**30) == ""


def test_a_curve_needs_two_points() -> None:
    assert drawing.curve([(8, 1.0)]) == ""
    assert drawing.curve([(8, 1.0), (16, 1.5)]).count("<circle") == 2


def test_numbers_as_one_reads_them() -> None:
    assert [units.seconds(value) for value in (12.34, 0.0123, 4.5e-6, 0.0, 1234.5)] == [
        "12.3 s", "12.3 ms", "4.5 us", "0 us", "1,234 s",
    ]  # fmt: skip
    assert [units.size(num_bytes) for num_bytes in (3 * 2**30, 5 * 2**20, 2**41)] == ["3 GiB", "5 MiB", "2 TiB"]
    assert [drawing.dollars(price) for price in (None, 0.5, 1234.5)] == ["", "$ 0.5", "$ 1,234"]


def test_a_search_becomes_a_report() -> None:
    cluster = load_cluster(DGX, 64)
    result = search(load_model("gpt3-13b"), cluster, global_batch=256)
    report = explain(result, cluster, scaling=[(64, result)], command="meshwright plan")
    assert report is not None
    best = result.options[0]
    assert sum(part.size for part in report.time) == pytest.approx(best.estimate.step_s)
    assert sum(part.size for part in report.memory) == pytest.approx(best.memory.peak_bytes)
    assert report.verdict == best.verdict
    layout = {name: value for name, value, _ in report.layout}
    assert (layout.get("zero", "0"), "sequence parallel" in layout) == (
        str(best.setup.zero), best.setup.sequence_parallel,
    )  # fmt: skip
    assert (best.setup.zero, best.setup.sequence_parallel) != (0, False)
    assert "cp" not in layout
    assert report.alternatives
    assert all(alternative.why for alternative in report.alternatives)
    assert (report.trace is None) == (best.setup.pp == 1)
    balanced(render(report))


def test_where_nothing_fits_the_report_says_so() -> None:
    cluster = load_cluster(DGX, 8)
    report = explain(search(load_model("megatron-1t"), cluster, global_batch=8), cluster)
    assert report is not None
    assert report.verdict == "does not fit"
    assert report.sentence.startswith("None of ")
    assert "this one lacks least" in render(report)


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    asked = ["plan", "llama2-7b", "--cluster", DGX, "--ranks", "16", "--batch", "16"]
    assert cli([*asked, "--report", str(page)]) == 0
    assert capsys.readouterr().out.startswith("fits: The fastest of ")
    text = page.read_text()
    balanced(text)
    assert "meshwright plan llama2-7b --cluster a100-80gb-dgx-hdr200x8 --ranks 16 --batch 16" in text
    assert "With more devices, and fewer" in text
    assert cli([*asked, "--report", str(tmp_path / "no" / "plan.html")]) == 2
    assert "plan.html: there is no folder " in capsys.readouterr().err
    assert cli([*asked, "--report", str(tmp_path)]) == 2
    assert "cannot write the file: Is a directory" in capsys.readouterr().err
    assert cli([*asked, "--report", str(page), "--vary", "devices=8..16"]) == 2
    assert "--report: a report is of one plan" in capsys.readouterr().err
