"""The public functions. They join the planning side and the running side. The command line calls only these
functions."""

from meshwright.api.alpa import recompute_alpa
from meshwright.api.checkpoints import export_checkpoint, list_checkpoints, reshard_checkpoint, verify_checkpoint
from meshwright.api.convolutions import measure_convolutions
from meshwright.api.data import load
from meshwright.api.dry_runs import dry_run, dry_run_of
from meshwright.api.ensembles import joint
from meshwright.api.hangs import explain_run
from meshwright.api.machine import (
    calibrate,
    calibrated,
    calibration_file,
    is_busy,
    learn_from_runs,
    measure_gpus,
    measure_machine,
    measured_kind,
    recalibrate,
    save_cluster,
)
from meshwright.api.other_ranks import can_use, ranks_here, too_large
from meshwright.api.planned_runs import plan_run, searches_of, simulate_run
from meshwright.api.plans import capture, plan, simulate
from meshwright.api.products import grid_product
from meshwright.api.replicas import compare_rules_of_run
from meshwright.api.runs import Trained, num_replica_jobs, ranks_of_replica, train, trainer_of, verify_run
from meshwright.api.schedules import ComparedSchedules, compare_schedules_of_run
from meshwright.api.sweeps import PlanSize, sweep_run
from meshwright.api.times import times_file
from meshwright.api.trainers import auto_parallelize, parallelize, verify
from meshwright.api.worked_examples import recompute_captured
from meshwright.capture.opaque import opaque
from meshwright.catalog import load_cluster
from meshwright.ir.cluster import Cluster
from meshwright.ir.cluster_names import cluster_names
from meshwright.planner.by_sizes import QuickAnswer
from meshwright.runtime.failures import Status
from meshwright.runtime.launch import add_environment, launched, launched_rank, meeting, num_cores, num_devices
from meshwright.runtime.launch_replicas import run_replicas
from meshwright.runtime.launchers import ATTEMPT, Meeting
from meshwright.runtime.loop import HeldOut, Progress
from meshwright.runtime.meeting_point import addresses_of, free_port
from meshwright.runtime.preemption import TOGETHER_S, WARNINGS, Preemption
from meshwright.runtime.products import matmul
from meshwright.runtime.ranks import run_ranks
from meshwright.runtime.restarts import Restarts
from meshwright.runtime.trust import passed_on
from meshwright.runtime.verify import Verification

__all__ = [
    "ATTEMPT",
    "TOGETHER_S",
    "WARNINGS",
    "Cluster",
    "ComparedSchedules",
    "HeldOut",
    "Meeting",
    "PlanSize",
    "Preemption",
    "Progress",
    "QuickAnswer",
    "Restarts",
    "Status",
    "Trained",
    "Verification",
    "add_environment",
    "addresses_of",
    "auto_parallelize",
    "calibrate",
    "calibrated",
    "calibration_file",
    "can_use",
    "capture",
    "cluster_names",
    "compare_rules_of_run",
    "compare_schedules_of_run",
    "dry_run",
    "dry_run_of",
    "explain_run",
    "export_checkpoint",
    "free_port",
    "grid_product",
    "is_busy",
    "joint",
    "launched",
    "launched_rank",
    "learn_from_runs",
    "list_checkpoints",
    "load",
    "load_cluster",
    "matmul",
    "measure_convolutions",
    "measure_gpus",
    "measure_machine",
    "measured_kind",
    "meeting",
    "num_cores",
    "num_devices",
    "num_replica_jobs",
    "opaque",
    "parallelize",
    "passed_on",
    "plan",
    "plan_run",
    "ranks_here",
    "ranks_of_replica",
    "recalibrate",
    "recompute_alpa",
    "recompute_captured",
    "reshard_checkpoint",
    "run_ranks",
    "run_replicas",
    "save_cluster",
    "searches_of",
    "simulate",
    "simulate_run",
    "sweep_run",
    "times_file",
    "too_large",
    "train",
    "trainer_of",
    "verify",
    "verify_checkpoint",
    "verify_run",
]  # fmt: skip
