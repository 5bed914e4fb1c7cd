"""What do the applications in ``examples`` reach, and how much faster is a step on two ranks?

Run as ``python -m benchmarks.applications`` (``make bench-applications``). The exit code is 1 if a goal is missed. Each
application trains at full size on two ranks. Its quality is reached if it is at least the goal that the program states,
and better than a trivial or untrained baseline. Then steps are timed on one rank and on two, with one thread a rank;
speed-ups are reported, not judged: models of a few thousand weights gain nothing from a second rank.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.report import show
from meshwright.bench.repeat import WARMUP_STEPS, alternate
from meshwright.ir.result import Accuracy, Finding, Settings
from meshwright.runtime.launch_replicas import run_replicas
from tests.distributed.pool import Ranks

COMMAND = "make bench-applications"
EXAMPLES = Path(__file__).parents[1] / "examples"
RANKS, ROUNDS, STEPS = 2, 11, 5
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Application:
    """A program in ``examples``, and the samples in a batch of all ranks. ``ensemble``: ranks are members, and one rank
    trains all of them, one after the other."""

    program: str
    samples: int
    split: str
    ensemble: bool = False


APPLICATIONS = [
    Application("forecast_ensemble", 128, "a member each", ensemble=True),
    Application("tangled_meshes", 1, "rows of pictures"),
    Application("function_names", 64, "batch"),
    Application("hugging_face_gpt2", 8, "batch"),
    Application("gshard_text", 16, "batch, experts"),
    Application("date_formats", 128, "batch"),
    Application("googlenet_digits", 32, "batch"),
    Application("alexnet_2012", 64, "channels, features"),
    Application("lenet_digits", 64, "batch, then features"),
    Application("softmax_regression", 64, "batch"),
    Application("exclusive_or", 4, "batch"),
    Application("sobel_edges", 1, "rows of pictures"),
]


# --- on every rank ---------------------------------------------------------------------------------------------------


def program(name: str) -> Any:
    """The module of a program in ``examples``."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def outcomes(name: str, ranks: int) -> list[dict[str, Any]]:
    """Train at full size; what was reached, as the fields of ``Outcome`` with ``passed`` and ``text``."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        reached = program(name).main(ranks)
    return [
        {**outcome._asdict(), "passed": outcome.reached and outcome.better, "text": str(outcome)} for outcome in reached
    ]


def timed(application: Application, ranks: int, rounds: int, steps: int) -> tuple[list[float], int]:
    """Seconds a step by round on this number of ranks, and the number of parameters that a step trains."""
    torch.set_num_threads(1)
    module = program(application.program)
    with contextlib.redirect_stdout(io.StringIO()):
        if application.ensemble and ranks == 1:
            trainings = [module.training(1, member) for member in range(RANKS)]
        else:
            trainings = [module.training(ranks)]
    parameters = sum(value.numel() for training in trainings for value in training.model.parameters())

    def step() -> None:
        for training in trainings:
            training.step()

    return alternate({"step": step}, rounds=rounds, steps=steps)["step"], parameters


# --- findings --------------------------------------------------------------------------------------------------------


def on_ranks(application: Application, ranks: int, measure: Callable[..., Any], *arguments: Any) -> Any:
    """What ``measure(*arguments)`` returns on the first rank of so many fresh ones."""
    if application.ensemble and ranks > 1:
        with tempfile.TemporaryDirectory() as directory:
            return run_replicas(
                measure, *arguments, num_replicas=ranks, num_ranks=1, directory=Path(directory), restarts=0
            )
    with Ranks() as pool:
        return pool(ranks, measure, *arguments, timeout=TIMEOUT_S)[0]


def findings(application: Application, rounds: int) -> list[Finding]:
    """The quality that an application reaches on two ranks, and its speed-up."""
    name = application.program
    results: list[Finding] = []
    for outcome in on_ranks(application, RANKS, outcomes, name, RANKS):
        results.append(
            Accuracy(
                target=f"{name}: {outcome['what']}, as good as its goal and better than {outcome['trivial']}",
                verdict="pass" if outcome["passed"] else "fail",
                measured=outcome["text"],
                metric=f"{outcome['what']} ({outcome['unit'] or 'no unit'})",
                value=outcome["quality"],
                settings=settings_name(application, RANKS),
                notes={"baseline": outcome["baseline"], "goal": outcome["goal"]},
                **{"most" if outcome["lower"] else "least": outcome["goal"]},
            )
        )
    on_one, parameters = on_ranks(application, 1, timed, application, 1, rounds, STEPS)
    on_two, _ = on_ranks(application, RANKS, timed, application, RANKS, rounds, STEPS)
    results.append(
        report.speedup(
            f"{name}: speed-up of two ranks over one ({application.split})", on_one, on_two, RANKS, None,
            base="the same program on one rank", unit="samples", work=float(application.samples),
            parameters=parameters, steps=STEPS,
            settings=(settings_name(application, 1), settings_name(application, RANKS)),
        )
    )  # fmt: skip
    return results


# --- report ----------------------------------------------------------------------------------------------------------


def settings_name(application: Application, ranks: int) -> str:
    """The name of the settings of an application on this number of ranks, in the result file."""
    return f"{application.program}, {ranks} rank{'s' if ranks > 1 else ''}"


def settings() -> dict[str, Settings]:
    """By application and number of ranks."""
    return {
        settings_name(application, ranks): Settings(
            dtype="float32", ranks=ranks, threads=1, sizes={"batch": application.samples, "split": application.split}
        )
        for application in APPLICATIONS
        for ranks in (1, RANKS)
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and time every application, print and write what was found."""
    parts = {application.program: partial(findings, application) for application in APPLICATIONS}
    results, rounds, whole = report.measured("python -m benchmarks.applications", __doc__, parts, ROUNDS, arguments)
    if not whole:
        return report.alone(results)
    for finding in results:
        show(finding)
    how = f"""A training step of the program's own model, batch and AdamW in float32, with one thread a rank:
{rounds} rounds of {STEPS} steps each after {WARMUP_STEPS} of warm-up, from when all ranks have met until the slowest is
done. One rank and two ranks run one after the other. Making the batches is part of the step."""
    text = f"""{how}
Quality is that of the whole training on two ranks. The goal and the trivial baseline are in the program; data that were
trained on do not count. `forecast_ensemble` has a member on each of two ranks, and trains both on one rank."""
    report.write("applications", "Applications", COMMAND, how.replace("\n", " "), settings(), results, text)
    print("written to benchmarks/results/applications.md and .json")
    return int(any(result.verdict == "fail" for result in results))


if __name__ == "__main__":
    sys.exit(main())
