"""How long a search takes from the model to the plan file, for large models on large clusters, and how it grows.

Run as part of ``make bench-planning``. Every search runs in a process of its own: the model on the meta device, the
capture, the search, the plan of the whole model, and the file. A round takes about five minutes on two quiet cores: the
six models, from 15 to 70 s each, and two searches for the growth. So five rounds, the fewest that a result file needs,
take about half an hour. Times, memory and growth come from the same rounds. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import meshwright as mw
from benchmarks import report
from benchmarks.report import at_most, new_run
from meshwright.bench.claims import LEAST_REPETITIONS
from meshwright.cost.optimizer import ADAMW
from meshwright.garbage import nothing_collected
from meshwright.ir import files
from meshwright.ir.graph import Graph
from meshwright.ir.layout_text import layout_text
from meshwright.ir.result import Check, Comparison, Duration, Finding, Series, Settings
from meshwright.ir.statistics import median, ratio
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, WideResNet, classification_loss, language_model_loss
from meshwright.planner.inter_op.price_workers import num_workers
from meshwright.planner.layout_search import Search
from meshwright.planner.time_limit import TimeLimit

COMMAND = "python -m benchmarks.search"
ROUNDS = LEAST_REPETITIONS
SEQUENCE = 2048
MOST_GIB, GROWTH, FEW, MANY = 4.0, 1.3, 8, 1024
H100 = "h100-80gb-dgx-ndr400x8"

Captured = Callable[[], Graph]


@dataclass(frozen=True)
class SearchCase:
    """A model on a cluster, and the longest time that passes."""

    name: str
    captured: Captured
    cluster: str
    devices: int
    limit_s: float


def llama(layers: int, hidden: int, inner: int, heads: int, batch: int, vocabulary: int = 128256) -> Graph:
    """A training step of Llama 3 with 8 heads of keys and values, in bfloat16, sequences of 2,048 tokens."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return of_tokens(model, batch, SEQUENCE)


