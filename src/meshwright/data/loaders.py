"""Loaders of text and tensors in memory: one global order of samples for all ranks, which read only their shard."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.data.order import Order, SeededOrder
from meshwright.data.stores import hash_of
from meshwright.errors import DataError
from meshwright.schedules.samples import Indices, parts

Batch = dict[str, Tensor]
_STATE_KEYS = ("epoch", "position", "seed", "shuffle", "fingerprint")


class Loader(ABC):
    """Iterates over samples in batches, in an order that depends only on (seed, epoch).

    A global batch is the next ``batch_size`` samples of that order. ``shard=(i, n)`` yields part i of n equal,
    contiguous parts of every global batch (as torch.chunk cuts it). The data and their order therefore do not depend on
    the number of ranks, and a run can continue on another number of ranks.

    With ``epochs=None`` a ``for`` loop over the loader never ends. With ``epochs=k`` the loop ends after k epochs, and
    the next loop runs the next k epochs. A loader has one position, which advances with every batch: if a loop is left
    early, the next loop continues there. ``rewind`` goes back to the first batch.

    Args:
        num_samples: size of the data set.
        batch_size: samples in a global batch.
        seed: seed of the order.
        shuffle: ``True``: a new random order in each epoch; ``False``: the order of the data set.
        shard: (index, count): which part of each global batch to yield.
        drop_last: leave out the last batch of an epoch if it is smaller than ``batch_size``.
        epochs: how many epochs one ``for`` loop runs.
        order: another order than that of ``seed`` and ``shuffle``.

    Raises:
        DataError: an argument is out of range, there are too few samples for a batch, or the shards do not divide a
            batch.
    """

    _where = "data"
    """Name of the data in error messages."""

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        shard: tuple[int, int],
        drop_last: bool,
        epochs: int | None,
        order: Order | None = None,
    ) -> None:
        order = order or SeededOrder(num_samples, seed, shuffle)
        num_samples = order.length
        if batch_size < 1:
            raise self._error(f"batch_size is {batch_size}", "give a batch_size of at least 1")
        if epochs is not None and epochs < 1:
            raise self._error(f"epochs is {epochs}", "give at least 1, or None for no end")
        index, count = shard
        if not 0 <= index < count:
            raise self._error(f"shard is {shard}", "give (index, count) with index from 0 to count - 1")
        if num_samples < 1:
            raise self._error("the data set is empty: 0 samples", "give at least one batch of data")
        if drop_last and num_samples < batch_size:
            raise self._error(
                f"the data set is too short: {num_samples} samples, but a batch has {batch_size}",
                f"give more data, a batch_size of at most {num_samples}, or drop_last=False",
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.shard = shard
        self._order = order
        self._drop_last = drop_last
        self._epochs = epochs
        self._epoch = 0
        self._position = 0  # samples of this epoch that were yielded, over all shards
        self._resumed = False
        for size in {min(batch_size, num_samples), 0 if drop_last else num_samples % batch_size}:
            self._check_divides(size, batch_size)

    @abstractmethod
    def _gather(self, index: Tensor) -> Batch:
        """Return the samples at the positions ``index`` (int64, shape [b]), as tensors whose dim 0 is the batch."""

    @abstractmethod
    def _describe(self) -> str:
        """Describe the data in words, with a hash of its content: equal descriptions mean equal data."""

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Batch]:
        # A loader that was resumed at the end of its loop yields nothing; otherwise a new loop starts a new epoch.
        if self._size_at(self._position) == 0 and not self._resumed:
            self.rewind(self._epoch + 1)
        self._resumed = False
        end = None if self._epochs is None else (self._epoch // self._epochs + 1) * self._epochs
        order_epoch, order = self._epoch, self._order.epoch(self._epoch)
        while True:
            size = self._size_at(self._position)
            if size == 0:
                if self._epoch + 1 == end:
                    return
                self.rewind(self._epoch + 1)
                continue
            if order_epoch != self._epoch:
                order_epoch, order = self._epoch, self._order.epoch(self._epoch)
            self._check_divides(size, self.batch_size)
            index = self._own_part(order[self._position : self._position + size])
            self._position += size
            yield self._gather(index)

    @property
    def epoch(self) -> int:
        """The epoch of the last batch that was yielded; the first epoch is 0."""
        return self._epoch

    @cached_property
    def fingerprint(self) -> str:
        """A description of the data in words, with a hash of its content (computed once)."""
        return self._describe()

    def resize(self, batch_size: int) -> None:
        """Yield batches of this size from now on, continuing at the next sample.

        Raises:
            DataError: the size is not from 1 to the number of samples, or the shards do not divide it. The loader is
                then unchanged.
        """
        if batch_size < 1 or batch_size > self.num_samples:
            raise self._error(
                f"a batch of {batch_size} samples, of a data set of {self.num_samples}",
                f"give a batch of 1 to {self.num_samples}",
            )
        self._check_divides(batch_size, batch_size)
        self.batch_size = batch_size

    def rewind(self, epoch: int = 0) -> None:
        """Go to the first batch of an epoch."""
        self._epoch, self._position, self._resumed = epoch, 0, False

    def close(self) -> None:  # noqa: B027 - a loader of data in memory has nothing to close
        """Stop what the loader does beside the loop; it cannot be used afterwards."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position as ints, bools and strings. It does not depend on the shard or the batch
        size."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            **self._order.describe(),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of the loader that wrote ``state``. That loader may have had another shard and batch size.

        Raises:
            DataError: the state is incomplete, or belongs to other data or another order. The loader is then unchanged.
        """
        if missing := [key for key in _STATE_KEYS if key not in state]:
            raise self._error(
                f"the saved position has no {', '.join(missing)}", "load what Loader.state_dict() returned"
            )
        for key, expected in {"fingerprint": self.fingerprint, **self._order.describe()}.items():
            if state[key] != expected:
                what = "data" if key == "fingerprint" else key
                raise self._error(
                    f"the saved position is of other {what}: {state[key]}, but here {expected}",
                    f"give the {what} that the saved run had, or start without its position",
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= self.num_samples:
            raise self._error(
                f"the saved position is epoch {epoch}, sample {position} of {self.num_samples}",
                "the saved state is damaged: load an earlier one",
            )
        self._epoch, self._position, self._resumed = epoch, position, True

    def _size_at(self, position: int) -> int:
        """The number of samples in the global batch at a position of an epoch; 0 at the end of the epoch."""
        size = min(self.batch_size, self.num_samples - position)
        return 0 if self._drop_last and size < self.batch_size else size

    def _own_part(self, batch: Indices) -> Tensor:
        """This shard's samples of a global batch."""
        index, count = self.shard
        part = parts(batch.reshape(1, -1), count, interleaved=self._order.interleaved)[index, 0]
        return torch.from_numpy(np.ascontiguousarray(part))

    def _check_divides(self, size: int, batch_size: int) -> None:
        """Raise a DataError unless the shards divide ``size``: the ``batch_size``, or the size of an epoch's last
        batch."""
        count = self.shard[1]
        if size % count == 0:
            return
        problem = f"a batch of {size} samples does not divide into {count} shards"
        if size == batch_size:
            raise self._error(problem, f"give a batch_size that is a multiple of {count}")
        raise self._error(
            f"{problem} (the last batch of {self.num_samples} samples in batches of {batch_size})",
            "give drop_last=True, or a number of samples that the shards divide",
        )

    def _error(self, problem: str, remedy: str) -> DataError:
        return DataError(problem, where=self._where, remedy=remedy)


