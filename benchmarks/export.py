"""Do exported files give the losses of their plans, and do other trainers accept them? ``make bench-export``

losses     Small Hugging Face models with random weights on two ranks, in float64: three steps by the plan, and three by
           the exported file for FSDP2. Casts to float32 inside of models are made to float64 on both sides.
parsers    Configurations of several models and layouts, given to the packages' own parsers, in an environment that the
           benchmark makes (``benchmarks/export_environment.py``). Of Megatron, these are the configuration classes of
           megatron-core, because the package has no parser of arguments. accelerate is in the project's environment.
runs       accelerate and DeepSpeed train a small model on two ranks of a CPU by exported configurations; their losses
           beside ours, in float64. accelerate runs data parallelism and does not read its file here: it does not
           shard on CPUs.
predicted  The predicted step of the exported form is stated for each export.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.export_environment import FOLDER, QUIET, ROOT, environment, run_there
from meshwright.catalog import load_cluster
from meshwright.catalog.models import load_model
from meshwright.export import captured, targets
from meshwright.export.by_sizes import export_sizes
from meshwright.export.exported import Exported
from meshwright.ir.layout import Layout
from meshwright.ir.result import Check, Finding, Settings
from tests.distributed import exports
from tests.distributed.oracle import TOLERANCE
from tests.distributed.pool import Ranks

COMMAND = "python -m benchmarks.export"
MODELS = ("GPT-2", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma 2", "Phi", "OPT", "BERT")
LAYOUTS = (Layout(tp=2), Layout(dp=2, zero=3, microbatches=2))
CLUSTER, RANKS = "h100-dgx-ndr400x8", 64
BY_SIZES = (
    "", "dp=64,zero=3", "dp=64,zero=2,recompute=selective", "tp=8,zero=1,sequence_parallel=true",
    "tp=4,pp=4,recompute=full", "tp=2,pp=4,schedule=interleaved,chunks=2", "pp=8,schedule=zb-h1",
    "pp=4,schedule=zb-v,chunks=2", "cp=4,zero=3", "tp=8,cp=2,zero=1", "pp=4,schedule=gpipe,micro_batch=2",
    "dp=64,codec=qsgd(4)",
)  # fmt: skip
CAPTURED = (
    Layout(dp=2, tp=2), Layout(pp=2, microbatches=4), Layout(tp=2, sequence_parallel=True),
    Layout(cp=2, context="ring"),
)  # fmt: skip
RUNS = {"deepspeed": (Layout(dp=2, zero=1, microbatches=2),), "accelerate": (Layout(dp=2),)}
RUN_MODEL = "Llama"


def loss_findings() -> Iterator[Finding]:
    """The largest difference of losses, by model and layout."""
    with Ranks() as ranks:
        for layout in LAYOUTS:
            errors, gaps = {}, {}
            for model in MODELS:
                plan = exports.planned(model, layout)
                exported = exports.exported(model, plan)
                all_losses = ranks(
                    layout.num_ranks, exports.compare, model, plan, exports.text_of(exported), timeout=900
                )
                errors[model] = max(losses.error for losses in all_losses)
                gaps[model] = [gap.what for gap in exported.gaps]
            passed = sum(error <= TOLERANCE for error in errors.values())
            words = ", ".join(f"{model} {error:.1e}" for model, error in errors.items())
            split = sum(not any("split" in gap for gap in model_gaps) for model_gaps in gaps.values())
            words += f"; {split} models without a module that is left whole"
            target = f"{exports.described('FSDP2 files', layout)}: losses of three steps equal ours to {TOLERANCE:g}"
            yield report.share(target, passed, len(errors), words, {"gaps": gaps})


def cases(name: str) -> Iterator[tuple[str, Exported]]:
    """The exports that a parser gets, by a short name: layouts by sizes, and plans."""
    for model in ("llama3-8b", "llama3-70b", *(("mixtral-8x7b", "gpt3-13b") if name != "torchtitan" else ())):
        for index, layout in enumerate(BY_SIZES):
            machine = load_cluster(CLUSTER, RANKS)
            exported = export_sizes(name, load_model(model), machine, global_batch=256, layout=layout)
            yield f"{model}-{index}", exported
    for index, planned in enumerate(CAPTURED):
        base = "llama3:llama3_debugmodel" if name == "torchtitan" else ""
        yield f"captured-{index}", captured.export_plan(name, exports.planned("Llama", planned), base)


def parser_findings() -> Iterator[Finding]:
    """The share of exported configurations that each package accepts."""
    for name in targets.TARGETS:
        with tempfile.TemporaryDirectory() as top:
            folders, stated, forms = [], 0, 0
            for case, exported in cases(name):
                folder = Path(top) / case
                folder.mkdir()
                for file, text in exported.files.items():
                    (folder / file).write_text(text)
                (folder / "ranks").write_text(str(exported.form.num_ranks))
                folders.append(folder)
                forms += not case.startswith("captured")
                stated += exported.predicted is not None and not case.startswith("captured")
            refused = _refused(name, folders)
        words = "; ".join(f"{case}: {error}" for case, error in refused.items())
        target = f"{name}: exported configurations are accepted by the package's parser"
        yield report.share(target, len(folders) - len(refused), len(folders), words or "none is refused")
        yield report.share(
            f"{name}: the predicted step of the exported form is stated", stated, forms, f"of {forms} layouts by sizes"
        )


def _refused(name: str, folders: Sequence[Path]) -> dict[str, str]:
    """The configurations that the package's parser refuses, with its errors."""
    if name == "accelerate":
        from accelerate.commands.config.config_args import load_config_from_file

        refused = {}
        for folder in folders:
            try:
                config = load_config_from_file(str(folder / "accelerate.yaml"))
                if config.num_processes != int((folder / "ranks").read_text()):
                    refused[folder.name] = f"{config.num_processes} processes"
            except ValueError as error:
                refused[folder.name] = str(error)
        return refused
    text = run_there(["-m", "benchmarks.export_peers", name, *map(str, folders)])
    answers = [json.loads(line.partition("ANSWER ")[2]) for line in text.splitlines() if "ANSWER {" in line]
    refused = {answer["folder"]: answer["error"] for answer in answers if "error" in answer}
    return refused | {
        folder.name: "no answer" for folder in folders if folder.name not in {answer["folder"] for answer in answers}
    }


