"""Trials of the predictor on a table: how good its choices would be, and how well it learns from a few runs."""

import random
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from meshwright.errors import FileFormatError
from meshwright.planner.cases import Case
from meshwright.planner.learn import learn, with_profile
from meshwright.planner.search import preference
from meshwright.planner.validate import CaseDeviation, Validation, compare, deviation


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The layout that the predictor chooses from a measured sweep (runs of one model and batch on equal devices).

    ``rows`` is the number of runs, and ``layouts`` the number of different setups. Runs of one setup differ in a
    setting that the table does not contain. ``case`` names a run of the chosen setup. ``out_of_memory``: at least one
    run of the chosen setup failed. ``slower`` is the median time of its runs divided by the time of the fastest run of
    the sweep, minus 1; None if all its runs failed."""

    sweep: str
    rows: int
    layouts: int
    case: str
    out_of_memory: bool
    slower: float | None


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """The choices from all sweeps of a table. ``median`` and ``p90`` are percentiles of ``slower``, in percent; None if
    no chosen setup ran. ``failed`` counts the chosen setups with at least one run that was out of memory."""

    choices: tuple[Choice, ...]
    failed: int
    median: float | None
    p90: float | None


class Trials(msgspec.Struct, frozen=True, kw_only=True):
    """Errors after learning from ``learned`` random runs of a table. The other runs are judged, and errors are means
    over ``repeats`` draws. ``mape`` and ``zero_shot_mape`` are the mean errors of times in percent, with and without
    learning. ``coverage`` is the fraction of times inside the 80 % interval. ``oom_balanced_accuracy`` is defined as in
    ``Validation``. A value is None if it is None in all draws. ``software`` names the software that was learned, each
    separately; ``too_few`` names the software with too few runs."""

    learned: int
    repeats: int
    software: tuple[str, ...]
    too_few: tuple[str, ...]
    mape: float | None
    zero_shot_mape: float | None
    coverage: float | None
    memory_mape: float | None
    oom_balanced_accuracy: float | None


def choose(cases: Sequence[Case]) -> Choices:
    """Choose a layout from each sweep of a table, by the closed form, in the way in which a search ranks its options
    (``search.preference``)."""
    sweeps: dict[tuple[str, int, bytes, int], list[Case]] = {}
    for case in cases:
        model = msgspec.json.encode(msgspec.structs.replace(case.setup.model, name=""))
        key = case.cluster.name, case.setup.world_size, model, case.setup.global_batch
        sweeps.setdefault(key, []).append(case)
    found = []
    for runs in sweeps.values():
        layouts: dict[bytes, list[tuple[Case, CaseDeviation]]] = {}
        for case in runs:
            layouts.setdefault(layout_key(case), []).append((case, deviation(case)))
        times = [case.measured_s for case in runs if case.measured_s]
        if len(layouts) < 2 or not times:
            continue
        rows = [group[0][1] for group in layouts.values()]
        best = min(rows, key=lambda row: preference(row.fit_chance, row.predicted_s))
        group = next(group for group in layouts.values() if group[0][1] is best)
        ran = [case.measured_s for case, _ in group if case.measured_s]
        setup = runs[0].setup
        found.append(
            Choice(
                sweep=f"{setup.model.layers} layers {setup.model.hidden} wide, {setup.model.sequence} tokens, batch "
                f"{setup.global_batch} on {setup.world_size} {runs[0].cluster.device.name}",
                rows=len(runs),
                layouts=len(layouts),
                case=group[0][0].name,
                out_of_memory=any(case.out_of_memory for case, _ in group),
                slower=statistics.median(ran) / min(times) - 1 if ran else None,
            )
        )  # fmt: skip
    slower = [100 * choice.slower for choice in found if choice.slower is not None]
    return Choices(
        choices=tuple(found),
        failed=sum(choice.out_of_memory for choice in found),
        median=float(np.median(slower)) if slower else None,
        p90=float(np.percentile(slower, 90)) if slower else None,
    )


def layout_key(case: Case) -> bytes:
    """A key made of everything that the table says about how a case runs. Runs with equal keys differ in a setting that
    the table does not contain."""
    setup = msgspec.structs.replace(case.setup, model=msgspec.structs.replace(case.setup.model, name=""))
    return msgspec.json.encode((setup, case.cluster.name, case.cluster.software.name))


def learning_trials(cases: Sequence[Case], learned: int, repeats: int, seed: int = 0) -> Trials:
    """Learn from ``learned`` random runs of a table and judge the others, ``repeats`` times. If the table has runs of
    several kinds of software, each is learned and judged separately.

    Raises:
        FileFormatError: every stack of the table has too few runs, or ``learn`` refuses the runs.
    """
    if learned < 1 or repeats < 1:
        raise FileFormatError(
            f"{min(learned, repeats)} is less than 1", where="--learn, --repeats", remedy="give 1 or more"
        )
    stacks: dict[str, list[Case]] = {}
    for case in cases:
        stacks.setdefault(case.cluster.software.name, []).append(case)
    enough = {name: runs for name, runs in stacks.items() if len(runs) > learned}
    if not enough:
        most = max((len(runs) for runs in stacks.values()), default=0)
        raise FileFormatError(
            f"the table has {most} usable rows" + (" of one software" if len(stacks) > 1 else ""), where="--learn",
            remedy=f"learn from fewer than {most}, so that a row is left to judge",
        )  # fmt: skip
    draw = random.Random(seed)
    results: list[Validation] = []
    before: list[Validation] = []
    for _ in range(repeats):
        rest, foretold = [], []
        for runs in enough.values():
            taken = set(draw.sample(range(len(runs)), learned))
            software = learn([runs[index] for index in sorted(taken)], runs[0].cluster.software).software
            left = [case for index, case in enumerate(runs) if index not in taken]
            rest += left
            foretold += with_profile(left, software)
        results.append(compare(foretold))
        before.append(compare(rest))
    return Trials(
        learned=learned,
        repeats=repeats,
        software=tuple(enough),
        too_few=tuple(name for name in stacks if name not in enough),
        mape=_mean([result.mape for result in results]),
        zero_shot_mape=_mean([result.mape for result in before]),
        coverage=_mean([result.coverage for result in results]),
        memory_mape=_mean([result.memory_mape for result in results]),
        oom_balanced_accuracy=_mean([result.oom_balanced_accuracy for result in results]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
