"""Is "auto" ever slower than the best uniform layout? 6 models x 2 clusters, beside an exhaustive enumeration.

Run as part of ``make bench-planning``. A uniform layout has equal stages, cut by FLOPs, and divides every stage alike:
all pp x dp x cp x ep x tp, sequence parallelism, numbers of micro-batches, schedules, chunks, ZeRO stages and kinds of
recomputation. They are planned, lowered and simulated as by ``mw.plan(graph, cluster, layout=...)``. Only layouts that
cannot be the best are left out (``benchmarks.enumeration``). Steps are simulated; nothing is timed. Finished cases are
kept below ``runs/``, and a run at the same commit goes on after them. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import meshwright as mw
from benchmarks import report
from benchmarks.enumeration import Uniform
from benchmarks.search import of_tokens
from meshwright.ir.cluster import Cluster
from meshwright.ir.graph import Graph
from meshwright.ir.layout_text import layout_text
from meshwright.ir.level import LevelMembers
from meshwright.ir.result import Check, Finding, Settings
from meshwright.lower.plans import PlanLowering
from meshwright.models import GPT, GPTConfig, WideResNet, classification_loss, language_model_loss
from meshwright.planner.auto import plan_auto
from meshwright.planner.inter_op.pipelines import ALIKE

COMMAND = "python -m benchmarks.uniform"
DEVICES = 8
FAST_BOX, SLOW_BOX = "h100-box4-ndr400x1", "a100-40gb-box4-ndr400x1"
EQUAL, UNEQUAL = "two H100 boxes", "an H100 and an A100 box"
SAME, BETTER = 1 + 1e-9, 0.9


# --- models and clusters ----------------------------------------------------------------------------------------------


def llama() -> Graph:
    """Four layers as wide as those of Llama-3-8B, 16 sequences of 2,048 tokens."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return of_tokens(model, 16, 2048)


def t5() -> Graph:
    """Three layers of encoder and three of decoder, 2,048 features. The encoder reads 2,048 tokens, the decoder 256."""
    config = T5Config(
        vocab_size=32128, d_model=2048, d_ff=8192, d_kv=64, num_heads=32, num_layers=3, num_decoder_layers=3,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config).to(torch.bfloat16)
        read, written = (torch.zeros(16, length, dtype=torch.int64) for length in (2048, 256))
    return mw.capture(model, lambda net, given: net(**given).loss, {"input_ids": read, "labels": written})


def mixtral() -> Graph:
    """Three layers with eight experts each, 16 sequences of 1,024 tokens."""
    config = MixtralConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=7168, num_hidden_layers=3, num_attention_heads=16,
        num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    return of_tokens(model, 16, 1024)


def wide_resnet() -> Graph:
    """A Wide-ResNet with groups of two blocks, 256 wide, 64 images."""
    with torch.device("meta"):
        model = WideResNet(blocks=(2, 2, 2, 2), width=256).to(torch.bfloat16)
        images = torch.zeros(64, 3, 224, 224, dtype=torch.bfloat16)
        batch = {"image": images, "label": torch.zeros(64, dtype=torch.int64)}
    return mw.capture(model, classification_loss, batch)


def vit() -> Graph:
    """A ViT of six layers, 2,048 wide, 32 images of 577 tokens."""
    config = ViTConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=6, num_attention_heads=16, image_size=384,
        patch_size=16, num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = ViTForImageClassification(config).to(torch.bfloat16)
        pixels = torch.zeros(32, 3, 384, 384, dtype=torch.bfloat16)
        batch = {"pixel_values": pixels, "labels": torch.zeros(32, dtype=torch.int64)}
    return mw.capture(model, lambda net, given: net(**given).loss, batch)


def gpt() -> Graph:
    """A GPT of four layers, 2,048 wide, with 262,144 words: the head takes longer than the layers."""
    config = GPTConfig(layers=4, width=2048, heads=16, vocabulary=2**18, sequence_length=1024, tied_head=False)
    with torch.device("meta"):
        model = GPT(config).to(torch.bfloat16)
        tokens = torch.zeros(16, config.sequence_length, dtype=torch.int64)
    return mw.capture(model, language_model_loss, {"tokens": tokens, "targets": tokens})


