"""The uncertainty of predictions by sizes: intervals of a step's time and of a memory peak."""

from meshwright.cost.memory import Memory, estimate_memory, stage_memory
from meshwright.cost.setup import Setup
from meshwright.cost.step import StepEstimate
from meshwright.ir.cluster import Cluster
from meshwright.ir.interval import Interval, interval, step_deviation
from meshwright.ir.software import Software, Spread


def step_interval(estimate: StepEstimate, software: Software) -> Interval:
    """The interval of a step's time, in seconds."""
    return interval(estimate.step_s, estimate_deviation(estimate, software.spread))


def estimate_deviation(estimate: StepEstimate, spread: Spread) -> float:
    """The standard deviation of the logarithm of a step's time. The parts of a step have independent uncertainties,
    weighted by their fractions of the step."""
    waited_s = estimate.tensor_comm_s + estimate.pipeline_comm_s + estimate.data_comm_s
    host_s, step_s = estimate.host_s + estimate.other_s, estimate.step_s
    return step_deviation(spread, waited_s / step_s, host_s / step_s)


def memory_interval(memory: Memory, software: Software) -> Interval:
    """The interval of a memory peak, in bytes."""
    return interval(memory.peak_bytes, software.spread.memory)


def reported_bytes(setup: Setup, cluster: Cluster) -> float:
    """The predicted peak as the software of the cluster reports it (``Software.reported``)."""
    match cluster.software.reported:
        case "allocated_last":
            return stage_memory(setup, setup.pipeline.last_rank, cluster).allocated_bytes
        case "allocated":
            return estimate_memory(setup, cluster).allocated_bytes
        case "reserved":
            return estimate_memory(setup, cluster).reserved_bytes
        case "device":
            return estimate_memory(setup, cluster).peak_bytes
