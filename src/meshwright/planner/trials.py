"""Trials of the predictor on a table: how good its choices would be, and how well it learns from a few runs."""

import random
from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.cost.occupancy import SURE
from meshwright.errors import FileFormatError
from meshwright.planner.cases import Case
from meshwright.planner.learn import learn
from meshwright.planner.validate import CaseDeviation, Validation, compare, deviation


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The layout that the predictor chooses from a measured sweep: runs of one model and batch on equal devices.

    ``rows`` is the number of runs, ``layouts`` that of different setups; runs of one setup differ in something that the
    table does not say. ``case`` names the chosen setup's fastest run. ``out_of_memory``: any run of the chosen setup
    failed. ``slower`` is the time of that fastest run over the fastest of the sweep, minus 1; None if all failed."""

    sweep: str
    rows: int
    layouts: int
    case: str
    out_of_memory: bool
    slower: float | None


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """The choices from all sweeps of a table. ``median`` and ``p90`` are percentiles of ``slower``, in percent, over
    the sweeps whose chosen setup ran; ``failed`` counts the others. ``median`` and ``p90`` are None if nothing ran."""

    choices: tuple[Choice, ...]
    failed: int
    median: float | None
    p90: float | None


class Trials(msgspec.Struct, frozen=True, kw_only=True):
    """Errors after learning from ``learned`` random runs of a table, judged on its other runs: means over ``repeats``
    draws. ``mape`` and ``zero_shot_mape`` are the mean errors of times in percent with and without learning;
    ``coverage`` is the fraction of times inside the interval of 80 %; ``oom_balanced_accuracy`` as in ``Validation``.
    A value is None if no draw has it."""

    learned: int
    repeats: int
    mape: float | None
    zero_shot_mape: float | None
    coverage: float | None
    memory_mape: float | None
    oom_balanced_accuracy: float | None


def choose(cases: Sequence[Case]) -> Choices:
    """Choose from each sweep of a table as the planner would: the fastest setup, by its predicted time, of those that
    surely fit (``SURE``); if none surely fits, the setup that fits most likely."""
    sweeps: dict[tuple[str, int, bytes, int], list[Case]] = {}
    for case in cases:
        model = msgspec.json.encode(msgspec.structs.replace(case.setup.model, name=""))
        key = case.cluster.name, case.setup.world_size, model, case.setup.global_batch
        sweeps.setdefault(key, []).append(case)
    found = []
    for runs in sweeps.values():
        layouts: dict[bytes, list[tuple[Case, CaseDeviation]]] = {}
        for case in runs:
            layouts.setdefault(_layout(case), []).append((case, deviation(case)))
        times = [case.measured_s for case in runs if case.measured_s]
        if len(layouts) < 2 or not times:
            continue
        rows = [group[0][1] for group in layouts.values()]
        safe = [row for row in rows if row.fit_chance >= SURE]
        best = min(safe, key=lambda row: row.predicted_s) if safe else max(rows, key=lambda row: row.fit_chance)
        group = next(group for group in layouts.values() if group[0][1] is best)
        ran = sorted((case.measured_s, case.name) for case, _ in group if case.measured_s)
        setup = runs[0].setup
        found.append(
            Choice(
                sweep=f"{setup.model.layers} layers {setup.model.hidden} wide, {setup.model.sequence} tokens, batch "
                f"{setup.global_batch} on {setup.world_size} {runs[0].cluster.device.name}",
                rows=len(runs),
                layouts=len(layouts),
                case=ran[0][1] if ran else group[0][0].name,
                out_of_memory=any(case.out_of_memory for case, _ in group),
                slower=ran[0][0] / min(times) - 1 if ran else None,
            )
        )  # fmt: skip
    slower = [100 * choice.slower for choice in found if choice.slower is not None]
    return Choices(
        choices=tuple(found),
        failed=sum(choice.out_of_memory for choice in found),
        median=float(np.median(slower)) if slower else None,
        p90=float(np.percentile(slower, 90)) if slower else None,
    )


def _layout(case: Case) -> bytes:
    """What the table says of how a case runs, as a key."""
    setup = msgspec.structs.replace(case.setup, model=msgspec.structs.replace(case.setup.model, name=""))
    return msgspec.json.encode(setup) + case.cluster.software.name.encode()


def learning_trials(cases: Sequence[Case], learned: int, repeats: int, seed: int = 0) -> Trials:
    """Learn from ``learned`` random runs of a table and judge the others, ``repeats`` times.

    Raises:
        FileFormatError: the table has too few runs, or ``learn`` refuses the runs.
    """
    if learned < 1 or repeats < 1:
        raise FileFormatError(
            f"{min(learned, repeats)} is less than 1", where="--learn, --repeats", remedy="give 1 or more"
        )
    if len(cases) <= learned:
        raise FileFormatError(
            f"the table has {len(cases)} usable rows", where="--learn",
            remedy=f"learn from fewer than {len(cases)}, so that a row is left to judge",
        )  # fmt: skip
    draw = random.Random(seed)
    results: list[Validation] = []
    before: list[float] = []
    for _ in range(repeats):
        taken = set(draw.sample(range(len(cases)), learned))
        software = learn([cases[index] for index in sorted(taken)], cases[0].cluster.software).software
        rest = [case for index, case in enumerate(cases) if index not in taken]
        known = {id(case.cluster): msgspec.structs.replace(case.cluster, software=software) for case in rest}
        results.append(compare([msgspec.structs.replace(case, cluster=known[id(case.cluster)]) for case in rest]))
        before.append(compare(rest).mape or 0.0)
    timed = any(result.mape is not None for result in results)
    return Trials(
        learned=learned,
        repeats=repeats,
        mape=_mean([result.mape for result in results]),
        zero_shot_mape=float(np.mean(before)) if timed else None,
        coverage=_mean([result.coverage for result in results]),
        memory_mape=_mean([result.memory_mape for result in results]),
        oom_balanced_accuracy=_mean([result.oom_balanced_accuracy for result in results]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