def run_findings() -> Iterator[Finding]:
    """Losses of trainers that run exported configurations, beside ours."""
    for name, layouts in RUNS.items():
        for layout in layouts:
            plan = exports.planned(RUN_MODEL, layout)
            exported = captured.export_plan(name, plan)
            with tempfile.TemporaryDirectory() as top:
                for file, text in exported.files.items():
                    (Path(top) / file).write_text(text)
                target = f"{exports.described(f'{name}: {RUN_MODEL}', layout)}: losses equal ours to {TOLERANCE:g}"
                try:
                    theirs = _losses(name, Path(top))
                except RuntimeError as error:
                    yield Check(target=target, verdict="undecided", measured=f"{error}"[:300], passed=0, total=1)
                    continue
            with Ranks() as ranks:
                ours = ranks(layout.num_ranks, exports.ours, RUN_MODEL, plan, timeout=600)[0]
            largest = exports.Losses(ours, theirs).error
            yield report.share(target, int(largest <= TOLERANCE), 1, f"the largest difference is {largest:.1e}")


def _losses(name: str, folder: Path) -> list[float]:
    program = ["-m", "benchmarks.export_peers", f"train-{name}", str(folder), RUN_MODEL]
    python = str(environment()) if name == "deepspeed" else sys.executable
    start = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [python, *start, *program]
    for lock in Path(QUIET["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
        lock.unlink()
    paths = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": f"{FOLDER / 'bin'}:{os.environ['PATH']}"}  # ninja is there
    variables = {**os.environ, **QUIET, **paths}
    try:
        process = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} did not end in 600 s") from None
    printed = [line.partition("LOSSES ")[2] for line in process.stdout.splitlines() if "LOSSES [" in line]
    if process.returncode or not printed:
        raise RuntimeError(f"{name} ended with {process.returncode}: {process.stderr[-1500:]}")
    losses: list[float] = json.loads(printed[0])
    return losses


PARTS: Mapping[str, Callable[[], Iterator[Finding]]] = {
    "losses": loss_findings, "parsers": parser_findings, "runs": run_findings,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; write the result if all parts were made."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="this part only; writes no file")
    options = parser.parse_args(arguments)
    findings: list[Finding] = []
    for part in options.only or PARTS:
        for row in PARTS[part]():
            findings.append(row)
            report.show(row)
    if not options.only:
        text = (__doc__ or "").partition("\n\n")[2].strip()
        sizes: dict[str, str | int | float | bool] = {"models": ", ".join(MODELS), "steps": exports.STEPS}
        settings = {"small models": Settings(dtype="float64", ranks=2, threads=1, sizes=sizes)}
        report.write("export", "Exports to other trainers", COMMAND, "Nothing is timed.", settings, findings, text)
    return int(any(finding.verdict == "fail" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
