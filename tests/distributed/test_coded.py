"""Coded collectives: all ranks end with the same bits; results and new residuals are values and old residuals; lanes
carry as many bytes as the closed forms say; exact codecs give what dense collectives give; lost ranks are named."""

from __future__ import annotations

import functools
import itertools
import os
import queue
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwright.comm import coded as executor
from meshwright.comm import coded_streams
from meshwright.comm.collectives import Collectives
from meshwright.comm.groups import collectives
from meshwright.comm.transport.base import Lane, Work
from meshwright.comm.transport.loopback import Loopback
from meshwright.comm.transport.point_to_point import TorchLane
from meshwright.comm.transport.progress import RankStreams
from meshwright.compress.coder import Coder, coder_of
from meshwright.compress.stream import Stream
from meshwright.errors import LostRankError, PlanError, RankError, ScheduleError
from meshwright.ir.codec import Codec, codec_of
from meshwright.schedules.collectives.coded_bytes import chunk_of, dense_codec
from meshwright.schedules.collectives.coded_forms import closed_form
from meshwright.schedules.collectives.operations import ALGORITHMS, FOR_SELECTIONS
from tests.distributed.pool import Ranks, RanksFailedError
from tests.distributed.test_collectives import small_messages, together
from tests.tries import tries

CHUNK = 64
FIXED = ("fp16", "bf16", "qsgd(8)", "qsgd(4, bucket=32, norm=l2, feedback=on)", "onebit(bucket=64)")
VARYING = ("qsgd(4, bucket=32, elias=on)", "lossless", "qsgd(8)+lossless", "topk(5%)", "topk(20%)+qsgd(8)",
           "threshold(1.5)", "topk(10%)+fp16+lossless")  # fmt: skip
ALONG = ("star+ring@2x2", "ring+rabenseifner@2x2/3", "star+tree@0.2|1.3")
SAFE = tuple(name for name in ALGORITHMS["all_reduce"] if name not in ("naive", "one-by-one", "contention-free"))


class Counted(Loopback):
    """Counts the bytes that are put."""

    sent = 0

    def put(self, part: Tensor, tag: int) -> None:
        self.sent += part.nbytes
        super().put(part, tag)


