"""Pages that explain a plan to someone who did not run it: one self-contained HTML file, without any network."""

from meshwright.report.page import Alternative, Part, Point, Report, render

__all__ = ["Alternative", "Part", "Point", "Report", "render"]
