"""Loss functions for the reference models: ``loss_fn(model, batch) -> (mean loss, sums over the batch)``."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
"""Target of positions for which no loss is computed."""


def language_model_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean next-token cross-entropy, in nats, over the targets that are not ``IGNORED``.

    Args:
        model: takes tokens [b, s], returns logits [b, s, vocabulary].
        batch: ``tokens`` [b, s] and ``targets`` [b, s], both int64.

    Returns:
        The loss (a scalar), and ``tokens``: the number of targets in the mean (int64 scalar).
    """
    logits, targets = model(batch["tokens"]), batch["targets"]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return loss, {"tokens": (targets != IGNORED).sum()}


def classification_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy, in nats.

    Args:
        model: takes ``image`` or ``inputs``, returns logits [b, classes].
        batch: ``image`` [b, c, y, x] or ``inputs`` [b, ...], and ``label`` [b] int64.

    Returns:
        The loss (a scalar), and ``correct``: the number of samples whose largest logit is the label's (int64 scalar).
    """
    logits, label = model(batch["image"] if "image" in batch else batch["inputs"]), batch["label"]
    return F.cross_entropy(logits, label), {"correct": (logits.argmax(dim=1) == label).sum()}


def segmentation_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean cross-entropy, in nats, over the pixels whose label is not ``IGNORED``.

    Args:
        model: takes ``image``, returns logits [b, classes, y, x].
        batch: ``image`` [b, c, y, x], and ``label`` [b, y, x] int64.

    Returns:
        The loss (a scalar), and ``correct``: the number of pixels whose largest logit is the label's (int64 scalar).
    """
    logits, label = model(batch["image"]), batch["label"]
    loss = F.cross_entropy(logits, label, ignore_index=IGNORED)
    return loss, {"correct": (logits.argmax(dim=1) == label).sum()}
