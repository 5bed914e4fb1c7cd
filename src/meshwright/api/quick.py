"""The quick answer for a run whose model is a transformer of known sizes: a search by sizes, before anything is
captured."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from meshwright.catalog.models import make_model
from meshwright.catalog.models.hugging_face import from_config
from meshwright.cost.setup import Precision
from meshwright.errors import MeshwrightError
from meshwright.ir.cluster import Cluster
from meshwright.ir.run import Adam, AdamW, Run
from meshwright.ir.transformer import Transformer
from meshwright.models import GPT
from meshwright.planner.by_sizes import QuickAnswer, quick_answer

ALIKE = 0.01
"""The largest relative difference between the parameters of a module and those of its sizes."""
_PRECISIONS: dict[str | None, Precision] = {None: "fp32", "bfloat16": "bf16", "float16": "fp16"}


def quick_answer_of(
    run: Run, module: nn.Module, batch: Any, cluster: Cluster, devices: int, memory_bytes: float | None
) -> QuickAnswer | None:
    """The best layout of a run by the sizes of its model; None if sizes do not describe the run.

    Sizes describe a GPT of ours or a transformer of Hugging Face that predicts tokens, with float32 parameters that
    Adam or AdamW trains, without float8 and codecs."""
    layout = run.layout
    if not isinstance(run.optimizer, Adam | AdamW) or layout.float8 or layout.codec == "auto":
        return None
    model = sizes_of(module, batch)
    if model is None:
        return None
    return quick_answer(
        model, cluster, devices, batch_size=_batch_size(batch), precision=_PRECISIONS[layout.precision],
        memory_bytes=memory_bytes,
    )  # fmt: skip


def sizes_of(module: nn.Module, batch: Any) -> Transformer | None:
    """The sizes of a module, with the sequence length of its batch. None if the module is no known transformer, does
    not predict tokens, has other parameters than its sizes say, or does not train all of them in float32."""
    tokens = _tokens(batch)
    parameters = list(module.parameters())
    if tokens is None or any(each.dtype != torch.float32 or not each.requires_grad for each in parameters):
        return None
    with suppress(MeshwrightError):
        model = _known_sizes(module)
        count = sum(each.numel() for each in parameters)
        if model is not None and abs(model.parameters - count) <= ALIKE * count:
            return msgspec.structs.replace(model, sequence=tokens.shape[1])
    return None


def _known_sizes(module: nn.Module) -> Transformer | None:
    if isinstance(module, GPT):
        own = module.config
        return make_model(
            "gpt", layers=own.layers, hidden=own.width, heads=own.heads, vocabulary=own.vocabulary,
            sequence=own.sequence_length, tied=own.tied_head, dropout=own.dropout > 0,
        )  # fmt: skip
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    return from_config(to_dict()) if to_dict is not None else None


def _tokens(batch: Any) -> Tensor | None:
    """The tokens of a batch that has only sequences of tokens and their labels, all of equal length."""
    tensors = list(batch.values()) if isinstance(batch, Mapping) else []
    if not all(isinstance(each, Tensor) and each.dim() == 2 and not each.is_floating_point() for each in tensors):
        return None
    return tensors[0] if len(tensors) > 1 and len({each.shape for each in tensors}) == 1 else None


def _batch_size(batch: Mapping[str, Tensor]) -> int:
    return next(iter(batch.values())).shape[0]
