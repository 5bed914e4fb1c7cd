"""Orders of samples: which sample comes where in every epoch, known before the epoch begins."""

import copy
import hashlib
import threading
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from meshwright.errors import DataError
from meshwright.schedules.samples import Indices

REMEDY = "give a RandomSampler with a generator, a DistributedSampler, or no sampler but a seed"


class Order(ABC):
    """The order of samples in every epoch. ``interleaved``: ranks take samples in turn, not contiguous parts of a
    batch. ``length`` is the number of samples in an epoch."""

    length: int
    interleaved: bool = False

    @abstractmethod
    def epoch(self, number: int) -> Indices:
        """The samples of an epoch in their order."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return ``seed`` and ``shuffle`` as plain values; orders with equal values are equal."""


class SeededOrder(Order):
    """A new random order in each epoch, which depends only on (seed, epoch); without ``shuffle`` that of the data."""

    def __init__(self, num_samples: int, seed: int, shuffle: bool) -> None:
        self.length, self._seed, self._shuffle = num_samples, seed, shuffle

    def epoch(self, number: int) -> Indices:
        """The samples of an epoch in their order."""
        if not self._shuffle:
            return np.arange(self.length)
        key = hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
        order: Indices = torch.randperm(self.length, generator=generator).numpy()
        return order

    def describe(self) -> dict[str, Any]:
        """The seed, and whether the order is random."""
        return {"seed": self._seed, "shuffle": self._shuffle}


class SamplerOrder(Order):
    """The order of a sampler of torch.utils.data, which is copied and read ahead.

    A DistributedSampler deals samples to ranks in turn: the order is that of all its ranks, interleaved. A sampler with
    a ``generator`` draws from a copy of it, in its present state. Another sampler must always give the same order.

    Raises:
        DataError: the sampler's order cannot be known ahead, it has another number of ranks than ``shard``, or it names
            samples that the data do not have.
    """

    def __init__(self, sampler: Any, num_samples: int, shard: tuple[int, int]) -> None:
        self._sampler, self._name = sampler, type(sampler).__name__
        self._deals = hasattr(sampler, "num_replicas") and hasattr(sampler, "set_epoch")
        self.interleaved = self._deals
        self._states: list[torch.Tensor] = []
        self._lock = threading.Lock()  # the order is read by the loop and by the thread that reads ahead
        if self._deals:
            self._check_ranks(sampler, shard)
        elif getattr(sampler, "generator", None) is not None:
            self._states.append(sampler.generator.get_state())
        elif not hasattr(sampler, "set_epoch") and not isinstance(sampler, SequentialSampler):
            self._check_fixed(sampler)
        first = self.epoch(0)
        self.length = len(first)
        if len(first) and not 0 <= first.min() <= first.max() < num_samples:
            problem = f"{self._name} names sample {first.max()} of {num_samples}"
            raise DataError(problem, where="sampler", remedy="make the sampler of the same data")

    def epoch(self, number: int) -> Indices:
        """The samples of an epoch in their order."""
        if self._deals:
            return self._dealt(number, self._sampler.num_replicas)
        if self._states:
            with self._lock:
                return self._drawn(number)
        return _read(self._at(copy.copy(self._sampler), number))

    def describe(self) -> dict[str, Any]:
        """A hash of the first epoch in place of a seed. It does not depend on the number of ranks."""
        return {"seed": self._key, "shuffle": self._name != "SequentialSampler"}

    @cached_property
    def _key(self) -> int:
        first = self._dealt(0, 1) if self._deals else self.epoch(0)
        key = hashlib.blake2b(np.ascontiguousarray(first).data, digest_size=7).digest()
        return int.from_bytes(key, "big")

    def _dealt(self, number: int, num_ranks: int) -> Indices:
        """The samples of all ranks of a DistributedSampler, in turn."""
        dealt = []
        for rank in range(num_ranks):
            sampler = copy.copy(self._sampler)
            length = len(sampler.dataset)
            sampler.num_replicas, sampler.rank = num_ranks, rank
            extra = 0 if sampler.drop_last else num_ranks - 1
            sampler.num_samples = (length + extra) // num_ranks
            sampler.total_size = sampler.num_samples * num_ranks
            dealt.append(_read(self._at(sampler, number)))
        return np.stack(dealt, axis=1).reshape(-1)

    def _drawn(self, number: int) -> Indices:
        """The epoch of a sampler with a generator, whose states at the begin of epochs are kept."""
        generator = torch.Generator(device=self._sampler.generator.device)
        order: Indices = np.arange(0)
        for place in range(min(number, len(self._states) - 1), number + 1):
            sampler = copy.copy(self._sampler)
            generator.set_state(self._states[place])
            sampler.generator = generator
            order = _read(sampler)
            if place + 1 == len(self._states):
                self._states.append(generator.get_state())
        return order

    def _at(self, sampler: Any, number: int) -> Any:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        return sampler

    def _check_ranks(self, sampler: Any, shard: tuple[int, int]) -> None:
        if (sampler.rank, sampler.num_replicas) != shard:
            problem = f"the sampler is of rank {sampler.rank} of {sampler.num_replicas}, the loader of shard {shard}"
            remedy = "give the sampler the rank and num_replicas of the shard"
            raise DataError(problem, where="sampler", remedy=remedy)

    def _check_fixed(self, sampler: Any) -> None:
        """Refuse a sampler that draws another order each time it is read."""
        if hasattr(sampler, "generator") or not np.array_equal(_read(sampler), _read(sampler)):
            problem = (
                f"the order of {self._name} cannot be known ahead: it draws from a generator that others draw from"
            )
            raise DataError(problem, where="sampler", remedy=REMEDY)


def _read(sampler: Any) -> Indices:
    try:
        order: Indices = np.fromiter(iter(sampler), np.int64)
    except (TypeError, ValueError):
        problem = f"{type(sampler).__name__} does not yield numbers of samples"
        raise DataError(problem, where="sampler", remedy="give a sampler of samples, not of batches") from None
    return order