def threads(num_ranks: int, slots: int = 3) -> list[Collectives]:
    """The collectives of ranks that are threads."""
    lanes: list[dict[int, Lane]] = [{} for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for other in range(rank):
            there, back = queue.Queue[tuple[Tensor, int]](slots), queue.Queue[tuple[Tensor, int]](slots)
            lanes[rank][other], lanes[other][rank] = Counted(there, back, other), Counted(back, there, rank)
    return [Collectives(rank, num_ranks, each) for rank, each in enumerate(lanes)]


def sent(ours: Collectives) -> int:
    return sum(lane.sent for lane in ours._lanes.values() if isinstance(lane, Counted))


def small_chunks(codec: Codec, dtype: torch.dtype) -> Coder:
    coder = coder_of(codec, dtype)
    coder.chunk = CHUNK
    return coder


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Chunks and messages so small that even short vectors have several."""
    with small_messages(1024), pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "coder_of", small_chunks)
        patch.setattr(coded_streams, "CHUNK", CHUNK)
        yield


def values_of(num_ranks: int, length: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(length, dtype=torch.float64, generator=draw).to(dtype) for _ in range(num_ranks)]


def each_rank(num_ranks: int, call: Callable[[Collectives], Any], slots: int = 3) -> list[Any]:
    """What a call returns on each rank; an error of a rank is raised."""
    joined = together([functools.partial(call, ours) for ours in threads(num_ranks, slots)])
    errors = [each for each in joined if isinstance(each, Exception)]
    for error in sorted(errors, key=lambda error: isinstance(error, RankError)):  # that of its own first
        raise error
    return joined


def all_reduce(
    values: list[Tensor], residuals: list[Tensor] | None, codec: str, name: str, draw: int = 1, slots: int = 3
) -> list[int]:
    """Sum the values of all ranks in place; the bytes that each has sent."""

    def call(ours: Collectives) -> int:
        residual = residuals[ours.rank] if residuals else None
        run = ours.coded_all_reduce(values[ours.rank], residual, codec_of(codec), draw, name, "gradients")
        run.wait()
        assert run.sent_bytes == sent(ours)
        return run.sent_bytes

    return each_rank(len(values), call, slots)


def dense_all_reduce(values: list[Tensor], name: str) -> None:
    each_rank(len(values), lambda ours: ours.all_reduce(values[ours.rank], "sum", name).wait())


def reduce_scatter(values: list[Tensor], parts: list[Tensor], residuals: list[Tensor], codec: str, name: str) -> None:
    def call(ours: Collectives) -> None:
        rank, before = ours.rank, values[ours.rank].clone()
        ours.coded_reduce_scatter(before, parts[rank], residuals[rank], codec_of(codec), 3, name).wait()
        assert torch.equal(before, values[rank]), "the input stays"

    each_rank(len(values), call)


def all_gather(parts: list[Tensor], wholes: list[Tensor], residuals: list[Tensor], codec: str, name: str) -> None:
    def call(ours: Collectives) -> None:
        rank = ours.rank
        ours.coded_all_gather(parts[rank], wholes[rank], residuals[rank], codec_of(codec), 3, name).wait()

    each_rank(len(parts), call)


def may_ride(codec: str, algorithm: str, num_ranks: int) -> bool:
    loses = codec not in ("lossless", "topk(5%)", "threshold(1.5)")
    return not (algorithm == "butterfly" and num_ranks > 2 and loses)


# --- all ranks agree, and nothing is lost ----------------------------------------------------------------------------


def all_reduced(
    num_ranks: int, algorithm: str, codec: str, length: int, dtype: torch.dtype, feedback: bool
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """The results and residuals of all ranks, and the bytes that each has sent."""
    values = values_of(num_ranks, length, dtype)
    residuals = [each.mul_(0.1) for each in values_of(num_ranks, length, dtype, 1)]

    return values, residuals, all_reduce(values, residuals if feedback else None, codec, algorithm, 7)


def in_turn(codecs: Iterable[str], *numbers: int) -> list[Any]:
    """All codecs with all numbers of ranks. `make test` takes one number for each codec, in turn, and random ones
    (``test_any_number_of_ranks_and_elements``)."""
    return [
        pytest.param(codec, num_ranks, marks=() if index == turn % len(numbers) else pytest.mark.product)
        for turn, codec in enumerate(codecs)
        for index, num_ranks in enumerate(numbers)
    ]


@pytest.mark.parametrize(("codec", "num_ranks"), in_turn([*FIXED, *VARYING], 2, 3, 4))
def test_results_and_residuals_are_what_ranks_gave(codec: str, num_ranks: int) -> None:
    names = [*SAFE, *FOR_SELECTIONS, *(ALONG if num_ranks == 4 else ())]
    for name in (name for name in names if may_ride(codec, name, num_ranks)):
        for length in (0, 1, 7, 700):
            given = sum(values_of(num_ranks, length)) + 0.1 * sum(values_of(num_ranks, length, seed=1))
            values, residuals, _ = all_reduced(num_ranks, name, codec, length, torch.float64, True)
            assert all(torch.equal(value, values[0]) for value in values), (name, length)
            torch.testing.assert_close(
                values[0] + sum(residuals), given, rtol=1e-12, atol=1e-12, msg=f"{name} {length}"
            )
            values, residuals, _ = all_reduced(num_ranks, name, codec, length, torch.float64, False)
            assert all(torch.equal(value, values[0]) for value in values), (name, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("codec", ["fp16", "qsgd(8)", "lossless", "topk(5%)", "topk(20%)+qsgd(8)"])
def test_elements_of_every_dtype(codec: str, dtype: torch.dtype) -> None:
    digits = torch.finfo(dtype).eps
    for name in ("ring", "shares", "rabenseifner", "balanced", "dense-gather"):
        given = sum(values_of(3, 500)) + 0.1 * sum(values_of(3, 500, seed=1))
        values, residuals, _ = all_reduced(3, name, codec, 500, dtype, True)
        assert all(torch.equal(value, values[0]) for value in values)
        total = values[0].double() + sum(each.double() for each in residuals)
        torch.testing.assert_close(total, given, rtol=16 * digits, atol=16 * digits)


@pytest.mark.parametrize("codec", ["qsgd(8)", "lossless", "topk(20%)", "topk(20%)+qsgd(8)"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_halves_of_an_all_reduce(codec: str, num_ranks: int) -> None:
    """A reduce-scatter leaves its sum uncoded; an all-gather gives all ranks the decoded values, its own too."""
    length = 90
    for name in (*ALGORITHMS["reduce_scatter"], *(("star+ring@2x2",) if num_ranks == 4 else ())):
        values = [each.view(num_ranks, length) for each in values_of(num_ranks, num_ranks * length)]
        residuals = [torch.zeros_like(each) for each in values]
        parts = [torch.empty(length, dtype=torch.float64) for _ in values]

        reduce_scatter(values, parts, residuals, codec, name)
        torch.testing.assert_close(torch.stack(parts) + sum(residuals), sum(values), rtol=1e-12, atol=1e-12)
        errors = [torch.zeros_like(each) for each in parts]
        wholes = [torch.empty(num_ranks, length, dtype=torch.float64) for _ in parts]

        all_gather(parts, wholes, errors, codec, name)
        assert all(torch.equal(whole, wholes[0]) for whole in wholes)
        torch.testing.assert_close(wholes[0] + torch.stack(errors), torch.stack(parts), rtol=1e-12, atol=1e-12)


@given(
    num_ranks=st.integers(2, 5), length=st.integers(0, 600), name=st.sampled_from([*SAFE, *FOR_SELECTIONS]),
    codec=st.sampled_from([*FIXED, *VARYING]), slots=st.integers(3, 5),
)  # fmt: skip
@tries(12)
def test_any_number_of_ranks_and_elements(num_ranks: int, length: int, name: str, codec: str, slots: int) -> None:
    if may_ride(codec, name, num_ranks):
        values, residuals = values_of(num_ranks, length), values_of(num_ranks, length, seed=2)
        total = sum(values) + sum(residuals)

        all_reduce(values, residuals, codec, name, 1, slots)
        assert all(torch.equal(value, values[0]) for value in values)
        torch.testing.assert_close(values[0] + sum(residuals), total, rtol=1e-12, atol=1e-12)


# --- exact -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["lossless", "topk(100%)", "threshold(0)"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_codecs_that_leave_nothing_out_give_the_bits_of_a_dense_all_reduce(codec: str, num_ranks: int) -> None:
    names = [*SAFE, *FOR_SELECTIONS, *(ALONG if num_ranks == 4 else ())]
    for name in names:
        for length in (1, 5, 300):
            dense = values_of(num_ranks, length, torch.float32)
            dense_all_reduce(dense, name)
            values = values_of(num_ranks, length, torch.float32)
            residuals = [torch.zeros_like(value) for value in values]
            all_reduce(values, residuals, codec, name)
            if name == "balanced":  # its parts are cut elsewhere, so it adds in another order
                torch.testing.assert_close(values[0], dense[0])
            else:
                assert torch.equal(values[0], dense[0]), (name, length)
            assert not any(residual.any() for residual in residuals)


def test_one_rank_sends_nothing_and_changes_nothing() -> None:
    (ours,) = threads(1)
    for codec in ("qsgd(2)", "lossless", "topk(10%)"):
        for name in ("ring", "balanced"):
            value, residual = torch.randn(10), torch.randn(10)
            before, old = value.clone(), residual.clone()
            run = ours.coded_all_reduce(value, residual, codec_of(codec), 1, name)
            run.wait()
            assert torch.equal(value, before)
            assert torch.equal(residual, old)
            assert run.sent_bytes == 0
    value, stream = torch.zeros(10), Stream.select(torch.randn(10), codec_of("topk(10%)"))
    ours.coded_all_reduce(value, torch.zeros(10), codec_of("topk(10%)"), 1, chosen=stream).wait()
    assert torch.equal(value, stream.dense()), "the residual holds the rest"


def test_equal_draws_give_equal_bits_and_other_draws_others() -> None:
    results = []
    for draw in (1, 1, 2):
        values = values_of(2, 300, torch.float32)
        all_reduce(values, None, "qsgd(2)", "ring", draw)
        results.append(values[0])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("codec", [*FIXED, *VARYING])
def test_what_is_not_finite_arrives_and_does_not_stay_in_the_residual(codec: str) -> None:
    for bad in (torch.nan, torch.inf):
        for name in ("ring", "shares", *FOR_SELECTIONS):
            values = values_of(3, 300, torch.float32)
            values[1][[3, 150]] = bad
            residuals = [torch.zeros_like(value) for value in values]
            all_reduce(values, residuals, codec, name)
            assert not any(value[[3, 150]].isfinite().any() for value in values), (name, bad)
            assert all(residual.isfinite().all() for residual in residuals), (name, bad)


@pytest.mark.parametrize("codec", ["topk(1%)+fp16", "topk(1%)+qsgd(4, bucket=1000)", "threshold(1)+onebit", "qsgd(8)"])
def test_plans_know_how_long_the_chunks_of_dense_sums_are(codec: str) -> None:
    elements = dense_codec(codec_of(codec))
    assert elements is not None
    assert coder_of(elements, torch.float32).chunk == chunk_of(codec_of(codec), 4)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "num_ranks"), in_turn(FIXED, 2, 3, 4))
def test_lanes_carry_the_bytes_of_the_closed_forms(codec: str, num_ranks: int) -> None:
    for name in ("ring", "partitioned", "shares", "star", "tree", "rabenseifner"):
        for length in (0, 1, 7, 700):
            _, _, counted = all_reduced(num_ranks, name, codec, length, torch.float32, False)
            assert tuple(counted) == closed_form("all_reduce", name, num_ranks, length, codec_of(codec), 4, CHUNK)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_compressed_message_is_at_most_as_long_as_said(num_ranks: int) -> None:
    _, _, counted = all_reduced(num_ranks, "ring", "lossless", 700, torch.float32, False)
    most = closed_form("all_reduce", "ring", num_ranks, 700, codec_of("lossless"), 4, CHUNK)
    assert all(num_bytes <= limit for num_bytes, limit in zip(counted, most, strict=True))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("codec", ["topk(100%)", "topk(100%)+qsgd(4, bucket=32)", "topk(100%)+fp16"])
def test_a_selection_of_everything_is_as_long_as_said(num_ranks: int, codec: str) -> None:
    """Streams are then dense: no more bytes than the elements have, in the form in which values are written."""
    for name in ("ring", "partitioned", "shares", "star", "tree", "rabenseifner", "butterfly", "dense-gather"):
        if may_ride(codec, name, num_ranks) or codec == "topk(100%)":
            _, _, counted = all_reduced(num_ranks, name, codec, 701, torch.float32, False)
            expected = closed_form("all_reduce", name, num_ranks, 701, codec_of(codec), 4, CHUNK)
            assert tuple(counted) == expected, name


def test_the_union_decides_the_bytes() -> None:
    """Two ranks choose 10 of 1000 elements each, of which 4 are the same: 10 entries cross each way, then nothing more;
    a third rank gets the union of 16."""
    spans = ((0, 10), (6, 16), (500, 510))
    values = [torch.zeros(1000) for _ in spans]
    for value, (begin, end) in zip(values, spans, strict=True):
        value[begin:end] = torch.arange(1.0, 11)

    entry, beside = 4 + 4, 8 + 8
    counted = all_reduce(values, None, "topk(1%)", "star")
    assert counted == [2 * (26 * entry + beside), 10 * entry + beside, 10 * entry + beside]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_balanced_parts_of_skewed_indices(num_ranks: int) -> None:
    """All ranks choose among the first elements of a long vector. Equal parts would all be added up by rank 0; balanced
    parts are added up by all, and no rank receives more than Ok-Topk's 6 k (P - 1) / P words."""
    length, kept = 20_000, 1000
    draw = torch.Generator().manual_seed(5)
    given = []
    for _ in range(num_ranks):
        value = 0.01 * torch.randn(length, generator=draw)
        value[torch.randperm(3000, generator=draw)[:kept]] += 10
        given.append(value)

    def received(name: str) -> list[int]:
        values, residuals = [value.clone() for value in given], [torch.zeros(length) for _ in given]

        def call(ours: Collectives) -> dict[int, int]:
            ours.coded_all_reduce(values[ours.rank], residuals[ours.rank], codec_of("topk(5%)"), 1, name).wait()
            return {peer: lane.sent for peer, lane in ours._lanes.items() if isinstance(lane, Counted)}

        each = each_rank(num_ranks, call)
        torch.testing.assert_close(values[0] + sum(residuals), sum(given), rtol=1e-5, atol=1e-4)
        return [sum(of.get(rank, 0) for of in each) for rank in range(num_ranks)]

    beside = (num_ranks - 1) * (8 * (1 + 32 * num_ranks) + 2 * 16)
    balanced, equal = received("balanced"), received("partitioned")
    assert max(balanced) - beside <= 4 * 6 * kept * (num_ranks - 1) / num_ranks
    assert max(balanced) - min(balanced) < 0.2 * max(balanced)
    if num_ranks > 2:
        assert max(balanced) < max(equal)


@pytest.mark.parametrize("name", ["ring", "balanced", *ALONG])
def test_ranks_may_have_chosen_before(name: str) -> None:
    """Then messages inside boxes are sparse too, and residuals hold what was left out."""
    values, residuals = values_of(4, 600), values_of(4, 600, seed=1)
    total = sum(values) + sum(residuals)
    streams = []
    for value, residual in zip(values, residuals, strict=True):
        stream = Stream.select(residual.add_(value), codec_of("topk(5%)"))
        assert stream.indices is not None
        residual[stream.indices.long()] = 0
        streams.append(stream)

    def call(ours: Collectives) -> int:
        rank = ours.rank
        values[rank].fill_(torch.nan)  # only written
        work = ours.coded_all_reduce(
            values[rank], residuals[rank], codec_of("topk(5%)"), 1, name, "gradients", chosen=streams[rank]
        )
        work.wait()
        return sent(ours)

    counted = each_rank(4, call)
    assert all(torch.equal(value, values[0]) for value in values)
    torch.testing.assert_close(values[0] + sum(residuals), total, rtol=1e-12, atol=1e-12)
    if name != "balanced":
        assert max(counted) < 600 * 8 / 2, "half of one dense vector"
    with pytest.raises(PlanError, match="it chooses no elements"):
        threads(2)[0].coded_all_reduce(values[0], None, codec_of("fp16"), 1, chosen=streams[0])


# --- over memory and over wires --------------------------------------------------------------------------------------


def over(kind: str) -> list[tuple[bytes, float]]:
    """The bits of results with every codec, beside how far results and residuals are from what was given."""
    world = dist.group.WORLD
    assert world is not None
    ours, results = over_lanes(kind), []
    rank, size = ours.rank, ours.num_ranks
    with small_messages(2**19 if kind == "wires" else 1024), pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "coder_of", small_chunks)
        for codec in (*FIXED, *VARYING):
            for name in ("ring", "shares", *FOR_SELECTIONS, *(ALONG[:1] if size == 4 else ())):
                values, residuals = values_of(size, 333), values_of(size, 333, seed=1)
                total = sum(values) + sum(residuals)
                ours.coded_all_reduce(values[rank], residuals[rank], codec_of(codec), 1, name).wait()
                dist.all_reduce(residuals[rank])
                off = float((values[rank] + residuals[rank] - total).abs().max())
                results.append((values[rank].numpy().tobytes(), off))
    ours._coded_kinds.clear()  # whose chunks are small
    return results


