"""Coded collectives of one rank: the choice of the executor for a codec, and its initial state (decision 0047)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch

from meshwright.comm.coded_chunks import ChunksKind
from meshwright.comm.coded_elements import Elements, sent_again
from meshwright.comm.coded_rounds import AtomHolder, RoundsKind
from meshwright.comm.coded_streams import AtomStreams
from meshwright.comm.exchange import CodedExchange
from meshwright.comm.transport.base import Lane
from meshwright.compress.coder import coder_of
from meshwright.errors import PlanError
from meshwright.ir.codec import Codec
from meshwright.schedules.collectives import operations
from meshwright.schedules.collectives.coded import coded
from meshwright.schedules.collectives.coded_bytes import dense_codec
from meshwright.schedules.collectives.hierarchy import read
from meshwright.schedules.collectives.operations import BALANCED, DENSE_GATHER

Key: TypeAlias = tuple[str, str, int, torch.dtype, Codec, bool]
"""Key of a kind of coded collective: operation, algorithm, length, dtype, codec, and whether ranks have already chosen
elements."""
CodedKind: TypeAlias = ChunksKind | RoundsKind

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""The dtypes of elements that can be coded."""


def kind_of(
    rank: int,
    num_ranks: int,
    lanes: Mapping[int, Lane],
    operation: str,
    algorithm: str,
    length: int,
    dtype: torch.dtype,
    codec: Codec,
    has_chosen: bool,
) -> CodedKind:
    """The state that coded collectives with these properties share on one rank. ``has_chosen``: ranks have already
    chosen their elements. Messages inside boxes are then coded too.

    Raises:
        ScheduleError: the algorithm cannot carry the codec, or there is no such algorithm.
        PlanError: the codec has no collective of its own, or the dtype cannot be coded; the codec chooses no elements.
    """
    kind, carrier = str(dtype).removeprefix("torch."), codec.exchange
    text = f"{operation} of {length} x {kind}, {codec}, {algorithm}" + ", chosen before" * has_chosen
    if dtype not in DTYPES:
        raise PlanError(f"{kind} elements", where=text, remedy="code floating-point elements")
    if carrier in ("sums", "factors"):
        remedy = "all-reduce its coded vectors as they are" if carrier == "sums" else "gather its factors"
        raise PlanError("it has no collective of its own", where=f"codec {codec}", remedy=remedy)
    if has_chosen and carrier != "merges":
        raise PlanError("it chooses no elements", where=f"codec {codec}", remedy="give a selection, such as topk(1%)")
    # Balanced parts are cut later. Until then, one element stands for each part.
    balances = algorithm == BALANCED and carrier == "merges"
    steps = coded(
        operations.build(operation, algorithm, num_ranks, num_ranks if balances else length),
        codec,
        everywhere=has_chosen,
    )
    if codec.exchange == "merges":
        whole = has_chosen or read(algorithm) is None
        elements = dense_codec(codec)
        coder = coder_of(elements, dtype) if elements is not None and algorithm == DENSE_GATHER else None
        hold: Callable[[CodedExchange], AtomHolder] = partial(
            AtomStreams, rank, steps, codec, coder, sent_again(rank, steps), whole
        )
        return RoundsKind(rank, steps, codec, hold, dtype, lanes, text)
    coder = coder_of(codec, dtype)
    if codec.is_fixed:
        return ChunksKind(rank, steps, coder, dtype, lanes, text)
    hold = partial(Elements, rank, steps, coder, sent_again(rank, steps))
    return RoundsKind(rank, steps, codec, hold, dtype, lanes, text)