class TextLoader(Loader):
    """Windows of text: ``tokens`` [b, s] and ``targets`` [b, s], int64. The target of a token is the token that
    follows.

    Each window begins where the window before it ends. So every token is a target once per epoch, except the first
    token of the text, the tokens at its end that do not fill a window, and the windows that ``drop_last`` leaves out.

    Args:
        data: the text as bytes, or the path of a file, or several paths whose texts are joined in that order.
        sequence_length: s, in tokens.
        tokenizer: maps text to token ids (``AutoTokenizer.from_pretrained(...).encode``); ``None``: bytes are tokens.
        batch_size, seed, shard, shuffle, drop_last, epochs: as in ``Loader``.

    Raises:
        DataError: a file cannot be read, the text is not UTF-8 (with a tokenizer), the data are empty or too short, or
            the shards do not divide a batch.
    """

    def __init__(
        self,
        data: bytes | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        sequence_length: int,
        batch_size: int,
        seed: int = 0,
        shard: tuple[int, int] = (0, 1),
        tokenizer: Callable[[str], Sequence[int]] | None = None,
        *,
        shuffle: bool = True,
        drop_last: bool = True,
        epochs: int | None = None,
    ) -> None:
        text, self._where = _read(data)
        if sequence_length < 1:
            raise self._error(f"sequence_length is {sequence_length}", "give at least 1")
        self._tokens = _tokenize(text, tokenizer, self._where)
        self._sequence_length = sequence_length
        count, unit = len(self._tokens), "bytes" if tokenizer is None else "tokens"
        if count == 0:
            raise self._error(f"the text is empty: 0 {unit}", "give a text that is not empty")
        if count <= sequence_length:
            raise self._error(
                f"the text is too short: {count} {unit}, but a window of {sequence_length} and the {unit[:-1]} after "
                f"it need {sequence_length + 1}",
                "give more text" + (f", or a sequence_length of at most {count - 1}" if count > 1 else ""),
            )
        self._windows = self._tokens.unfold(0, sequence_length + 1, sequence_length)
        super().__init__(len(self._windows), batch_size, seed, shuffle, shard, drop_last, epochs)

    def _gather(self, index: Tensor) -> Batch:
        rows = self._windows[index].long()
        return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}

    def _describe(self) -> str:
        return f"{len(self._tokens)} tokens in windows of {self._sequence_length}, hash {_hash(self._tokens)}"