MODELS: Mapping[str, Callable[[], Graph]] = {
    "Llama": llama, "T5, 2,048 tokens to 256": t5, "Mixtral": mixtral, "Wide-ResNet": wide_resnet, "ViT": vit,
    "GPT, 262,144 words": gpt,
}  # fmt: skip
TO_BEAT = {
    ("T5, 2,048 tokens to 256", EQUAL): "unequal encoder and decoder",
    ("Mixtral", EQUAL): "mixture of experts",
    ("Wide-ResNet", EQUAL): "Wide-ResNet",
    ("Llama", UNEQUAL): "a slow box",
}
"""Cases in which "auto" should be at least 10 % faster, and what is unlike in them."""


def clusters() -> dict[str, Cluster]:
    """Two boxes of four devices with one network adapter each: equal boxes, and unequal ones."""
    equal, slow = (Cluster.load(name, DEVICES) for name in (FAST_BOX, SLOW_BOX))
    members = tuple(LevelMembers(count=1, device=each.device, levels=each.levels[:1]) for each in (equal, slow))
    network = msgspec.structs.replace(equal.levels[-1], members=members)
    unequal = Cluster(name="h100 and a100 boxes", num_devices=DEVICES, device=equal.device, levels=(network,))
    return {EQUAL: equal, UNEQUAL: unequal}


# --- targets ----------------------------------------------------------------------------------------------------------


def case(model: str, place: str, capture: Callable[[], Graph], cluster: Cluster) -> list[Check]:
    """One model on one cluster."""
    graph = capture()
    plan = plan_auto(graph, DEVICES, cluster, PlanLowering)
    assert plan.prediction is not None
    ours = plan.prediction.step_s
    uniform = Uniform(graph, cluster)
    uniform.run()
    best = uniform.best()
    better, controls = uniform.better_controls()
    ratio, counts = ours / best.step_s, uniform.counts
    compared = (
        f"{ratio:.4f}{f', within {ALIKE:.0%}' if SAME < ratio <= 1 + ALIKE else ''}: {layout_text(plan.layout)}; "
        f"best uniform {layout_text(best.layout)}"
    )
    settled = f"{counts['simulated']} simulated, {counts['left out']} cannot be the best, {counts['refused']} refused"
    checks = [
        Check(
            target=f'{model} on {place}: "auto" is no worse than the best uniform layout',
            verdict="pass" if ratio <= SAME else "undecided" if ratio <= 1 + ALIKE else "fail",
            measured=f"{compared}; simulated seconds {ours:.5f} and {best.step_s:.5f}; of {counts.total():,} uniform "
            f"layouts {settled}; {controls} of those left out were simulated, too: {better} are better",
            passed=int(ratio <= SAME),
            total=1,
            notes={"ratio": ratio, "layouts": counts.total(), **counts, "controls": controls, "better": better},
        )
    ]
    if why := TO_BEAT.get((model, place)):
        checks.append(
            Check(
                target=f'{model} on {place} ({why}): "auto" is at least 10 % better than the best uniform layout',
                verdict="pass" if ratio <= BETTER else "fail",
                measured=compared,
                passed=int(ratio <= BETTER),
                total=1,
                notes={"ratio": ratio},
            )
        )
    return checks


def findings(only: str = "") -> Iterator[Finding]:
    """Every model on every cluster."""
    for (model, capture), (place, cluster) in itertools.product(MODELS.items(), clusters().items()):
        if only in (title := f"{model} on {place}"):
            yield from report.kept("uniform", title, list[Check], partial(case, model, place, capture, cluster))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every target, and write them."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", default="", help="only cases that have this in their name; writes no file")
    only: str = parser.parse_args(arguments).name
    warnings.simplefilter("ignore")  # of the models' libraries
    results = []
    for finding in findings(only):
        report.show(finding)
        results.append(finding)
    if not only:
        settings = {"all": Settings(dtype="bfloat16", ranks=DEVICES, threads=1, sizes={"devices planned for": DEVICES})}
        report.write("uniform", '"auto" beside uniform layouts', COMMAND, "nothing", settings, results, TEXT)
        print("written to benchmarks/results/uniform.md and .json")
    return int(any(finding.verdict == "fail" for finding in results))


TEXT = f"""Nothing is computed or timed: tensors are on the meta device, and the cost model of the search simulates the
steps. So the table judges the search, not the cost model. The first number is the simulated step of "auto" over that of
the best uniform layout. `undecided`: "auto" is worse, but within the {ALIKE:.0%} in which it takes the simplest layout.
Clusters: {FAST_BOX}, and a box of it beside a box of {SLOW_BOX}.
What is left out, and why: `benchmarks/enumeration.py`."""


if __name__ == "__main__":
    sys.exit(main())
