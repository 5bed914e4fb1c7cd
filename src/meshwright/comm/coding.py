"""Sends buckets in coded form, by the method that their codec allows (decision 0047).

A codec uses vectors of at least float32 precision, because 16-bit residuals would lose the small errors that they exist
for.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from meshwright.comm.collectives import Collectives
from meshwright.comm.exchange import CodedRun
from meshwright.comm.member import MeasuredCoding
from meshwright.comm.transport.base import UnderWay, Work
from meshwright.comm.transport.mpi import Mpi
from meshwright.comm.transport.native import Native
from meshwright.compress import low_rank
from meshwright.compress.coder import draw_of
from meshwright.compress.select import random_indices, share_of
from meshwright.compress.stream import Stream, select_with_feedback
from meshwright.ir.codec import Select, codec_of

_SALT = 0x5EED
NORM_EVERY = 64
"""For each label, one of this number of collectives measures the norm of its residual."""


Sums: TypeAlias = Collectives | Native | Mpi
"""An object that adds up coded vectors: any object that runs dense all-reduces."""


class CollectiveCoding:
    """The coding of one collective.

    Args:
        text: the codec.
        before: the state that the codec has kept from the previous step (``Codec.state_lengths``); None if it keeps
            nothing.
        state: memory for the new state. All of it is written. It may be the same tensor as ``before``.
        draw: the seed of the random numbers, equal on all ranks of the group.
        shapes: the shapes of the gradients in the vector.
        num_ranks: the number of ranks of the group.
        measured: measurements of this collective, for the ledger.
    """

    def __init__(
        self, text: str, before: Tensor | None, state: Tensor | None, draw: int, shapes: Sequence[tuple[int, ...]],
        num_ranks: int, measured: MeasuredCoding,
    ) -> None:  # fmt: skip
        self._codec, self._draw, self._shapes, self._num_ranks = codec_of(text), draw, shapes, num_ranks
        self._measured, self._coding_s, self._summed, self._norm = measured, 0.0, 0, 0.0
        self._old, self._kept = self._segments(before), self._segments(state)

    def _segments(self, state: Tensor | None) -> dict[str, Tensor]:
        if state is None:
            return {}
        lengths = self._codec.state_lengths(self._shapes)
        return dict(zip(lengths, state.split([*lengths.values()]), strict=True))

    def all_reduce(self, value: Tensor, collectives: Collectives, sums: Sums, algorithm: str, label: str) -> Work:
        """Sum a contiguous tensor over the group, in place. ``algorithm`` carries the coded elements; ``sums`` adds up
        coded vectors."""
        vector, write = self._vector(value)
        if self._codec.exchange == "sums":
            return self._sum(vector, write, sums, algorithm, label)
        chosen = self._begin(vector)
        if self._is_dense_yet:
            work = collectives.all_reduce(vector, "sum", algorithm, label)
        else:
            work = collectives.coded_all_reduce(
                vector, self._residual, self._codec, self._draw, algorithm, label, chosen, self._old.get("residual")
            )
        return UnderWay(lambda: self._end(vector, write, work), vector, works=(work,))

    def reduce_scatter(self, rows: Tensor, into: Tensor, collectives: Collectives, algorithm: str, label: str) -> Work:
        """Sum a tensor ``[ranks, elements]`` and write this rank's row to ``into``."""
        vector, _ = self._vector(rows)
        part, write = self._vector(into)
        chosen = self._begin(vector)
        if self._is_dense_yet:
            work = collectives.reduce_scatter(vector, part, "sum", algorithm, label)
        else:
            work = collectives.coded_reduce_scatter(
                vector, part, self._residual, self._codec, self._draw, algorithm, label, chosen,
                self._old.get("residual"),
            )  # fmt: skip
        return UnderWay(lambda: self._end(vector, write, work), vector, part, works=(work,))

    def all_gather(self, value: Tensor, into: Tensor, collectives: Collectives, algorithm: str, label: str) -> Work:
        """Collect every rank's ``value``, coded and decoded, in ``into`` (``[ranks, ...]``)."""
        vector, _ = self._vector(value)
        rows, write = self._vector(into)
        work = collectives.coded_all_gather(vector, rows, None, self._codec, self._draw, algorithm, label)
        return UnderWay(lambda: self._end(rows, write, work), vector, rows, works=(work,))

    # --- vectors -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _vector(value: Tensor) -> tuple[Tensor, Callable[[], object]]:
        """The elements in at least float32, and a function that writes them back."""
        wide = torch.promote_types(value.dtype, torch.float32)
        if wide == value.dtype:
            return value, lambda: None
        vector = value.to(wide)
        return vector, lambda: value.copy_(vector)

    @property
    def _residual(self) -> Tensor | None:
        return self._kept.get("residual")

    @property
    def _steps(self) -> int:
        """The number of finished steps, while a warm-up counts them."""
        return int(self._old["steps"]) if "steps" in self._old else self._codec.warmup

    @property
    def _is_dense_yet(self) -> bool:
        """Whether exchanges are still dense, because the codec's warm-up has not ended. Selections have no dense phase:
        they choose more elements during the warm-up."""
        return self._codec.select is None and self._steps < self._codec.warmup

    # --- momentum ----------------------------------------------------------------------------------------------------

    def _begin(self, vector: Tensor) -> Stream | None:
        """Turn gradients into the values to exchange. With 1-bit Adam, these are this rank's terms of the momentum.

        Returns the elements that this rank sends, if it must choose them before the collective. There are two reasons:
        its own momentum becomes 0 at exactly these elements, or each step of the warm-up chooses another number of
        elements."""
        codec, beta = self._codec, self._codec.momentum
        self._note_norm(vector)
        if codec.shares_momentum and not self._is_dense_yet:
            vector.mul_(1 - beta).add_(self._old["momentum"], alpha=beta / self._num_ranks)
        if self._is_dense_yet and self._residual is not None:
            self._residual.copy_(self._old["residual"])
        if codec.select is None or not (codec.chooses_first or self._steps < codec.warmup):
            return None
        with self._timed():
            chosen = select_with_feedback(vector.view(-1), self._kept, codec, self._steps, before=self._old)
            if not bool(chosen.values.isfinite().all()):
                self._drop_what_is_not_finite()
        return chosen

    def _drop_what_is_not_finite(self) -> None:
        """Remove infinities and NaN from residual and momentum. They have already reached the result, and would
        otherwise stay for ever."""
        for name in self._kept.keys() & {"residual", "momentum"}:
            torch.nan_to_num_(self._kept[name], 0.0, 0.0, 0.0)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._coding_s += time.perf_counter() - begun

    def _note(self, vector: Tensor, work: Work | None) -> None:
        """Record measurements of the collective. Norms are measured only sometimes, because that takes time."""
        measured = self._measured
        measured.num_bytes = vector.nbytes
        if isinstance(work, CodedRun):
            measured.sent_bytes, measured.coding_s = work.sent_bytes, self._coding_s + work.coding_s
        elif self._summed:
            measured.sent_bytes = 2 * (self._num_ranks - 1) * self._summed // self._num_ranks
            measured.coding_s = self._coding_s
        if self._residual is not None and self._norm:
            measured.residual_share = float(self._residual.norm()) / self._norm
        measured.count += 1

    def _note_norm(self, vector: Tensor) -> None:
        """Measure the norm of this rank's gradients, in some of the calls."""
        if self._residual is not None and self._measured.count % NORM_EVERY == 0:
            self._norm = float(vector.norm())

    def _end(self, vector: Tensor, write: Callable[[], object], work: Work | None) -> None:
        self._note(vector, work)
        momentum, beta = self._kept.get("momentum"), self._codec.momentum
        if momentum is not None and self._codec.shares_momentum:
            old = self._old["momentum"]
            assert old is not momentum, "momenta of the sum are exchanged once a step"
            new = torch.lerp(old, vector, 1 - beta) if self._is_dense_yet else vector
            # Infinities and NaN reach the result, but do not change the momentum of later steps.
            torch.where(new.isfinite(), new, old, out=momentum)
            if not self._is_dense_yet:
                # The optimizer computes the new momentum from this gradient, because it holds the old momentum.
                vector.sub_(old, alpha=beta).div_(1 - beta)
        write()

    # --- sums --------------------------------------------------------------------------------------------------------

    def _sum(self, vector: Tensor, write: Callable[[], object], sums: Sums, algorithm: str, label: str) -> Work:
        residual = self._residual
        flat = vector.view(-1)
        self._note_norm(flat)
        with self._timed():
            if (momentum := self._kept.get("momentum")) is not None:
                flat.copy_(torch.mul(self._old["momentum"], self._codec.momentum, out=momentum).add_(flat))
            if residual is not None:
                flat.add_(self._old["residual"])
        if self._codec.select is not None:
            return self._sum_chosen(flat, write, sums, algorithm, label)
        return self._sum_factors(flat, write, sums, algorithm, label)

    def _sum_chosen(self, flat: Tensor, write: Callable[[], object], sums: Sums, algorithm: str, label: str) -> Work:
        """Sum random elements, which are the same on all ranks."""
        share = share_of(self._codec, self._steps)
        assert share is not None, "of a threshold only"
        with self._timed():
            count = Select("randk", share).count(flat.numel())
            chosen = random_indices(flat.numel(), count, draw_of(self._draw, _SALT))
            # An element that is not finite must reach the result even if it is not chosen.
            coded = flat[chosen] if bool(flat.isfinite().all()) else flat.new_full(chosen.shape, torch.nan)
            if self._residual is not None:
                self._residual.copy_(flat)
            for name in self._kept.keys() & {"residual", "momentum"}:
                self._kept[name][chosen] = 0
            self._drop_what_is_not_finite()

        def finish() -> None:
            with self._timed():
                flat.zero_()
                flat[chosen] = coded
            self._note(flat, None)
            write()

        self._summed = coded.nbytes
        return UnderWay(finish, flat, coded, works=(sums.all_reduce(coded, "sum", algorithm, label),))

    def _sum_factors(self, flat: Tensor, write: Callable[[], object], sums: Sums, algorithm: str, label: str) -> Work:
        """Sum by PowerSGD: P is the sum of M Q over all ranks, made orthogonal; then Q is the sum of Mᵀ P over all
        ranks. A rank's residual is M - P Pᵀ M, so that the result and all residuals add up to all gradients and all old
        residuals."""
        tensors = [
            part.view(shape) for part, shape in zip(flat.split([*map(prod, self._shapes)]), self._shapes, strict=True)
        ]
        pairs = [self._codec.factored(shape) for shape in self._shapes]
        matrices = [tensor.view(pair) for tensor, pair in zip(tensors, pairs, strict=True) if pair is not None]
        whole = [tensor.reshape(-1) for tensor, pair in zip(tensors, pairs, strict=True) if pair is None]
        rank = self._codec.rank
        rights: list[Tensor] = []
        if matrices:
            widths = [rank * matrix.shape[1] for matrix in matrices]
            self._kept["right"].copy_(self._old["right"])
            rights = [
                part.view(matrix.shape[1], rank)
                for part, matrix in zip(self._kept["right"].split(widths), matrices, strict=True)
            ]
            for place, right in enumerate(rights):
                low_rank.renew_right(right, draw_of(self._draw, place))
        with self._timed():
            lefts = low_rank.left_factors(matrices, rights)
            first = torch.cat([*(left.view(-1) for left in lefts), *whole]) if lefts or whole else flat.new_empty(0)
        self._summed = first.nbytes
        started = sums.all_reduce(first, "sum", algorithm, label)

        def finish() -> None:
            sizes = [*(left.numel() for left in lefts), *(each.numel() for each in whole)]
            parts = first.split(sizes)
            summed = [part.view(left.shape) for part, left in zip(parts, lefts, strict=False)]
            with self._timed():
                for left in summed:
                    low_rank.orthogonalize(left)
                terms = low_rank.right_factors(matrices, summed)
                residual = self._residual
                if residual is not None:
                    residual.zero_()
                    left_out = residual.split([*map(prod, self._shapes)])
                    places = [place for place, pair in zip(left_out, pairs, strict=True) if pair is not None]
                    for place, matrix, left, term in zip(places, matrices, summed, terms, strict=True):
                        place.view(matrix.shape).copy_(matrix).addmm_(left, term.T, alpha=-1)
                    self._drop_what_is_not_finite()
            if terms:
                second = torch.cat([term.reshape(-1) for term in terms])
                work = sums.all_reduce(second, "sum", algorithm, label)
                if work is not None:
                    work.wait()
                self._summed += second.nbytes
                with self._timed():
                    self._kept["right"].copy_(second)
                    for matrix, left, right in zip(matrices, summed, rights, strict=True):
                        torch.mm(left, right.T, out=matrix)
            for tensor, part in zip(whole, parts[len(lefts) :], strict=True):
                tensor.copy_(part)
            self._note(flat, None)
            write()

        return UnderWay(finish, flat, first, works=(started,))
