"""A station: the process of one source or of one worker in a run of a workflow.

    source ──▶ inbox ─▶ all inputs of an item ─▶ model (or a wait, if devices are emulated) ─▶ outbox ──▶ next worker

Every station computes the ways of all items for itself (``routes.py``), so that nothing is decided while items run, and
each knows how many items it will see.
"""

import queue
import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from meshwright.emulation.devices import wait_until
from meshwright.errors import FailedRankError
from meshwright.ir.graph import ITEM_BYTES
from meshwright.serving.models import captured_variant, examples_of, items_of
from meshwright.serving.plan import WorkflowPlan
from meshwright.serving.routes import routes
from meshwright.serving.simulate import Arrivals, PlayedItems, injections, service_s
from meshwright.serving.wire import Address, Header, Inbox, Outbox
from meshwright.serving.workflow import Workflow

DIFFERENT_ITEMS = 8
"""The number of different random items of a source."""
PATIENCE_S = 60.0
"""Seconds without a message, once its next item has started, after which a worker gives up."""


class StationJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A run of a plan. With ``emulate``, workers wait for the seconds of their profile in place of running models."""

    workflow: Workflow
    plan: WorkflowPlan
    items: int
    arrivals: Arrivals = "even"
    seed: int = 0
    emulate: bool = False

    @property
    def stations(self) -> tuple[str, ...]:
        """The names of all stations: sources, then workers in use."""
        return (*(source.name for source in self.workflow.sources), *self.plan.operator_of)


class StationLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a station did: item, and the times (of ``time.time``) of its start and end. ``sums`` has the sum of each
    result that no other operator reads, in the order of ``times``."""

    name: str
    role: Literal["source", "worker"]
    operator: str
    times: tuple[tuple[int, float, float], ...]
    sums: tuple[float, ...] = ()


