"""What we are measured against, each written as its own documentation advises, for the same model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from meshwright.models import GPT, language_model_loss
from meshwright.models.gpt import Attention

Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, Tensor]]]
Optimizer = Callable[..., torch.optim.Optimizer]
StepOn = Callable[[Batch], Tensor]


def eager(
    model: nn.Module, optimizer: Optimizer, loss_fn: Loss = language_model_loss, *, fused: bool | None = None
) -> StepOn:
    """Plain PyTorch in one process. ``fused``: the optimizer's kernel over all parameters at once."""
    return _training_step(model, optimizer(model.parameters(), fused=fused), loss_fn)


def data_parallel(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Loss = language_model_loss,
    *,
    fused: bool | None = None,
    **options: Any,
) -> StepOn:
    """DistributedDataParallel; the step takes this rank's part of the batch."""
    wrapped = DistributedDataParallel(model, **options)
    return _training_step(wrapped, optimizer(wrapped.parameters(), fused=fused), loss_fn)


def fully_sharded(
    model: GPT,
    optimizer: Optimizer,
    loss_fn: Loss = language_model_loss,
    *,
    foreach: bool | None = None,
    reshard: bool = True,
    prefetch: bool = False,
    mesh: DeviceMesh | None = None,
) -> StepOn:
    """FSDP2: ``fully_shard`` on every block, then on what is left; the step takes this rank's part of the batch.

    ``foreach`` has the optimizer work through all parameters at once, not one DTensor after the other. (PyTorch 2.13
    has no fused SGD over DTensors: ``aten._fused_sgd_`` has no sharding strategy.) Without ``reshard`` a block's
    parameters stay whole from forward to backward. With ``prefetch`` a block gathers the parameters of the next two
    blocks, and in backward those of the two before it.
    """
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [fully_shard(block, mesh=mesh, reshard_after_forward=reshard) for block in model.blocks]
    fully_shard(model, mesh=mesh)
    for index, block in enumerate(blocks if prefetch else ()):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])
    return _training_step(model, optimizer(model.parameters(), foreach=foreach), loss_fn)


def tensor_parallel(
    model: GPT,
    num_ranks: int,
    optimizer: Optimizer,
    *,
    vocabulary: bool = False,
    foreach: bool | None = None,
    mesh: DeviceMesh | None = None,
) -> StepOn:
    """``parallelize_module``: columns then rows in attention and feed-forward, and so one all-reduce each way.

    The rows of the fused query-key-value weight are put in the ranks' order, so that one product stays one product.
    ``vocabulary`` also splits embedding and head over the vocabulary, with ``loss_parallel``.
    """
    mesh = mesh or init_device_mesh("cpu", (num_ranks,))
    plan: dict[str, ParallelStyle] = {}
    for index, block in enumerate(model.blocks):
        block.attention = _LocalHeads(cast(Attention, block.attention), num_ranks)
        plan |= {
            f"blocks.{index}.attention.qkv": ColwiseParallel(),
            f"blocks.{index}.attention.projection": RowwiseParallel(),
            f"blocks.{index}.mlp.up": ColwiseParallel(),
            f"blocks.{index}.mlp.down": RowwiseParallel(),
        }
    tied = model.head.weight is model.token_embedding.weight
    if vocabulary:
        plan["token_embedding"] = RowwiseParallel(input_layouts=Replicate())
        plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)
    if tied:
        model.head.weight = model.token_embedding.weight
    split = [value for value in model.parameters() if isinstance(value, DTensor)]
    whole = [value for value in model.parameters() if not isinstance(value, DTensor)]
    # Two groups, because the fast path of optimizers takes either kind but not both at once.
    stepped = optimizer([{"params": split}, {"params": whole}], foreach=foreach)
    if vocabulary:
        return _training_step(model, stepped, _vocabulary_loss, loss_parallel)
    return _training_step(model, stepped)


class _LocalHeads(nn.Module):
    """The GPT's attention over as many heads as the local part of ``qkv`` makes."""

    def __init__(self, whole: Attention, num_ranks: int) -> None:
        super().__init__()
        self.head_size = whole.qkv.in_features // whole.heads
        self.qkv, self.projection = whole.qkv, whole.projection
        with torch.no_grad():
            for value in (self.qkv.weight, self.qkv.bias):
                rows = value.unflatten(0, (3, num_ranks, -1)).transpose(0, 1).flatten(0, 2)
                value.copy_(rows.clone())

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        query, key, value = (
            part.view(batch, sequence, -1, self.head_size).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast(Tensor, self.projection(y.transpose(1, 2).reshape(batch, sequence, -1)))


def _vocabulary_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()), {}


def _training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Loss = language_model_loss,
    context: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepOn:
    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with context():
            loss, _ = loss_fn(model, batch)
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step
