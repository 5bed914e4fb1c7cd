"""Collectives that have been started, attached to their tensors until somebody waits for them."""

import time
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from meshwright.comm.member import GroupState, culprit
from meshwright.comm.record import CollectiveTimes, DeviceSpan, current, place
from meshwright.comm.transport.base import OWN_ERROR, UnderWay, Work, first_line, moves_streams, operations_of
from meshwright.errors import LostRankError

_WORK = "_meshwright_work"
"""The attribute of a tensor that holds its ``_Started`` while a collective on the tensor is under way."""
HALO = "halo"
"""The operation whose sizes differ between ranks."""


class _Started(NamedTuple):
    """A collective under way: the work to wait for, and its description for traces, records and errors. ``times``: when
    its start began and ended. ``device_span``: its begin and end on a device that runs behind the host."""

    work: Work | None
    what: str
    group: str
    state: GroupState
    times: tuple[float, float]
    label: str
    place: object
    number: int
    num_bytes: int
    event: int
    device_span: DeviceSpan | None


def attach(
    value: Tensor, work: Work | None, what: str, label: str, num_bytes: int, group: dist.ProcessGroup,
    state: GroupState, begun: float,
) -> Tensor:  # fmt: skip
    """Attach the work of a collective to ``value``, so that ``wait`` finds it, and record the collective. ``num_bytes``
    is the size of its whole vector. ``state`` is the state of its group. ``begun``: when its start began."""
    where = place()
    num = num_bytes // value.itemsize
    event = state.record(group, what, num, value.dtype, label, where, is_alike=what != HALO)
    times, name, recorder = (begun, time.perf_counter()), group.group_name, current()
    span = recorder.started(name, operations_of(work)) if recorder is not None else None
    started = _Started(work, what, name, state, times, label, where, state.begun, num_bytes, event, span)
    setattr(value, _WORK, started)
    return value


def wait(value: Tensor) -> Tensor:
    """Wait until the collective that computes ``value`` is done.

    Raises:
        LostRankError: torch.distributed's collective was not done within the timeout, or lost a rank.
        RankError: the ranks wait for each other in vain.
    """
    started: _Started | None = value.__dict__.pop(_WORK, None)
    if started is not None:
        state, recorder, waiting = started.state, current(), time.perf_counter()
        reached = recorder.moment(waiting) if recorder is not None else waiting
        if flight := state.progress.recorder:
            flight.wait(started.event)
        if started.work is not None:
            try:
                if moves_streams(started.work):
                    started.work.wait()
                else:
                    state.progress.during(started.work.wait)
            except Exception as error:
                raised = _explained(started, value, error)
                if flight:
                    flight.fail(started.event)
                if raised is error:
                    raise
                raise raised from error
        if flight:
            flight.end(started.event)
        done = time.perf_counter()
        begun, begin_done = started.times
        if state.watch is not None:
            state.watch.note(started.what, started.num_bytes, done - waiting + begin_done - begun)
        if recorder is not None:
            received = started.work.num_bytes if isinstance(started.work, UnderWay) else None
            last = recorder.moment(done)
            times = CollectiveTimes(begun, last, ((begun, begin_done), (reached, last)))
            if started.device_span is not None:  # launching it took time of the host only
                times = CollectiveTimes(*started.device_span, ((reached, last),))
            recorder.collective(started.what, started.group, times, value.nbytes if received is None else received)
    return value


def _explained(started: _Started, value: Tensor, error: Exception) -> Exception:
    """The error of a wait. An error of torch.distributed becomes a LostRankError that names the collective for which
    this rank waited. A LostRankError is extended by a report of all ranks, or replaced by the watchdog's error."""
    streams = started.state.progress
    if isinstance(error, RuntimeError) and streams.verdict is not None:
        return streams.verdict
    if isinstance(error, LostRankError):
        return streams.explained(error)
    if not isinstance(error, RuntimeError):
        return error
    text, lost = started.state.description(started.label, started.place), culprit()
    problem = f"{lost.problem}, and this rank waits" if lost else first_line(error)
    what = f"{started.what} of {value.numel()} x {str(value.dtype).removeprefix('torch.')}" + f" ({text})" * bool(text)
    where = lost.where if lost else started.state.axis or f"group {started.group}"
    problem = f"{problem}\n     rank {dist.get_rank()} is in #{started.number} {what}, native"
    return streams.explained(LostRankError(problem, where=where, remedy=OWN_ERROR))
