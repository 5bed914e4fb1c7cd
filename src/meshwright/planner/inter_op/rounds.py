"""How the time of a pipeline follows from its stages: the time to fill it, and rounds of micro-batches that repeat."""

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
"""A step has many micro-batches if there are more than this number for each stage."""


def fill_of(layout: Layout) -> float:
    """The time to fill and drain a pipeline, as a fraction of the time under ``1f1b``. Under ``1f1b``, p stages take
    p - 1 times the time of a micro-batch. Schedules that wait only for their first forward wait for a quarter of a
    stage's time, because backward takes up to three times as long as forward (with recomputation)."""
    waits = {"interleaved": 1.0, "zb-h1": 1 / 3, "zb-h2": 1 / 4, "zb-v": 1 / 4, "dualpipe-v": 1 / 4}
    return waits.get(layout.schedule, 1.0) / layout.chunks


def filled_s(layout: Layout, total_s: float) -> float:
    """A lower bound on the seconds of a pipeline whose stages take ``total_s`` for one micro-batch together.

    Stage k works m x s_k, and it cannot begin and end before the first and the last micro-batch have passed the stages
    before it: T >= m s_k + f (s_0 + ... + s_{k-1}), where f is the part of a stage's work that its neighbours must wait
    for (``fill_of``). The stages with the smallest T fulfil all of these with equality. Then s_k falls by the factor
    1 - f / m from stage to stage, and their sum gives T.
    """
    fill = min(fill_of(layout), layout.microbatches)
    return fill * total_s / (1 - (1 - fill / layout.microbatches) ** layout.pp)


def periods(layout: Layout) -> tuple[Schedule, Schedule, float]:
    """Schedules with few and with more micro-batches, and how often their difference is added to a step with few.

    A pipeline that is full repeats itself: every further round of p micro-batches takes as long as the round before,
    and keeps no more in memory. Of a long step, two and three rounds are therefore enough; three and four under
    schedules that take longer to be full, and more where more micro-batches may be in flight. If stages differ by half,
    the result may be some percent too short, because ranks that wait first use up what they are ahead. A short step is
    complete: nothing is added.
    """
    pp, m = layout.pp, layout.microbatches
    long = pp > 1 and m > LONG * pp
    rounds = 3 if layout.schedule in ("zb-h2", "zb-v", "dualpipe-v") else max(2, -(-layout.in_flight // pp))
    numbers = (rounds * pp, (rounds + 1) * pp) if long else (m, m)
    few, more = (training_schedule(layout.schedule, pp, number, layout.chunks, layout.in_flight) for number in numbers)
    return few, more, m / pp - rounds if long else 0.0


def passes(layout: Layout) -> tuple[str, ...]:
    """The kinds of actions of one micro-batch on a stage; ``dualpipe-v`` splits few backwards."""
    split = layout.schedule in ("zb-h1", "zb-h2", "zb-v")
    return (ActionKind.F.value, *((ActionKind.I.value, ActionKind.W.value) if split else (ActionKind.B.value,)))


def spans(each: NDArray[np.float64]) -> NDArray[np.float64]:
    """[i, j]: the sum from i to j (both included); infinite where j is before i."""
    before = np.concatenate([[0.0], np.cumsum(each)])
    spans: NDArray[np.float64] = before[None, 1:] - before[:-1, None]
    return np.where(np.tri(len(each), k=-1, dtype=bool), inf, spans)


def simulated_s(layout: Layout, work: StepWork, cluster: Cluster) -> float:
    """Simulated seconds of a step."""

    def played(schedule: Schedule) -> float:
        return play(schedule, work, layout.mesh(), cluster, overlap=cluster.device.kind != "cpu").step_s

    few, more, steps = periods(layout)
    return played(few) + steps * (played(more) - played(few)) if steps else played(few)