class Station:
    """One station of a job. Making it loads and captures its model; then it has an ``address``. ``token``: the same for
    all stations of the job."""

    def __init__(self, job: StationJob, name: str, host: str, token: str) -> None:
        torch.set_num_threads(1)
        self._token = token
        self.job, self.name = job, name
        self._operator = job.plan.operator_of.get(name, "")
        self._output = self._operator or name
        self._sums: list[float] = []
        self._seconds: list[float] = []  # of each item, on an emulated device
        self._routes = routes(job.workflow, job.plan, job.items)
        self._compute: Callable[[int, Mapping[str, Tensor]], Tensor | None]
        self._compute = self._worker() if self._operator else self._source()
        self._inbox = Inbox(host, token)
        self.address: Address = self._inbox.address

    def run(self, addresses: Mapping[str, Address], begin_s: float) -> StationLog:
        """Handle all items. The first starts at ``begin_s``, a time of ``time.time``.

        Raises:
            FailedRankError: the inputs of an item do not come.
            LostRankError: another station cannot be reached, or a message is damaged.
        """
        consumers = self.job.workflow.consumers[self._output]
        wanted = {route[consumer] for route in self._routes for consumer in consumers if self._sees(route)}
        outboxes = {name: Outbox(addresses[name], self._token) for name in sorted(wanted)}
        times = self._items(outboxes, begin_s) if self._operator else self._inject(outboxes, begin_s)
        for outbox in outboxes.values():
            outbox.close()
        self._inbox.close()
        role: Literal["source", "worker"] = "worker" if self._operator else "source"
        return StationLog(
            name=self.name, role=role, operator=self._operator, times=tuple(times), sums=tuple(self._sums)
        )  # fmt: skip

    def _sees(self, route: Mapping[str, str]) -> bool:
        return not self._operator or route[self._operator] == self.name

    # --- sources -----------------------------------------------------------------------------------------------------

    def _inject(self, outboxes: Mapping[str, Outbox], begin_s: float) -> list[tuple[int, float, float]]:
        job, times = self.job, []
        starts = injections(job.workflow.rate_per_s, job.items, job.arrivals, job.seed)
        for item, start_s in enumerate(starts):
            _wait(begin_s + start_s)
            begun = time.time()
            self._send(outboxes, item, self._compute(item, {}))
            times.append((item, begun, time.time()))
        return times

    def _source(self) -> Callable[[int, Mapping[str, Tensor]], Tensor | None]:
        if self.job.emulate:
            return lambda item, inputs: None
        items = items_of(self.job.workflow.source_of[self.name], DIFFERENT_ITEMS, self.job.seed)
        return lambda item, inputs: items[item % len(items)]

    # --- workers -----------------------------------------------------------------------------------------------------

    def _items(self, outboxes: Mapping[str, Outbox], begin_s: float) -> list[tuple[int, float, float]]:
        own_items = [item for item, route in enumerate(self._routes) if route[self._operator] == self.name]
        inputs = self.job.workflow.operator_of[self._operator].inputs
        received: dict[int, dict[str, Tensor]] = {}
        times: list[tuple[int, float, float]] = []
        ended_s = begin_s
        job = self.job
        starts = injections(job.workflow.rate_per_s, job.items, job.arrivals, job.seed)
        while len(times) < len(own_items):
            due_s = begin_s + starts[own_items[len(times)]]
            patience_s = max(0.0, due_s - time.time()) + PATIENCE_S
            try:
                header, payload, came_s = self._inbox.next(patience_s)
            except queue.Empty:
                raise self._missing(set(own_items) - {item for item, *_ in times}, received, inputs) from None
            received.setdefault(header.item, {})[header.source] = _tensor(header, payload)
            if len(received[header.item]) < len(inputs):
                continue
            item, values = header.item, received.pop(header.item)
            # an emulated device begins when input and device are there, not when Python notices it
            begun_s = max(came_s, ended_s) if self._seconds else time.time()
            result = self._compute(item, values)
            if self._seconds:
                _wait(begun_s + self._seconds[item])
            ended_s = begun_s + self._seconds[item] if self._seconds else time.time()
            times.append((item, begun_s, ended_s))
            self._send(outboxes, item, result)
        return times

    def _missing(
        self, left: set[int], received: Mapping[int, Mapping[str, Tensor]], inputs: tuple[str, ...]
    ) -> Exception:
        item = min(left)
        names = [name for name in inputs if name not in received.get(item, {})]
        return FailedRankError(
            f"item {item} did not come from {', '.join(names)} within {PATIENCE_S:g} s", where=self.name,
            remedy="look at the stations before it: one of them has stopped, or a link is too slow",
        )  # fmt: skip

    def _worker(self) -> Callable[[int, Mapping[str, Tensor]], Tensor | None]:
        job, workflow = self.job, self.job.workflow
        operator = workflow.operator_of[self._operator]
        variant = operator.variant(job.plan.models[self._operator])
        if job.emulate:
            device = workflow.worker_of[self.name].device
            self._seconds = service_s(variant, device, job.items, job.seed, workflow.order.index(self._operator))
            return lambda item, inputs: None
        examples = examples_of(workflow, job.plan.models)
        model = captured_variant(operator, variant, examples)
        model.measured_s(*(examples[name] for name in operator.inputs))  # until caches and allocators are warm
        return lambda item, inputs: model(*(inputs[name] for name in operator.inputs))

    def _send(self, outboxes: Mapping[str, Outbox], item: int, result: Tensor | None) -> None:
        consumers = self.job.workflow.consumers[self._output]
        if not consumers:
            self._sums += [] if result is None else [float(result.sum())]
            return
        if result is None:
            payload = bytes(round(self.job.workflow.message_bytes(self._output, self.job.plan.models)))
            header = Header(item, self._output)
        else:
            payload = result.contiguous().numpy().tobytes()
            header = Header(item, self._output, str(result.dtype).removeprefix("torch."), tuple(result.shape))
        for consumer in consumers:
            outboxes[self._routes[item][consumer]].send(header, payload)


def _wait(until_s: float) -> None:
    """Wait until ``time.time`` shows a time."""
    wait_until(time.perf_counter() + until_s - time.time())


def _tensor(header: Header, payload: bytearray) -> Tensor:
    """The tensor of a message; an empty one if the message only stands for one."""
    if header.dtype not in ITEM_BYTES:
        return torch.empty(0)
    dtype: torch.dtype = getattr(torch, header.dtype)
    return torch.frombuffer(payload, dtype=dtype).reshape(header.shape)


def played(logs: list[StationLog], workflow: Workflow) -> PlayedItems:
    """The logs of all stations as one account of the run."""
    items = max(len(log.times) for log in logs if log.role == "source")
    begun, ended = np.full(items, np.inf), np.zeros(items)
    for log in logs:
        for item, begin_s, end_s in log.times:
            if log.role == "source":
                begun[item] = min(begun[item], begin_s)
            elif log.operator in workflow.sinks:
                ended[item] = max(ended[item], end_s)
    first = float(begun.min())
    busy = {log.name: sum(end - begin for _, begin, end in log.times) for log in logs if log.role == "worker"}
    return PlayedItems(
        injected_s=tuple((begun - first).tolist()), finished_s=tuple((ended - first).tolist()), busy_s=busy
    )  # fmt: skip
