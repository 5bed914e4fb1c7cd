"""Measures the times and memory of opaque regions on this machine, and keeps the figures in the user's cache."""

import hashlib
import inspect
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from meshwright.capture.builder import Capture
from meshwright.capture.opaque import OpaqueRegions, RegionCall
from meshwright.capture.opaque_samples import SampledCall
from meshwright.capture.values import contents_of, put_contents
from meshwright.errors import MeshwrightError
from meshwright.ir import files
from meshwright.ir.graph import Graph, Operator
from meshwright.ir.opaque import TARGETS, MeasuredCost, OpaqueCall, OpaqueCost, call_of
from meshwright.runtime import launch
from meshwright.runtime.live_bytes import CountingBytes
from meshwright.runtime.machine import machine_name

log = logging.getLogger("meshwright")

TIMES = 5
"""Runs of a call that are timed; the median counts."""
LONG_S = 0.5
"""A call that takes longer is timed once."""


def with_costs(captured: Capture) -> Graph:
    """The graph of a capture, in which the operators of opaque regions have their measured costs.

    Every call is run forward and backward, on one thread, on the example batch and on half of it if the region is split
    by samples. Equal calls are measured once per machine: the figures are kept in the user's cache, beside the
    fingerprint of the graph. Without an example batch with values, a call has no cost."""
    regions, graph = captured.opaque, captured.graph
    if regions is None or not regions.calls:
        return graph
    costs = {key: _known_cost(graph, regions, key) for key in regions.calls if key in regions.samples}
    regions.forget_inputs()
    return msgspec.structs.replace(graph, operators=tuple(_costed(operator, costs) for operator in graph.operators))


def _costed(operator: Operator, costs: dict[tuple[str, int], OpaqueCost | None]) -> Operator:
    if operator.target not in TARGETS:
        return operator
    call = call_of(operator.arguments)
    cost = costs.get((call.region, call.number))
    text = msgspec.structs.replace(call, cost=cost).text
    return msgspec.structs.replace(operator, arguments=operator.arguments.replace(repr(call.text), repr(text)))


def _known_cost(graph: Graph, regions: OpaqueRegions, key: tuple[str, int]) -> OpaqueCost | None:
    call = next(
        each for each in map(_call, graph.operators) if each is not None and (each.region, each.number) == key
    )  # fmt: skip
    path = _file(graph, regions.calls[key], call)
    if path.exists():
        try:
            return files.load(path, OpaqueCost)
        except MeshwrightError as error:
            log.warning("%s is measured again: %s", path, error)
    if not (sampled := regions.samples[key]).inputs:
        return None
    cost = _measured(regions, call, sampled)
    with suppress(OSError):  # the figures are then measured again the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        files.save(cost, path)
    return cost


def _call(operator: Operator) -> OpaqueCall | None:
    return call_of(operator.arguments) if operator.target == TARGETS[0] else None


def _file(graph: Graph, region: RegionCall, call: OpaqueCall) -> Path:
    """The file of a call's figures. Its name depends on the graph, the machine, the sizes, and the module's code."""
    code = ""
    for kind in dict.fromkeys(type(part) for part in region.module.modules()):
        with suppress(OSError, TypeError):  # a class that was defined in an interactive session has no source
            code += inspect.getsource(kind)
    inputs = [graph.tensors[name] for each in graph.operators if _call(each) == call for name in each.inputs]
    shapes = [(value.shape, value.dtype) for value in inputs]
    identity = (graph.fingerprint, machine_name(), torch.__version__, code, shapes, call.text)
    return launch.cache_directory() / "opaque" / f"{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}.json"


def _measured(regions: OpaqueRegions, call: OpaqueCall, sampled: SampledCall) -> OpaqueCost:
    region = regions.calls[call.region, call.number]
    state = {**dict(region.module.named_parameters()), **dict(region.module.named_buffers())}
    tensors = [value.detach() for value in (*sampled.inputs, *(state[name] for name in region.names))]
    log.info("measuring opaque region %s", call.name)
    device = tensors[0].device if tensors else torch.device("cpu")

    def of(samples: int) -> tuple[tuple[float, int], tuple[float, int]]:
        part = call.of_part(samples)
        given = [_part(value, rows * samples, call.batch_dim) for value, rows in _with_rows(tensors, call)]
        results = regions.forward(given, part.text, 0, 0)
        grads = [torch.ones_like(results[at]) for at in call.given]
        forward = _timed(lambda: regions.forward(given, part.text, 0, 0), device)
        backward = _timed(lambda: regions.backward(given, grads, part.text, 0, 0), device) if call.needs else (0.0, 0)
        return forward, backward

    with _on_one_thread(), _unchanged(region.module):
        whole = of(call.samples)
        half = of(call.samples // 2) if call.rows and call.samples > 1 and call.samples % 2 == 0 else None
    forward, backward = (
        MeasuredCost(whole[at][0], half[at][0] if half is not None else 0.0, whole[at][1]) for at in (0, 1)
    )  # fmt: skip
    return OpaqueCost(
        device=machine_name() if device.type == "cpu" else device.type, forward=forward, backward=backward
    )


def _with_rows(tensors: list[Tensor], call: OpaqueCall) -> Iterator[tuple[Tensor, int]]:
    return zip(tensors, call.rows or [0] * len(tensors), strict=True)


def _part(value: Tensor, size: int, dim: int) -> Tensor:
    return value.narrow(dim, 0, size) if size else value


def _timed(run: Callable[[], Any], device: torch.device) -> tuple[float, int]:
    """The median seconds of a call, and the most bytes of its temporary tensors."""

    def seconds() -> float:
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    with CountingBytes() as counting:
        first = seconds()
    if first > LONG_S:
        return seconds(), counting.live.peak
    return statistics.median(seconds() for _ in range(TIMES)), counting.live.peak


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Undo what runs of a module change in its attributes (counters, lists)."""
    contents = [each for part in module.modules() for each in contents_of(vars(part))]
    try:
        yield
    finally:
        put_contents(contents)


@contextmanager
def _on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
