"""Does the predictor reach its targets? Errors over tables of measured steps, held-out errors, and its own speed.

python -m benchmarks.predictor [FOLDER ...]                 tables in validation/, and in other folders
python -m benchmarks.predictor --hold-out [FOLDER ...]      learn each profile without one of its tables, judge it there
python -m benchmarks.predictor --cross-validate FOLDER      fit A100 without a group of runs, judge it there
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from meshwright.catalog import load_cluster, load_software
from meshwright.cost import host
from meshwright.cost.memory import estimate_memory
from meshwright.cost.setup import Setup
from meshwright.cost.step import estimate_step
from meshwright.ir.device import Kernels
from meshwright.ir.software import Software
from meshwright.planner.cases import Case, read_cases
from meshwright.planner.learn import learn, with_profile
from meshwright.planner.rehearse import rehearse
from meshwright.planner.trials import choose, layout_key, learning_trials
from meshwright.planner.validate import compare
from meshwright.prediction import find_layouts, load_model

HERE = Path(__file__).parent
TABLES = HERE.parent / "validation"
SOFTWARE_OF = {
    "aleph_alpha_13b": "deepspeed",
    "dgxc_h100_llama": "nemo",
    "korthikanti": "megatron-lm",
    "megatron_ci": "megatron-core",
    "megatron_sc21": "megatron-lm",
    "vtrain_single_node": "megatron-lm",
}
"""The software of tables that do not say it, by the name of their file."""

MEAN, MEMORY, LEARNED, COVERED = 5.0, 10.0, 4.0, (0.75, 0.88)
"""The targets: mean error of step times with the right profile, mean error of peaks, and mean error of step times after
learning from 3 runs, all in percent; and the least and the most of the fraction of times inside their interval."""
HALF = 0.5
"""The target for learning from 3 runs without a profile: the part of the error before learning that is left."""
VERDICTS, VERDICTS_LEARNED = 0.90, 0.95
"""The targets for the balanced accuracy of verdicts on memory, with the profile and after learning from 20 runs."""
SLOWER = (2.0, 5.0)
"""The targets for chosen layouts: percent slower than the best of a sweep, in the median and in nine of ten."""

ACTIVATIONS = {
    "22B": (48, 6144, 64, 1, 1, 4, 59.25, 9.5625),
    "175B": (96, 12288, 96, 8, 3, 1, 66.84, 12.35),
    "530B": (105, 20480, 128, 35, 3, 1, 114.02, 23.08),
    "1T": (128, 25600, 160, 64, 1, 1, 131.25, 26.56),
}
"""Layers, hidden size, heads, stages, chunks, micro-batch; GiB of activations on the first stage, kept whole and with
selective recomputation and sequence parallelism (Korthikanti et al. 2022, figures 1 and 7, as read by Calculon)."""

GUESS = {
    "matmul_fraction": (0.9, 0.05), "extra_depth": (128.0, 0.5), "operand_cost": (8.0, 0.5),
    "bandwidth_fraction": (0.8, 0.1), "kernel_s": (3e-6, 0.5), "launch_s": (30e-6, 0.5),
    "attention_fraction": (0.5, 0.3),
    "LOSS_BYTES": (64.0, 0.3), "OPTIMIZER_BYTES": (32.0, 0.1), "HOST_BLEND": (4.0, 0.3),
}  # fmt: skip
"""The constants that come from step times on A100: fields of ``Kernels``, and numbers of the software. For each: where
a fit starts and what it is held near (round numbers that no table was looked at for), and how far it may go, as a
fraction: fractions of peaks are known better than latencies."""

OF_SOFTWARE = {"LOSS_BYTES": "loss_bytes", "OPTIMIZER_BYTES": "optimizer_bytes"}
"""Maps constants that are numbers of a profile to their fields of ``Software``. ``HOST_BLEND`` is one for all."""

GROUPS: dict[str, Callable[[Case], object]] = {
    "tp": lambda case: case.setup.tp,
    "pp": lambda case: case.setup.pp,
    "micro_batch": lambda case: case.setup.micro_batch,
    "hidden": lambda case: case.setup.model.hidden,
    "layers": lambda case: case.setup.model.layers,
}
"""Groups of the largest table that are held out, by what they share."""


def judge(folders: Sequence[Path]) -> bool:
    """Print the errors of every table with the profile of its software, and what is asked of it."""
    good = True
    titles = "rank  constant   80 %  learn 3 from it  from none      from all  floor  memory  verdict  learn 20"
    print(f"{'table':20} {'software':13} runs   mean    p90   bias  {titles}")
    for path in sorted(path for folder in folders for path in folder.glob("*.csv")):
        cases, left_out = read_cases(path, SOFTWARE_OF.get(path.stem, ""))
        errors = compare(cases, left_out)
        learned, unknown = _learned(cases, 3), _learned(with_profile(cases, Software()), 3)
        verdicts = _learned(cases, 20) if errors.oom_balanced_accuracy is not None else {}
        cells = [
            _cell(errors.mape, MEAN), f"{errors.p90 or 0:6.2f} {errors.bias or 0:+6.2f} {errors.spearman or 0:5.3f}",
            f"{errors.baseline_mape or 0:9.2f}", _cell(errors.coverage, *COVERED, width=5),
            f"{learned.get('zero_shot_mape', 0.0):6.2f}", _cell(learned.get("mape"), LEARNED, width=6),
            f"{unknown.get('zero_shot_mape', 0.0):6.2f}",
            _cell(unknown.get("mape"), HALF * unknown.get("zero_shot_mape", 0.0), width=6),
            f"{_fitted(cases):8.2f} {_floor(cases):6.2f}",
            _cell(errors.memory_mape, MEMORY, width=6),
            _cell(errors.oom_balanced_accuracy, VERDICTS, 1.0, width=7),
            _cell(verdicts.get("oom_balanced_accuracy"), VERDICTS_LEARNED, 1.0, width=8),
        ]  # fmt: skip
        good &= not any(cell.endswith("!") for cell in cells)
        print(f"{path.stem:20} {', '.join(errors.software):13} {errors.cases:4} {' '.join(cells)}", flush=True)
    print("! misses what is asked; learn 3: before and after, 20 draws on each device, from the profile and from none")
    print(
        "from all: learned from all runs of a device and a stack, and judged on these very runs; floor: the best time "
        "for each layout"
    )
    print(f"\n{'choices':20} sweeps  ran out of memory  slower: median  p90")
    for path in sorted(path for folder in folders for path in folder.glob("*.csv")):
        chosen = choose(read_cases(path, SOFTWARE_OF.get(path.stem, ""))[0])
        if chosen.choices:
            cells = [_cell(float(chosen.failed), 0.0, width=12), _cell(chosen.median, SLOWER[0], width=14)]
            cells.append(_cell(chosen.p90, SLOWER[1]))
            good &= not any(cell.endswith("!") for cell in cells)
            print(f"{path.stem:20} {len(chosen.choices):6} {' '.join(cells)}")
    return good


def _cell(value: float | None, low: float, high: float | None = None, *, width: int = 6) -> str:
    """A value with a mark if it misses its target: at most ``low``, or between ``low`` and ``high``."""
    if value is None:
        return f"{'-':>{width}} "
    missed = value > low if high is None else not low <= value <= high
    return f"{value:{width}.2f}{'!' if missed else ' '}"


def _learned(cases: Sequence[Case], runs: int) -> dict[str, float]:
    """The mean results of learning trials. Each device of the table has trials of its own, which count by its number of
    runs. A result that no device has (for example a balanced accuracy without failures) is left out."""
    sums: dict[str, list[tuple[int, float]]] = {}
    for device in dict.fromkeys(case.cluster.device.name for case in cases):
        part = [case for case in cases if case.cluster.device.name == device]
        part = part if runs > 3 else [case for case in part if case.measured_s]
        if len(part) > runs + 2:
            trials = msgspec.structs.asdict(learning_trials(part, runs, 20))
            for name in ("mape", "zero_shot_mape", "oom_balanced_accuracy"):
                if trials[name] is not None:
                    sums.setdefault(name, []).append((len(part), trials[name]))
    return {
        name: sum(count * value for count, value in counted) / sum(count for count, _ in counted)
        for name, counted in sums.items()
    }


def _fitted(cases: Sequence[Case]) -> float:
    """The mean error in percent if the numbers of a profile are learned from all runs of a device and a stack (of long
    tables, from about 100 that are spread over it), and judged on all of them: no learning from fewer runs can be
    expected to do better."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        if case.measured_s:
            groups.setdefault((case.cluster.device.name, case.cluster.software.name), []).append(case)
    total = 0.0
    for runs in groups.values():
        learned = learn(runs[:: max(1, len(runs) // 100)], runs[0].cluster.software)
        total += len(runs) * (compare(with_profile(runs, learned.software)).mape or 0.0)
    return total / max(1, sum(map(len, groups.values())))


def _floor(cases: Sequence[Case]) -> float:
    """The mean error in percent of the best prediction that sees only what the table says: runs of one layout differ
    (0 if no two runs do)."""
    layouts: dict[bytes, list[float]] = {}
    for case in cases:
        if case.measured_s:
            layouts.setdefault(layout_key(case), []).append(case.measured_s)
    least = [min(sum(abs(best / run - 1) for run in runs) for best in runs) for runs in layouts.values()]
    return 100 * sum(least) / max(1, sum(map(len, layouts.values())))


FACTORS = ("pace", "matmul", "attention", "traffic", "host", "communication")
"""The factors of a profile, which were chosen by looking at runs, as was ``step_s``. The others are counted in code."""


def hold_out(folders: Sequence[Path]) -> None:
    """For each profile, learn its factors again, from 1, from the tables of its software without one group of runs (a
    table on one device), and judge that group. Bytes that were counted in code, and the constants of devices, stay."""
    groups: dict[str, dict[str, list[Case]]] = {}
    for path in sorted(path for folder in folders for path in folder.glob("*.csv")):
        if path.stem in IN_FOLDER and folders[1:]:
            continue
        for case in read_cases(path, SOFTWARE_OF.get(path.stem, ""))[0]:
            if case.measured_s:
                tables = groups.setdefault(case.cluster.software.name.removesuffix("-2025"), {})
                tables.setdefault(f"{path.stem} {case.cluster.device.name}", []).append(case)
    print(f"{'held out':34} {'software':14} runs   held-out mean   of the profile   of no profile")
    for name, tables in groups.items():
        neutral = msgspec.structs.replace(load_software(name), step_s=0.0, **dict.fromkeys(FACTORS, 1.0))
        for held, runs in tables.items():
            rest = [case for other, cases in tables.items() if other != held for case in cases]
            if not rest:
                continue
            rest = rest[:: max(1, len(rest) // 100)]
            errors = []
            for software in (learn(with_profile(rest, neutral), neutral).software, load_software(name), Software()):
                errors.append(compare(with_profile(runs, software)).mape or 0.0)
            print(
                f"{held:34} {name:14} {len(runs):4} {errors[0]:15.2f} {errors[1]:16.2f} {errors[2]:15.2f}", flush=True
            )


def judge_activations() -> bool:
    """Activation memory of the first stage beside Korthikanti et al."""
    worst = 0.0
    for name, (layers, hidden, heads, pp, chunks, micro_batch, whole, selective) in ACTIVATIONS.items():
        model = msgspec.structs.replace(
            load_model("megatron-22b"), name=name, layers=layers, hidden=hidden, heads=heads
        )
        model = msgspec.structs.replace(model, ffn=4 * hidden)
        for recompute, published in (("none", whole), ("selective", selective)):
            setup = Setup(
                model=model, tp=8, pp=pp, chunks=chunks, micro_batch=micro_batch, global_batch=64 * micro_batch,
                schedule="interleaved" if chunks > 1 else "1f1b", recompute=recompute,  # type: ignore[arg-type]
                sequence_parallel=recompute == "selective", precision="fp16", flash=False,
            )  # fmt: skip
            memory = estimate_memory(setup, load_cluster("a100-80gb-dgx-hdr200x8", 8 * pp))
            worst = max(worst, abs(memory.activations_bytes / 2**30 / published - 1))
    good = worst < 0.05
    print(
        f"activation memory: {100 * worst:.2f} % at most from the published (asked 5 %): {'pass' if good else 'FAIL'}"
    )
    return good


def judge_speed() -> bool:
    """The command line's start, an estimate, a rehearsal of 175B on 1,024 devices, and a search."""
    cluster = load_cluster("a100-80gb-dgx-hdr200x8", 1024)
    setup = Setup(model=load_model("gpt3-175b"), dp=16, tp=8, pp=8, micro_batch=1, global_batch=1536)

    def search() -> object:
        return find_layouts("gpt3-175b", cluster, global_batch=1536)

    runs = [case for case in read_cases(TABLES / "llm_foundry.csv", "llm-foundry")[0] if case.measured_s]
    runs = (2 * runs)[:100]
    measured = [
        ("learning from 100 runs", _median_s(lambda: learn(runs, load_software("llm-foundry")), 1), 10.0),
        ("the command line's start (--help)", _median_s(lambda: _command(["--help"]), 5), 0.4),
        ("an estimate in closed form", _median_s(lambda: estimate_step(setup, cluster), 50), 1e-3),
        ("a rehearsal of 175B on 1,024 devices", _median_s(lambda: rehearse(setup, cluster), 5), 0.1),
        ("a search of 175B on 1,024 devices", _median_s(search, 1), 10.0),
    ]  # fmt: skip
    for name, seconds, limit_s in measured:
        print(f"{name:40} {seconds:9.4f} s  (asked {limit_s:g} s): {'pass' if seconds < limit_s else 'FAIL'}")
    return all(seconds < limit_s for _, seconds, limit_s in measured)


def _median_s(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


def _command(arguments: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-m", "meshwright.cli", *arguments], check=True, stdout=subprocess.DEVNULL)


def cross_validate(folder: Path) -> None:
    """Fit all constants of A100 to all of its tables but one group, and judge them on that group; then on runs that no
    fit has seen, of other devices with A100's constants at their own data sheets' rates.

    The tables are those of ``folder``, and the runs on A100 in ``validation/`` that the folder has not.
    """
    tables = {
        path.stem: [case for case in read_cases(path)[0] if case.measured_s] for path in sorted(folder.glob("*.csv"))
    }
    of_others: dict[str, list[Case]] = {}
    for path in sorted(TABLES.glob("*.csv")):
        cases = [case for case in read_cases(path)[0] if case.measured_s]
        for name in sorted({case.cluster.device.name for case in cases}):
            held = [case for case in cases if case.cluster.device.name == name]
            if name.startswith("a100") and path.stem not in IN_FOLDER:
                tables[f"{path.stem} {name}"] = held
            elif not name.startswith("a100"):
                of_others[f"{path.stem} {name}"] = held
    print(f"{'held out':41} runs   mean   bias")
    for name, held in tables.items():
        source = name.split()[0]  # runs of one publication share software: none of them stays in the fit
        _report(f"table {name}", held, fit([cases for other, cases in tables.items() if other.split()[0] != source]))
    largest = max(tables, key=lambda name: len(tables[name]))
    rest = [cases for name, cases in tables.items() if name != largest]
    for key, of in GROUPS.items():
        for value in sorted({of(case) for case in tables[largest]}, key=str):
            held = [case for case in tables[largest] if of(case) == value]
            kept = [case for case in tables[largest] if of(case) != value]
            _report(f"{largest} {key}={value}", held, fit([kept, *rest]))
    profiles = sorted({_profile(case) for case in tables[largest]})
    errors = []
    for profile in profiles:
        held = [case for case in tables[largest] if _profile(case) == profile]
        constants = fit([[case for case in tables[largest] if _profile(case) != profile], *rest], rounds=3)
        errors += _errors(held, constants)
    _print_errors(f"{largest}, {len(profiles)} profiles each", errors)
    constants = fit(list(tables.values()))
    for name, held in of_others.items():
        _report(name, held, constants)
    print("fitted to all:", ", ".join(f"{name} {value:.3g}" for name, value in constants.items()))


def _profile(case: Case) -> tuple[int, int, int]:
    """What decides the time of a layer on one micro-batch."""
    return case.setup.model.hidden, case.setup.micro_batch, case.setup.tp


IN_FOLDER = ("korthikanti_2022", "narayanan_2021")
"""Tables in ``validation/`` whose runs are in the folder that is fitted to."""

Constants = dict[str, float]
"""The fitted constants, by the names of ``GUESS``."""


def fit(tables: Sequence[Sequence[Case]], *, most: int = 80, rounds: int = 6) -> Constants:
    """The constants with the least squared log errors, each table weighing the same, held near ``GUESS``
    (Levenberg-Marquardt on the logarithms). Of long tables, ``most`` runs that are spread over them are used."""
    used = [case for table in tables for case in table[:: max(1, len(table) // most)]]
    weights = np.concatenate(
        [np.full(len(part), len(part) ** -0.5) for part in (t[:: max(1, len(t) // most)] for t in tables)]
    )
    origin = np.log([value for value, _ in GUESS.values()])
    freedom = np.array([fraction for _, fraction in GUESS.values()])

    def residuals(point: np.ndarray) -> np.ndarray:
        seconds = _step_s(used, _constants(point))
        errors = np.array([np.log(each / (case.measured_s or 1.0)) for each, case in zip(seconds, used, strict=True)])
        return np.concatenate([errors * weights, (point - origin) / freedom * 0.02])

    point, damping = origin.copy(), 1e-2
    here = residuals(point)
    for _ in range(rounds):
        slopes = np.stack([(residuals(point + 0.01 * unit) - here) / 0.01 for unit in np.eye(len(point))], axis=1)
        normal = slopes.T @ slopes
        change = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ here)
        there = residuals(point + change)
        if there @ there < here @ here:
            point, here, damping = point + change, there, damping / 3
        else:
            damping *= 10
    return _constants(point)


def _constants(point: np.ndarray) -> Constants:
    return {key: float(value) for key, value in zip(GUESS, np.exp(point), strict=True)}


def _step_s(cases: Sequence[Case], constants: Constants) -> list[float]:
    """Predicted seconds of a step of each case, with these constants in place of those of its device and of ours."""
    of_device = {name: value for name, value in constants.items() if name in Kernels.__struct_fields__}
    software = msgspec.structs.replace(Software(), **{field: constants[name] for name, field in OF_SOFTWARE.items()})
    ours, seconds = host.HOST_BLEND, []
    try:
        host.HOST_BLEND = constants["HOST_BLEND"]
        for case in cases:
            processors = case.cluster.device.kernels.processors if case.cluster.device.kernels else 1
            device = msgspec.structs.replace(case.cluster.device, kernels=Kernels(processors=processors, **of_device))
            cluster = msgspec.structs.replace(case.cluster, device=device, software=software)
            seconds.append(estimate_step(case.setup, cluster).step_s)
    finally:
        host.HOST_BLEND = ours
    return seconds


def _errors(cases: Sequence[Case], constants: Constants) -> list[float]:
    """Percent by which each case is predicted too slow."""
    seconds = _step_s(cases, constants)
    return [100 * (each / (case.measured_s or 1.0) - 1) for each, case in zip(seconds, cases, strict=True)]


def _report(name: str, cases: Sequence[Case], constants: Constants) -> None:
    _print_errors(name, _errors(cases, constants))


def _print_errors(name: str, errors: Sequence[float]) -> None:
    print(f"{name:40} {len(errors):5} {np.abs(errors).mean():6.2f} {np.mean(errors):+6.2f}", flush=True)


def main() -> int:
    """Print everything; the exit code is 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--cross-validate", type=Path, metavar="FOLDER")
    parser.add_argument("--hold-out", action="store_true")
    chosen = parser.parse_args()
    if chosen.hold_out:
        hold_out([TABLES, *chosen.folders])
        return 0
    if chosen.cross_validate:
        cross_validate(chosen.cross_validate)
        return 0
    return 0 if all([judge([TABLES, *chosen.folders]), judge_activations(), judge_speed()]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