def mixtral(batch: int) -> Graph:
    """A training step of Mixtral 8x22B, in bfloat16, sequences of 2,048 tokens."""
    config = MixtralConfig(
        vocab_size=32768, hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    return of_tokens(model, batch, SEQUENCE)


def t5(batch: int) -> Graph:
    """A training step of T5-11B, in bfloat16, sequences of 512 tokens on both sides."""
    config = T5Config(
        vocab_size=32128, d_model=1024, d_ff=65536, d_kv=128, num_heads=128, num_layers=24, num_decoder_layers=24,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    return of_tokens(model, batch, 512)


def of_tokens(model: nn.Module, batch: int, length: int) -> Graph:
    with torch.device("meta"):
        model, tokens = model.to(torch.bfloat16), torch.zeros(batch, length, dtype=torch.int64)
    return mw.capture(model, lambda net, given: net(**given).loss, {"input_ids": tokens, "labels": tokens})


def gpt3(batch: int) -> Graph:
    """A training step of GPT-3 (Brown et al. 2020, table 2.1), in bfloat16."""
    return gpt(96, 12288, 96, batch)


def gpt(layers: int, width: int, heads: int, batch: int) -> Graph:
    config = GPTConfig(layers=layers, width=width, heads=heads, vocabulary=50304, sequence_length=SEQUENCE)
    with torch.device("meta"):
        model = GPT(config).to(torch.bfloat16)
        tokens = torch.zeros(batch, config.sequence_length, dtype=torch.int64)
    return mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


def wide_resnet(batch: int) -> Graph:
    """A training step of a Wide-ResNet with 50 layers, 448 wide: 2 billion parameters in Alpa's evaluation (2022)."""
    with torch.device("meta"):
        model = WideResNet(width=448)
        images = {"image": torch.zeros(batch, 3, 224, 224), "label": torch.zeros(batch, dtype=torch.int64)}
    return mw.capture(model, classification_loss, images)


CASES = (
    SearchCase("Llama-3-8B on 8x8", lambda: llama(32, 4096, 14336, 32, 64), H100, 64, 20.0),
    SearchCase("Llama-3-70B on 128x8", lambda: llama(80, 8192, 28672, 64, 1024), H100, 1024, 60.0),
    SearchCase("GPT-3 on 128x8", lambda: gpt3(1536), H100, 1024, 120.0),
    SearchCase("Mixtral 8x22B on 16x8", lambda: mixtral(512), H100, 128, 60.0),
    SearchCase("Wide-ResNet on 8x8", lambda: wide_resnet(1536), H100, 64, 60.0),
    SearchCase("T5-11B on 8x8", lambda: t5(256), H100, 64, 60.0),
)


def planned(case: SearchCase) -> dict[str, Any]:
    """Seconds and memory of one case, in this process, and what was found."""
    start = time.perf_counter()
    graph = case.captured()
    captured_s = time.perf_counter() - start
    plan = mw.plan(graph, mw.Cluster.load(case.cluster, case.devices), devices=case.devices, fresh=True)
    with tempfile.TemporaryDirectory() as folder:
        files.save(plan, Path(folder) / "plan.json")
    assert plan.prediction is not None
    return {
        "seconds": time.perf_counter() - start,
        "captured_s": captured_s,
        "peak_bytes": peak_bytes(),
        "layout": layout_text(plan.layout),
        "step_s": plan.prediction.step_s,
    }


def peak_bytes() -> int:
    """At most this much memory did this process and its workers need so far. Workers that price layouts are forks of
    this process. Each counts as much as the largest of them, with all that it shares."""
    process, worker = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (process + num_workers() * worker) * 1024


@nothing_collected()
def searched_s(layers: int) -> float:
    """Seconds of a search on 64 devices, without capture and final plan. The model is a GPT with ``layers`` equal
    layers."""
    graph, cluster = gpt(layers, 1024, 16, 64), mw.Cluster.load(H100, 64)
    start = time.perf_counter()
    search = Search(
        graph, 64, cluster, PlanLowering, ADAMW, False, float(cluster.device.memory_bytes), "both", False,
        TimeLimit(None, lambda what: None),
    )  # fmt: skip
    search.run()
    return time.perf_counter() - start


def in_a_process(*words: str) -> Any:
    """What ``python -m benchmarks.search`` with these options prints, as JSON."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.search", *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def findings(rounds: int, names: Sequence[str]) -> Iterator[Finding]:
    """Every target, as it is found."""
    peaks: dict[str, float] = {}
    for case in CASES:
        if names and case.name not in names:
            continue
        runs = [in_a_process("--case", case.name) for _ in range(rounds)]
        seconds = [run["seconds"] for run in runs]
        took = median(seconds)
        peaks[case.name] = max(run["peak_bytes"] for run in runs) / 2**30
        last = runs[-1]
        yield Duration(
            target=f"{case.name}: from the model to the plan file within {case.limit_s:g} s",
            verdict=at_most(took, case.limit_s),
            measured=f"{took.value:.1f} s (95 %: {took.low:.1f} to {took.high:.1f}), "
            f"{last['captured_s']:.1f} s of them capture; {last['layout']}: {last['step_s'] * 1e3:.4g} ms a step, "
            f"at most {peaks[case.name]:.2f} GiB for planning",
            series=Series.of(seconds, steps=1, settings=case.name, run=new_run()),
            limit_s=case.limit_s,
        )
    if names:
        return
    fits = sum(peak <= MOST_GIB for peak in peaks.values())
    yield Check(
        target=f"a search needs at most {MOST_GIB:g} GiB",
        verdict="pass" if fits == len(peaks) else "fail",
        measured=f"{fits} of {len(peaks)}; the most is at most {max(peaks.values()):.2f} GiB",
        passed=fits,
        total=len(peaks),
    )
    yield growth(rounds)


def growth(rounds: int) -> Comparison:
    """The search for many equal layers beside the search for few, by turns."""
    seconds: dict[int, list[float]] = {FEW: [], MANY: []}
    for _ in range(rounds):
        for layers, each in seconds.items():
            each.append(in_a_process("--layers", str(layers))["seconds"])
    factor, run = ratio(seconds[MANY], seconds[FEW]), new_run()
    return Comparison(
        target=f"the search grows at most {GROWTH}x from {FEW} to {MANY:,} equal layers",
        verdict=at_most(factor, GROWTH),
        measured=f"{factor}: {median(seconds[FEW]).value:.1f} s and {median(seconds[MANY]).value:.1f} s",
        series={
            f"{layers} layers": Series.of(each, steps=1, settings="growth", run=run) for layers, each in seconds.items()
        },
        ours=f"{MANY} layers",
        baseline=f"{FEW} layers",
        ratio=factor.value,
        interval=factor.interval,
        limit=GROWTH,
    )


def write(results: Sequence[Finding]) -> None:
    """Write the result file."""
    sizes = {case.name: case.devices for case in CASES} | {"growth": 64}
    settings = {
        name: Settings(dtype="bfloat16", ranks=1, threads=1, sizes={"devices planned for": devices})
        for name, devices in sizes.items()
    }
    timed = "model, capture, search, plan of the whole model and file; for the growth the search alone"
    report.write("search", "Searches for layouts", COMMAND, timed, settings, results, TEXT)


TEXT = """Nothing is computed: tensors are on the meta device. Every search runs in a process of its own. Its memory is
an upper limit: workers that price layouts count with all that they share with the process that started them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every target, and write them."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"repetitions (default {ROUNDS}; fewer: no file)")
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="*", default=[], choices=names, metavar="CASE", help=f"of {names}; no file")
    parser.add_argument("--case", default="", help="plan one case in this process, and print its times as JSON")
    parser.add_argument("--layers", type=int, default=0, help="search for a GPT with so many layers, as --case")
    given = parser.parse_args(arguments)
    if given.case:
        print(json.dumps(planned(next(case for case in CASES if case.name == given.case))))
        return 0
    if given.layers:
        print(json.dumps({"seconds": searched_s(given.layers)}))
        return 0
    results = []
    for finding in findings(given.rounds, given.only):
        report.show(finding)
        results.append(finding)
    if given.rounds >= ROUNDS and not given.only:
        write(results)
        print("written to benchmarks/results/search.md and .json")
    return int(any(finding.verdict == "fail" for finding in results))


if __name__ == "__main__":
    sys.exit(main())