def over_lanes(kind: str) -> Collectives:
    world = dist.group.WORLD
    assert world is not None
    if kind == "memory":
        return collectives(world)
    rank, size = world.rank(), world.size()
    lanes: dict[int, Lane] = {peer: TorchLane(world, peer, RankStreams()) for peer in range(size) if peer != rank}
    return Collectives(rank, size, lanes, f"rank {rank}")


OVER = [("wires", 2), ("memory", 3), ("memory", 4)]


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        pytest.param(*case, marks=() if case in OVER else pytest.mark.product)
        for case in itertools.product(["memory", "wires"], [2, 3, 4])
    ],
)
def test_every_codec_over_memory_and_wires(ranks: Ranks, num_ranks: int, kind: str) -> None:
    first, *others = ranks(num_ranks, over, kind)
    assert all([bits for bits, _ in other] == [bits for bits, _ in first] for other in others)
    assert max(off for _, off in first) < 1e-10


def beside_dense(kind: str) -> bool:
    """Dense and coded collectives of all sizes under way at once, waited for in another order."""
    ours = over_lanes(kind)
    size, rank, waiting = ours.num_ranks, ours.rank, list[tuple[Work, Tensor, Tensor]]()
    codecs = ("qsgd(8)", "lossless", "topk(100%)", "threshold(0)", "fp16")
    for index in range(40):
        whole = [torch.full((1 + 3000 * (index % 7),), float(index % 5 + peer)) for peer in range(size)]
        value, total = whole[rank].clone(), torch.stack(whole).sum(0)
        work: Work
        if index % 3:
            codec = codec_of(codecs[index % len(codecs)])
            work = ours.coded_all_reduce(value, None, codec, index, ("ring", "shares")[index % 2], f"coded {index}")
        else:
            work = ours.all_reduce(value, "sum", "ring", f"dense {index}")
        waiting.append((work, value, total))
        if index % 4 == 3:
            work, value, total = waiting.pop(index % len(waiting))
            work.wait()
            torch.testing.assert_close(value, total, rtol=0.05, atol=0)
    for work, value, total in waiting:
        work.wait()
        torch.testing.assert_close(value, total, rtol=0.05, atol=0)
    return True


