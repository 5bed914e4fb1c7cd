"""A loader that reads samples of a store when they are asked for: the plain one, beside which others are tested."""

import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from meshwright.data.loaders import Loader
from meshwright.data.order import Order, SamplerOrder
from meshwright.data.stores import Store
from meshwright.errors import DataError

log = logging.getLogger("meshwright")

MOST_NAMED = 5
"""The number of bad samples that are kept by name."""


class StoreLoader(Loader):
    """Batches of the samples of a store, each sample read when its batch is asked for.

    A batch stacks samples as torch's ``default_collate`` does.

    Args:
        store: the samples.
        batch_size, seed, shuffle, shard, drop_last, epochs: as in ``Loader``.
        sampler: a sampler of torch.utils.data, whose order holds in place of that of ``seed`` and ``shuffle``.
        skip_bad: go on without samples that cannot be read: another sample of the rank's part of the batch takes the
            place of each. ``num_bad`` counts them and the store's truncated files, ``bad`` names the first.

    Raises:
        DataError: as ``Loader``; or the sampler's order cannot be known ahead. While iterating: a sample cannot be
            read or decoded, or samples of a batch differ in shape.
    """

    def __init__(
        self,
        store: Store,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        shard: tuple[int, int] = (0, 1),
        drop_last: bool = True,
        *,
        epochs: int | None = None,
        sampler: Any = None,
        skip_bad: bool = False,
    ) -> None:
        self.store, self._where = store, store.where
        self.skip_bad, self.num_bad = skip_bad, len(store.truncated)
        self.bad = [f"{path} (truncated)" for path in store.truncated[:MOST_NAMED]]
        order: Order | None = SamplerOrder(sampler, len(store), shard) if sampler is not None else None
        super().__init__(len(store), batch_size, seed, shuffle, shard, drop_last, epochs, order)

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def _gather(self, index: Tensor) -> Any:
        samples = index.tolist()
        values: list[Any] = []
        for sample in samples:
            try:
                values.append(self.store.decode(sample, self.store.read(sample)))
            except DataError as error:
                values.append(error)
        batch, bad = self._stacked(samples, values)
        self._note(bad)
        return batch

    def _stacked(self, samples: list[int], values: list[Any]) -> tuple[Any, list[DataError]]:
        """The batch of samples, some of which may be errors; and those errors that are skipped."""
        whole = self._without_bad(samples, values)
        try:
            return default_collate(whole), [value for value in values if isinstance(value, DataError)]
        except (RuntimeError, TypeError, KeyError) as error:
            names = f"{self.store.name(samples[0])} to {self.store.name(samples[-1])}"
            problem = f"samples of a batch do not stack: {str(error).strip().splitlines()[0]}"
            remedy = "give a decode= that makes samples of equal shapes and keys"
            raise DataError(problem, where=names, remedy=remedy) from error

    def _without_bad(self, samples: list[int], values: list[Any]) -> list[Any]:
        """The samples, with the next good one in place of each that could not be read."""
        bad = [place for place, value in enumerate(values) if isinstance(value, Exception)]
        for place in bad:
            if not (self.skip_bad and isinstance(values[place], DataError)):
                raise values[place]
        if len(bad) == len(values):
            raise values[bad[0]].within(f"all {len(bad)} samples of a part of a batch are bad, such as ", separator="")
        good = [place for place in range(len(values)) if place not in set(bad)]
        return [
            values[place] if place not in bad else values[next((each for each in good if each > place), good[0])]
            for place in range(len(values))
        ]

    def _note(self, bad: list[DataError]) -> None:
        """Count samples that were skipped, and name the first ones."""
        for error in bad:
            self.num_bad += 1
            if error.where not in self.bad and len(self.bad) < MOST_NAMED:
                self.bad.append(error.where)
                log.warning("skipped: %s", str(error).partition("\n")[0])

    def _describe(self) -> str:
        return self.store.describe()
