"""What does not divide is cut all the same: training on parts that differ in size equals one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.models import (
    GPT,
    MLP,
    GPTConfig,
    LeNet,
    ResNet,
    UNet,
    classification_loss,
    language_model_loss,
    segmentation_loss,
)
from tests.distributed import oracle
from tests.distributed.oracle import Batch, Subject
from tests.distributed.pool import Ranks


def gpt(batch: int, *, heads: int = 3, vocabulary: int = 257, length: int = 11) -> Subject:
    """Three heads of four, an odd vocabulary, an odd sequence, labels of which some are ignored."""
    config = GPTConfig(
        layers=2, width=4 * heads, heads=heads, vocabulary=vocabulary, sequence_length=length, dropout=0.0
    )
    batches = []
    for _ in range(2):
        tokens = torch.randint(vocabulary, (batch, length + 1))
        targets = oracle.ragged_ends(tokens[:, 1:])
        batches.append({"tokens": tokens[:, :-1].contiguous(), "targets": targets})
    return Subject(GPT(config).double(), language_model_loss, batches)


def images(batch: int, side: int, channels: int, labels: tuple[int, ...] = ()) -> list[Batch]:
    return [
        {
            "image": torch.randn(batch, channels, side, side, dtype=torch.float64),
            "label": torch.randint(3, (batch, *labels)),
        }
        for _ in range(2)
    ]


def dense(batch: int) -> Subject:
    batches = [
        {"inputs": torch.randn(batch, 5, dtype=torch.float64), "label": torch.randint(3, (batch,))} for _ in range(2)
    ]
    return Subject(MLP((5, 13, 11, 7, 3)).double(), classification_loss, batches)


def lenet(batch: int) -> Subject:
    model = LeNet(image_size=12, classes=3, channels=(3, 5), dense=(13, 7), kernel=3)
    return Subject(model.double(), classification_loss, images(batch, 12, 1))


def resnet(batch: int, side: int = 11) -> Subject:
    """Batch norm: statistics of parts that differ in size."""
    return Subject(ResNet(width=4, classes=3).double(), classification_loss, images(batch, side, 3))


def unet(batch: int, side: int) -> Subject:
    model: nn.Module = UNet(depth=1, width=4, classes=3, norm="batch")
    return Subject(model.double(), segmentation_loss, images(batch, side, 3, (side, side)))


def hugging_face(batch: int, name: str) -> Subject:
    """Llama with three key and value heads, each for two heads; GPT-2 whose queries, keys and values are one matrix."""
    import transformers

    if name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=61, hidden_size=24, intermediate_size=33, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=3, max_position_embeddings=16,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=61, n_positions=16, n_embd=12, n_layer=2, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    batches: list[Batch] = []
    for _ in range(2):
        tokens = torch.randint(61, (batch, 9))
        batches.append({"input_ids": tokens, "labels": oracle.ragged_ends(tokens)})
    return Subject(model.double(), oracle.own_loss, batches)


MODELS: dict[str, Callable[[int], Subject]] = {
    "GPT": gpt,
    "GPT of many words": lambda batch: gpt(batch, vocabulary=1025),
    "MLP": dense,
    "LeNet": lenet,
    "ResNet": resnet,
    "U-Net": lambda batch: unet(batch, 14),
    "GPT-2": lambda batch: hugging_face(batch, "gpt2"),
    "Llama": lambda batch: hugging_face(batch, "llama"),
}
CASES = [
    ("GPT", 4, mw.Layout(tp=2)),
    ("GPT", 5, mw.Layout(dp=3)),
    ("GPT", 3, mw.Layout(dp=2, tp=2)),
    ("GPT", 3, mw.Layout(cp=2)),
    ("GPT", 3, mw.Layout(tp=2, sequence_parallel=True)),
    ("GPT", 4, mw.Layout(tp=2, microbatches=2, recompute="full")),
    ("GPT", 4, mw.Layout(tp=2, pp=2, microbatches=2)),
    ("GPT", 3, mw.Layout(dp=2, tp=2, zero=3)),
    ("GPT of many words", 3, mw.Layout(tp=3)),
    ("GPT-2", 3, mw.Layout(dp=2, tp=2)),
    ("Llama", 3, mw.Layout(tp=2)),
    ("MLP", 7, mw.Layout(tp=3)),
    ("LeNet", 5, mw.Layout(dp=2, tp=2)),
    ("ResNet", 3, mw.Layout(dp=2, spatial=(2,))),
    ("ResNet", 2, mw.Layout(spatial=(2, 2))),
    ("U-Net", 1, mw.Layout(spatial=(3,))),
]


def train(name: str, batch: int, layout: mw.Layout) -> tuple[oracle.LargestErrors, list[str]]:
    """The comparison with one process, and this rank's part of every tensor that is split."""
    subjects = []
    for _ in range(2):
        torch.manual_seed(3)
        subjects.append(MODELS[name](batch))
    serial, parallel = subjects
    before = {each: value.clone() for each, value in serial.model.state_dict().items()}
    settings, key = (oracle.OPTIMIZERS["AdamW"], oracle.MAX_GRAD_NORM), ("uneven", name, batch)
    with oracle.WiderCasts():
        expected = oracle.reference(serial, *settings, key=key)
    run, trainer = oracle.in_parallel(parallel, layout, *settings, oracle.sharing_capture(key, widens=True))
    return oracle.compared(before, expected, run, trainer), cuts(trainer)


def cuts(trainer: mw.Trainer) -> list[str]:
    """What is split unevenly, by the letters of the plan."""
    graph, splits = trainer.graph, []
    for operator in graph.operators:
        for axis, choice in trainer.plan.strategies(graph)[operator.name].items():
            for letter in operator.rule.members(choice) if operator.rule and not choice.startswith("^") else ():
                if operator.rule and operator.rule.sizes[letter] % trainer.plan.mesh.sizes.get(axis, 1):
                    splits.append(f"{operator.classes[letter]}@{axis}")
    return sorted(set(splits))


@pytest.mark.parametrize(
    ("model", "batch", "layout"), CASES, ids=[f"{model}, {batch}, {layout.mesh()}" for model, batch, layout in CASES]
)
def test_uneven_parts_train_as_in_one_process(ranks: Ranks, model: str, batch: int, layout: mw.Layout) -> None:
    for errors, uneven in ranks(layout.num_ranks, train, model, batch, layout):
        assert errors.error <= oracle.TOLERANCE, errors
        assert errors.moved > 1e-3, "the parameters were trained"
        assert uneven, "something was cut in parts that differ"