@pytest.mark.parametrize(("kind", "num_ranks"), in_turn(["memory", "wires"], 2, 3))
def test_coded_and_dense_collectives_may_be_under_way_together(ranks: Ranks, num_ranks: int, kind: str) -> None:
    assert all(ranks(num_ranks, beside_dense, kind))


def behind_dense() -> bool:
    """Selections whose first messages leave early, before a dense collective of one round is finished."""
    ours = over_lanes("wires")
    for step in range(3):
        value, elements = torch.ones(1), torch.arange(50_000.0) + step
        dense = ours.all_reduce(value, "sum", "butterfly")
        coded = ours.coded_all_reduce(elements, None, codec_of("topk(100%)"), step, "shares")
        dense.wait()
        coded.wait()
        assert value.item() == ours.num_ranks
        torch.testing.assert_close(elements, ours.num_ranks * (torch.arange(50_000.0) + step))
    return True


def test_ranks_do_not_wait_for_messages_of_later_collectives(ranks: Ranks) -> None:
    assert all(ranks(2, behind_dense))


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_residual_of_another_model_is_refused() -> None:
    for residual in (torch.zeros(9), torch.zeros(10, dtype=torch.float64)):
        with pytest.raises(PlanError, match=r"a residual of .* for 10 x float32"):
            threads(2)[0].coded_all_reduce(torch.zeros(10), residual, codec_of("qsgd(8)"), 1)


