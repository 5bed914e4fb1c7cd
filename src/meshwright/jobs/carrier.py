"""Carriers of job graphs: what the scheduler asks for, and the carrier on processes of this machine."""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import msgspec

from meshwright.ir.job_graph import JobNode
from meshwright.jobs.assignment import Outcome, UnitAssignment
from meshwright.jobs.execute import signal_name
from meshwright.jobs.placement import NodeSlot


class Carrier(Protocol):
    """Carries out assignments somewhere. The scheduler decides when each starts, and on which node."""

    def nodes(self) -> Mapping[str, JobNode]:
        """The nodes that are there now."""

    def start(self, assignment: UnitAssignment, slot: NodeSlot) -> None:
        """Start an assignment in a place that is free."""

    def wait(self) -> list[Outcome]:
        """Wait until at least one assignment has ended, and return the outcomes; a worker that died is an outcome."""

    def stop(self) -> None:
        """End all workers, whatever they do."""


def lost(assignment: UnitAssignment, start_s: float, problem: str) -> Outcome:
    """The outcome of an assignment whose worker died."""
    return Outcome(
        unit=assignment.unit, attempt=assignment.attempt, start_s=start_s, end_s=time.time(),
        vertex=assignment.tasks[0].vertex, problem=problem, lost=True,
    )  # fmt: skip


class _Worker:
    """A process that runs one assignment after the other. It starts with ``variables`` in its environment, and keeps
    them: libraries read them once."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = dict(variables)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshwright.jobs.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            env={**os.environ, **variables},
        )  # fmt: skip
        self.assignment: UnitAssignment | None = None
        self.start_s = 0.0
        self.read = bytearray()


class Processes:
    """The carrier of this machine: worker processes, which are kept for later assignments with the same variables."""

    def __init__(self, nodes: Mapping[str, JobNode]) -> None:
        self._nodes = dict(nodes)
        self._idle: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    def nodes(self) -> Mapping[str, JobNode]:
        """The nodes that the graph's file names, all on this machine, or this machine."""
        return self._nodes

    def start(self, assignment: UnitAssignment, slot: NodeSlot) -> None:
        """Give the assignment to an idle worker with its variables, or to a new one."""
        if self._nodes[slot.node].gpus:
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slot.gpus))}
            assignment = msgspec.structs.replace(assignment, environment=visible)
        variables = assignment.worker_variables
        worker = next((worker for worker in self._idle if worker.variables == variables), None)
        if worker is None:
            worker = _Worker(variables)
        else:
            self._idle.remove(worker)
        worker.assignment, worker.start_s = assignment, time.time()
        assert worker.process.stdin is not None
        assert worker.process.stdout is not None
        with suppress(BrokenPipeError):  # it died while idle: the end of its output says so
            worker.process.stdin.write(msgspec.json.encode(assignment) + b"\n")
            worker.process.stdin.flush()
        self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)

    def wait(self) -> list[Outcome]:
        """Wait until at least one assignment has ended."""
        outcomes: list[Outcome] = []
        while not outcomes:
            for key, _ in self._selector.select():
                worker: _Worker = key.data
                assert worker.assignment is not None
                data = os.read(key.fd, 1 << 16)
                worker.read += data
                if data and not worker.read.endswith(b"\n"):
                    continue
                self._selector.unregister(key.fileobj)
                if data:
                    outcomes.append(msgspec.json.decode(worker.read, type=Outcome))
                    worker.read.clear()
                    self._idle.append(worker)
                else:
                    outcomes.append(lost(worker.assignment, worker.start_s, _end_of(worker.process)))
                worker.assignment = None
        return outcomes

    def stop(self) -> None:
        """Kill all workers, and what they have started."""
        workers = [*self._idle, *(key.data for key in self._selector.get_map().values())]
        for worker in workers:
            with suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            _close(worker.process)
        self._idle.clear()
        self._selector.close()


def _end_of(process: "subprocess.Popen[bytes]") -> str:
    """How a worker ended."""
    code = process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _close(process)
    if code < 0:
        memory = " (often the machine had no memory left)" if code == -signal.SIGKILL else ""
        return f"its worker was killed by {signal_name(-code)}{memory}"
    return f"its worker ended with exit code {code}"


def _close(process: "subprocess.Popen[bytes]") -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
