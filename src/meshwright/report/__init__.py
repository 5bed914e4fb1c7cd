"""Pages that explain a plan or a run to other readers: each page is one HTML file that needs no network."""

from meshwright.report.front import WeighedLayout
from meshwright.report.page import PageContent, StepShare, SweepPoint, render
from meshwright.report.run_files import RunFiles, read_run
from meshwright.report.run_page import learning_command, named_traces, render_run, timeline_picture
from meshwright.report.trace_event import trace_events

__all__ = [
    "PageContent",
    "RunFiles",
    "StepShare",
    "SweepPoint",
    "WeighedLayout",
    "learning_command",
    "named_traces",
    "read_run",
    "render",
    "render_run",
    "timeline_picture",
    "trace_events",
]  # fmt: skip
