"""The page of a job graph: its picture, its cost, and the predicted schedule beside the measured one."""

from meshwright.ir.job_run import JobRecord
from meshwright.ir.units import seconds
from meshwright.report.job_drawing import graph_picture, schedule_picture
from meshwright.report.template import rendered


def render_jobs(record: JobRecord, command: str = "") -> str:
    """The record as one HTML page with styles and pictures inside; light or dark, like the reader's system."""
    pictures = {"graph": graph_picture(record), "schedule": schedule_picture(record)}
    return rendered("jobs.html.j2", pictures, record=record, sentence=jobs_sentence(record), command=command)


def jobs_sentence(record: JobRecord) -> str:
    """The time of the graph in a sentence."""
    parts = []
    if record.measured_s is not None:
        parts.append(f"took {seconds(record.measured_s)}")
    if record.predicted_s is not None:
        least = "at least " if any(row.predicted_s is None for row in record.rows) else ""
        parts.append(f"predicted {least}{seconds(record.predicted_s)}")
        parts.append(f"critical path {seconds(record.critical_s)} ({' -> '.join(record.critical)})")
    return "; ".join(parts) or "no times are known yet"
