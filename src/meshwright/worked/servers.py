"""Worked numbers of parameter servers: the number of workers from which throughput stops growing, by the cost model and
by simulated replicas."""

from collections.abc import Iterator, Sequence

from meshwright.ir.cluster import Cluster
from meshwright.ir.consistency import ASYNC, Consistency, Server, Sync
from meshwright.ir.device import Device
from meshwright.ir.level import Level
from meshwright.simulate.faults import Faults, ReplicaFaults
from meshwright.simulate.letters import ReplicaStep
from meshwright.simulate.replicas import simulate_replicas
from meshwright.simulate.spans import COMPUTE
from meshwright.worked.line import Line, compared, held

WORKERS, RATE, NUM_BYTES, NIC = 256, 3.0, 97.5e6, 400e9 / 8
"""Workers, iterations per second of a single worker, bytes of gradients, and bytes per second of a NIC in each
direction."""
LATENCY_S = 5e-6
JITTER = 0.3
"""Relative standard deviation of the time of a step. If steps took equally long, workers would stay synchronous, and
would use the two directions of the server's link in turn."""
STEPS = 8
ONE, FOUR = Server(ASYNC, place="own"), Server(ASYNC, servers=4, place="own")


def full_at(rate: float, num_bytes: float, nic: float, servers: int = 1) -> float:
    """The number of workers that saturates the links of the servers, by the cost model. Each worker sends ``num_bytes``
    ``rate`` times per second; each link transfers ``nic`` bytes per second."""
    return servers * nic / (rate * num_bytes)


def throughputs(
    counts: Sequence[int], rule: Consistency, *, rate: float = RATE, num_bytes: float = NUM_BYTES, nic: float = NIC,
    latency_s: float = LATENCY_S, jitter: float = JITTER, steps: int = STEPS,
) -> dict[int, float]:  # fmt: skip
    """Maps numbers of workers to their total iterations per second, by simulation.

    A single worker makes ``rate`` iterations per second, including its messages. Each worker and server has a link that
    transfers ``nic`` bytes per second in each direction. With the arguments, the example can be scaled to links that
    can be emulated."""
    letters_s = 2 * (num_bytes / nic + latency_s) if isinstance(rule, Server) else 0.0
    step = ReplicaStep(step_s=1 / rate - letters_s, parts={0: num_bytes})
    faults = ReplicaFaults(each=Faults(jitter=jitter))
    servers = rule.servers * rule.copies if isinstance(rule, Server) else 0
    result = {}
    for count in counts:
        cluster = _switch(count + servers, nic, latency_s)
        times = simulate_replicas(rule, count, step, cluster, steps=steps, faults=faults)
        begin_s = times.end_s / 2  # workers begin synchronously, and then spread
        ends = [span.end_s for span in times.trace.spans if span.stream == COMPUTE]
        result[count] = sum(end_s > begin_s for end_s in ends) / (times.end_s - begin_s)
    return result


def flattening() -> Iterator[Line]:
    """The throughput of the workers, with every message simulated on shared links."""
    limit, full = NIC / NUM_BYTES, full_at(RATE, NUM_BYTES, NIC)
    single = throughputs((64, 128, WORKERS), ONE)
    yield compared(
        f"one server: throughput flattens at {full:.0f} workers", full, single[WORKERS] / RATE, "{:.0f}",
        f"64 workers make {single[64]:.0f} iterations/s and 128 make {single[128]:.0f}, but 256 only "
        f"{single[WORKERS]:.0f}, the rate of {single[WORKERS] / RATE:.0f} workers without a limit: the link takes "
        f"{limit:.0f} vectors/s; steps vary by {JITTER:.0%}",
        exact=0.1,
    )  # fmt: skip
    four = throughputs((WORKERS,), FOUR)[WORKERS]
    yield held(
        "four servers: not at 256 workers",
        f"{four:.0f} of {RATE * WORKERS:.0f} iterations/s",
        four > 0.9 * RATE * WORKERS,
        f"each link takes a quarter of the bytes: four are full at {full_at(RATE, NUM_BYTES, NIC, 4):.0f} workers",
    )
    ring = throughputs((WORKERS,), Sync(), jitter=0.0, steps=2)[WORKERS]
    yield held(
        "no server, each worker sums a part: not at any number",
        f"{ring:.0f} of {RATE * WORKERS:.0f} iterations/s",
        ring > 0.9 * RATE * WORKERS,
        "a reduce-scatter and an all-gather between 256 equal workers, 2 (N-1)/N vectors over each link",
    )


def _switch(num_ranks: int, nic: float, latency_s: float) -> Cluster:
    """Boxes of one device around a switch."""
    device = Device(
        name="worker", kind="cpu", memory_bytes=2**40, memory_bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"float32": 1e12},
    )  # fmt: skip
    level = Level(name="network", fan_out=num_ranks, alpha_s=latency_s, beta_s_per_byte=1 / nic)
    return Cluster(name="switch", num_devices=num_ranks, device=device, levels=(level,))