class TensorLoader(Loader):
    """Batches of rows of tensors in memory: ``{name: tensor[n, ...]}`` gives batches ``{name: tensor[b, ...]}``.

    For example, for images: ``TensorLoader({"image": images, "label": labels}, batch_size=64)``.

    Args:
        tensors: at least one tensor, all with the same number of rows n.
        batch_size, seed, shuffle, shard, drop_last, epochs: as in ``Loader``.

    Raises:
        DataError: there are no tensors, a value is not a tensor, the numbers of rows differ, there are too few rows for
            a batch, or the shards do not divide a batch.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        shard: tuple[int, int] = (0, 1),
        drop_last: bool = False,
        *,
        epochs: int | None = None,
    ) -> None:
        self._where = f"tensors {', '.join(tensors)}" if tensors else "tensors"
        for name, value in tensors.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                raise self._error(
                    f"{name} is a {type(value).__name__}" if not isinstance(value, Tensor) else f"{name} is a scalar",
                    "give tensors with a batch dim (torch.as_tensor turns an array into one)",
                )
        rows = {name: len(tensor) for name, tensor in tensors.items()}
        if len(set(rows.values())) > 1:
            sizes = ", ".join(f"{name} {count}" for name, count in rows.items())
            problem = f"the tensors have different numbers of rows: {sizes}"
            raise self._error(problem, "give one row per sample in every tensor")
        self._tensors: dict[str, Tensor] = dict(tensors)
        super().__init__(max(rows.values(), default=0), batch_size, seed, shuffle, shard, drop_last, epochs)

    def _gather(self, index: Tensor) -> Batch:
        return {name: tensor[index.to(tensor.device)] for name, tensor in self._tensors.items()}

    def _describe(self) -> str:
        parts = [
            f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} hash {_hash(tensor)}"
            for name, tensor in sorted(self._tensors.items())
        ]
        return "; ".join(parts)


def _read(data: bytes | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[bytes, str]:
    """Return the text, and its name in error messages."""
    if isinstance(data, bytes):
        return data, "text"
    paths = [Path(data)] if isinstance(data, str | os.PathLike) else [Path(path) for path in data]
    texts = []
    for path in paths:
        try:
            texts.append(path.read_bytes())
        except OSError as error:
            raise DataError(
                f"cannot be read: {error.strerror}",
                where=str(path)[:200],
                remedy="give the path of a file; a text itself is given as bytes",
            ) from None
    where = str(paths[0]) if len(paths) == 1 else f"{len(paths)} files"
    return b"".join(texts), where


def _tokenize(text: bytes, tokenizer: Callable[[str], Sequence[int]] | None, where: str) -> Tensor:
    """Return the token ids [n]: bytes as uint8 without a tokenizer, else int32."""
    if tokenizer is None:
        # A copy, because a tensor must not share immutable bytes; frombuffer refuses empty ones.
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"the text is not UTF-8 ({error.reason} at byte {error.start})",
            where=where,
            remedy="convert the text to UTF-8, or give no tokenizer: then a byte is a token",
        ) from None
    ids: Any = tokenizer(decoded)
    try:
        tokens = torch.as_tensor(ids, dtype=torch.int32)
    except (TypeError, ValueError, KeyError, RuntimeError):
        tokens = torch.empty(())
    if tokens.dim() != 1:
        raise DataError(
            f"the tokenizer returned a {type(ids).__name__}, not a list of token ids",
            where=where,
            remedy="give a function from text to ids: the .encode of a Hugging Face tokenizer, not the tokenizer",
        )
    return tokens


def _hash(tensor: Tensor) -> str:
    return hash_of(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