@pytest.mark.parametrize(
    ("codec", "algorithm", "error", "problem"),
    [
        ("powersgd(2)", "ring", PlanError, "it has no collective of its own"),
        ("factors", "ring", PlanError, "it has no collective of its own"),
        ("qsgd(8)", "butterfly", ScheduleError, "hold the same sum when it is coded"),
        ("qsgd(8)", "spiral", ScheduleError, "there is no algorithm 'spiral'"),
    ],
)
def test_codecs_that_may_not_ride_are_refused(codec: str, algorithm: str, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        threads(3)[0].coded_all_reduce(torch.zeros(10), None, codec_of(codec), 1, algorithm)


def test_elements_that_cannot_be_coded_are_refused() -> None:
    with pytest.raises(PlanError, match="int64 elements"):
        threads(2)[0].coded_all_reduce(torch.zeros(10, dtype=torch.int64), None, codec_of("qsgd(8)"), 1)


def differing() -> str:
    world = dist.group.WORLD
    assert world is not None
    ours = collectives(world)
    codec = codec_of("qsgd(8)" if ours.rank else "qsgd(4)")
    try:
        ours.coded_all_reduce(torch.zeros(10_000), None, codec, 1, "ring", "bucket 3").wait()
    except RankError as error:
        return str(error)
    return ""


def test_ranks_whose_codecs_differ_are_named(ranks: Ranks) -> None:
    first, second = ranks(2, differing)
    assert "rank 0 is in #1 all_reduce of 10000 x float32, qsgd(4), ring (bucket 3)" in first
    assert "rank 1 was in #1 all_reduce of 10000 x float32, qsgd(8), ring (bucket 3)" in first
    assert second.startswith("rank 0: it sent ")


def lost(kind: str, codec: str, after: int) -> None:
    """Rank 1 is killed after so many calls of its lanes."""
    ours, done = over_lanes(kind), 0
    ours.all_reduce(torch.zeros(3), label="first").wait()

    def step(usual: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            nonlocal done
            if ours.rank == 1 and done == after:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return usual(*given)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for lane in {type(lane) for lane in ours._lanes.values()}:
            for name in ("put", "put_at_once", "take"):
                patch.setattr(lane, name, step(getattr(lane, name)))
        with pytest.raises(LostRankError) as caught:
            ours.coded_all_reduce(torch.randn(2**20), None, codec_of(codec), 1, "ring", "bucket 7").wait()
    assert caught.value.where == "rank 1", str(caught.value)
    assert f"rank {ours.rank} is in #2 all_reduce of 1048576 x float32, {codec}, ring (bucket 7)" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "codec", "after"), [("memory", "qsgd(8)", 3), ("memory", "topk(1%)", 2), ("wires", "qsgd(8)", 5)]
)
def test_a_rank_that_is_lost_is_named(ranks: Ranks, kind: str, codec: str, after: int) -> None:
    with pytest.raises(RanksFailedError) as error:
        ranks(3, lost, kind, codec, after)
    assert list(error.value.failures) == [1], error.value
