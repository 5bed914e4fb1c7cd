"""Compute the time of a pipeline from its stages: the time to fill it, and the time of repeating rounds of
micro-batches."""

from math import inf

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.work import StepWork
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout import Layout
from meshwright.ir.schedule import ActionKind, Schedule
from meshwright.schedules.pipeline import training_schedule
from meshwright.simulate.engine import play

LONG = 4
"""A step counts as long if it has more than this number of micro-batches per stage."""


def fill_of(layout: Layout) -> float:
    """The time to fill and drain a pipeline, as a fraction of the time under ``1f1b``. Under ``1f1b``, p stages take
    p - 1 times the time of a micro-batch. In schedules that wait only for their first forward, the wait is a quarter of
    a stage's time, because backward takes up to three times as long as forward (with recomputation)."""
    waits = {"interleaved": 1.0, "zb-h1": 1 / 3, "zb-h2": 1 / 4, "zb-v": 1 / 4, "dualpipe-v": 1 / 4}
    return waits.get(layout.schedule, 1.0) / layout.chunks


def filled_s(layout: Layout, total_s: float) -> float:
    """A lower bound on the seconds of a pipeline whose stages together take ``total_s`` for one micro-batch.

    Stage k works for m x s_k seconds. It can start only when the first micro-batch has passed the stages before it, and
    they must also finish after it: T >= m s_k + f (s_0 + ... + s_{k-1}), where f is the fraction of a stage's work that
    its neighbours must wait for (``fill_of``). T is smallest if equality holds for all stages. Then each s_k is
    (1 - f / m) times s_{k-1}, and the sum of all s_k determines T.
    """
    fill = min(fill_of(layout), layout.microbatches)
    return fill * total_s / (1 - (1 - fill / layout.microbatches) ** layout.pp)


def periods(layout: Layout) -> tuple[Schedule, Schedule, float]:
    """Two schedules, with few and with more micro-batches, and the number of times that their difference is added to a
    step with few micro-batches.

    A full pipeline repeats itself: every further round of p micro-batches takes the same time as the previous round,
    and needs no more memory. So two and three rounds suffice to describe a long step. Schedules that take longer to
    fill need three and four rounds, and more if more micro-batches may be in flight. If the times of stages differ by
    half, the result may be some percent too short, because ranks that wait first use up their lead. For a short step,
    the schedule is complete and nothing is added.
    """
    pp, m = layout.pp, layout.microbatches
    long = pp > 1 and m > LONG * pp
    rounds = 3 if layout.schedule in ("zb-h2", "zb-v", "dualpipe-v") else max(2, -(-layout.in_flight // pp))
    numbers = (rounds * pp, (rounds + 1) * pp) if long else (m, m)
    few, more = (training_schedule(layout.schedule, pp, number, layout.chunks, layout.in_flight) for number in numbers)
    return few, more, m / pp - rounds if long else 0.0


def passes(layout: Layout) -> tuple[str, ...]:
    """The kinds of actions of a micro-batch on a stage. ``dualpipe-v`` counts as unsplit, because it splits few
    backwards."""
    split = layout.schedule in ("zb-h1", "zb-h2", "zb-v")
    return (ActionKind.F.value, *((ActionKind.I.value, ActionKind.W.value) if split else (ActionKind.B.value,)))


def spans(each: NDArray[np.float64]) -> NDArray[np.float64]:
    """[i, j]: the sum from i to j (both included); infinite if j is less than i."""
    before = np.concatenate([[0.0], np.cumsum(each)])
    spans: NDArray[np.float64] = before[None, 1:] - before[:-1, None]
    return np.where(np.tri(len(each), k=-1, dtype=bool), inf, spans)


def simulated_s(layout: Layout, work: StepWork, cluster: Cluster) -> float:
    """The simulated seconds of a step."""

    def played(schedule: Schedule) -> float:
        return play(schedule, work, layout.mesh(), cluster, overlap=cluster.device.kind != "cpu").step_s

    few, more, steps = periods(layout)
    return played(few) + steps * (played(more) - played(few)) if steps else played(few)
