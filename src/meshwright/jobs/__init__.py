"""Job graphs: vertices that prepare, train, evaluate and export, planned and run on Ray or on this machine."""

from meshwright.ir.job_graph import JobGraph, JobNode
from meshwright.ir.job_run import JobRecord
from meshwright.jobs.builder import JobBuilder
from meshwright.jobs.load import load
from meshwright.jobs.run import outputs_of, plan_jobs, run_jobs, value_of

__all__ = ["JobBuilder", "JobGraph", "JobNode", "JobRecord", "load", "outputs_of", "plan_jobs", "run_jobs", "value_of"]
