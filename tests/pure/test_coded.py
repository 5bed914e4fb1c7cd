"""Coded collectives: each contribution and each coded message is in the result once; counted bytes are the closed
forms, for any ranks, lengths and chunks; codecs that would lose or double an error are refused by name."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli import run as cli
from meshwright.errors import PlanError, ScheduleError
from meshwright.ir.codec import codec_of
from meshwright.prediction.collectives import compare
from meshwright.schedules.collectives import coded_forms
from meshwright.schedules.collectives.check import check
from meshwright.schedules.collectives.choice import chosen
from meshwright.schedules.collectives.coded import coded
from meshwright.schedules.collectives.coded_bytes import SAMPLES, chunk_of, in_bytes, sent_bytes
from meshwright.schedules.collectives.coded_forms import closed_form
from meshwright.schedules.collectives.operations import ALGORITHMS, FOR_SELECTIONS, build
from meshwright.schedules.collectives.steps import Move, RequiredSum, steps_from_rounds
from tests.tries import tries

SIZES = {"num_ranks": st.integers(1, 8), "length": st.integers(0, 2000), "chunk": st.sampled_from([16, 512, 2**18])}
LOSSY, EXACT = ("fp16", "qsgd(4)", "onebit", "topk(10%)+qsgd(8)"), ("lossless", "topk(1%)", "threshold(0.1)")
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")
NOT_CODED = ("naive", "butterfly", "one-by-one", "contention-free")
SAFE = [(operation, name) for operation in OPERATIONS for name in ALGORITHMS[operation] if name not in NOT_CODED]


# --- legal -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operation", "name"), SAFE)
@given(num_ranks=st.integers(1, 9), length=st.integers(0, 40), codec=st.sampled_from((*LOSSY, *EXACT)))
@tries(8)
def test_each_contribution_and_each_coded_message_counts_once(
    operation: str, name: str, num_ranks: int, length: int, codec: str
) -> None:
    """Building the coded steps checks it; here only that something is coded."""
    steps = coded(build(operation, name, num_ranks, length), codec_of(codec))
    assert bool(steps.encodings) == (num_ranks > 1 and length > 0)
    assert all(part.code is not None for moves in steps.rounds for move in moves for part in move.parts)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("num_ranks", [3, 4, 5, 8])
def test_a_butterfly_is_refused_where_several_ranks_code_the_same_sum(codec: str, num_ranks: int) -> None:
    steps = build("all_reduce", "butterfly", num_ranks, 100)
    with pytest.raises(ScheduleError, match="all_reduce butterfly: ranks 0 and 1 hold the same sum when it is coded"):
        coded(steps, codec_of(codec))


@pytest.mark.parametrize("codec", EXACT)
def test_a_butterfly_carries_codecs_without_errors(codec: str) -> None:
    """Recursive doubling of SparCML: streams are merged, and none is coded again."""
    assert coded(build("all_reduce", "butterfly", 8, 100), codec_of(codec)).encodings


@pytest.mark.parametrize("codec", LOSSY)
def test_two_ranks_may_swap_coded_vectors(codec: str) -> None:
    """One round; each rank holds its own vector decoded, so both add the same two vectors."""
    steps = coded(build("all_reduce", "butterfly", 2, 100), codec_of(codec))
    assert [(each.rank, each.terms, each.in_use) for each in steps.encodings] == [(0, 1, True), (1, 1, True)]


@pytest.mark.parametrize("codec", [*LOSSY, *EXACT])
def test_ranks_that_end_with_other_bits_are_refused(codec: str) -> None:
    with pytest.raises(ScheduleError, match="all_reduce naive: ranks end with different bits"):
        coded(build("all_reduce", "naive", 3, 10), codec_of(codec))
    with pytest.raises(ScheduleError, match="added up at another place"):
        coded(build("all_reduce", "contention-free", 3, 10), codec_of(codec))


def test_steps_are_judged_by_what_they_do_and_not_by_their_name() -> None:
    """A butterfly under another name; a ring that forgets a rank; a star that adds a coded message twice."""
    whole, sums = (0, 10), RequiredSum((0, 10), ((0, 0), (1, 0), (2, 0), (3, 0)))
    rounds = [[Move(i, i ^ distance, 0, 0, 10, True) for i in range(4)] for distance in (1, 2)]
    steps = steps_from_rounds("all_reduce", "ring", 10, rounds, ((whole,),) * 4, ((sums,),) * 4)
    with pytest.raises(ScheduleError, match="hold the same sum"):
        coded(steps, codec_of("qsgd(8)"))
    both = RequiredSum(whole, ((0, 0), (1, 0)))
    for rounds, problem in (
        ([[Move(0, 1, 0, 0, 10)], [Move(1, 0, 0, 0, 10)]], "without each contribution once"),
        ([[Move(1, 0, 0, 0, 10, True)], [Move(1, 0, 0, 0, 10, True)]], "without each contribution once"),
    ):
        steps = steps_from_rounds("all_reduce", "star", 10, rounds, ((whole,),) * 2, ((both,), ()))
        with pytest.raises(ScheduleError, match=problem):
            coded(steps, codec_of("qsgd(8)"))


def test_a_ring_codes_each_sum_once_and_forwards_it_as_it_came() -> None:
    steps = coded(build("all_reduce", "ring", 3, 9), codec_of("qsgd(8)"))
    terms = [[part.terms for move in moves for part in move.parts] for moves in steps.rounds]
    assert terms == [[1, 1, 1], [2, 2, 2], [3, 3, 3], [3, 3, 3]]
    codes = [{part.code for move in moves for part in move.parts} for moves in steps.rounds]
    assert codes[2] == codes[3], "the last round sends on what the round before has brought"
    assert [each.in_use for each in steps.encodings] == [False] * 6 + [True] * 3


# --- along levels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [*LOSSY, *EXACT])
@pytest.mark.parametrize(
    "name", ["star+ring@2x2", "ring+rabenseifner@2x4", "star+tree@0.2|1.3", "star+butterfly@4x2", "star+ring@2x3/4"]
)
def test_along_levels_only_messages_between_boxes_are_coded(name: str, codec: str) -> None:
    boxes = {"2x2": 4, "2x4": 8, "0.2|1.3": 4, "4x2": 8, "2x3/4": 6}
    num_ranks = boxes[name.partition("@")[2]]
    steps = coded(build("all_reduce", name, num_ranks, 1000), codec_of(codec))
    box = (lambda rank: rank % 2) if "|" in name else (lambda rank: rank // (4 if "4x2" in name else 2))
    for move in (move for moves in steps.rounds for move in moves):
        assert {part.code is not None for part in move.parts} == {box(move.source) != box(move.target)}


def test_a_butterfly_between_more_than_two_boxes_is_refused() -> None:
    with pytest.raises(ScheduleError, match="hold the same sum when it is coded"):
        coded(build("all_reduce", "star+butterfly@2x4", 8, 100), codec_of("qsgd(4)"))


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operation", "name"), sorted(coded_forms._FORMS))
@given(**SIZES, codec=st.sampled_from((*LOSSY, *EXACT)), item_bytes=st.sampled_from([2, 4, 8]))
@tries(15)
def test_counted_bytes_are_the_closed_forms(
    operation: str, name: str, num_ranks: int, length: int, chunk: int, codec: str, item_bytes: int
) -> None:
    parsed = codec_of(codec)
    if name == "butterfly" and num_ranks > 2 and codec in LOSSY:
        return
    counted = sent_bytes(coded(build(operation, name, num_ranks, length), parsed), parsed, item_bytes, chunk)
    assert counted == closed_form(operation, name, num_ranks, length, parsed, item_bytes, chunk)


@given(num_ranks=st.integers(2, 8), bits=st.sampled_from([2, 4, 8]))
def test_a_quantized_ring_sends_a_fraction_of_a_dense_ring(num_ranks: int, bits: int) -> None:
    """2 (P - 1) / P of n b / 8 bytes and 4 bytes for each bucket of 512."""
    length, codec = 512 * num_ranks * 16, codec_of(f"qsgd({bits})")
    expected = 2 * (num_ranks - 1) * (length // num_ranks) * (bits / 8 + 4 / 512)
    assert closed_form("all_reduce", "ring", num_ranks, length, codec, 4, 2**18) == (expected,) * num_ranks


def test_selections_send_what_sparcml_says() -> None:
    """64 MiB of float32, 0.1 %, 8 ranks: the expected union doubles (almost) from round to round of a butterfly, and
    never is a message longer than the dense one."""
    length, codec = 2**24, codec_of("topk(0.1%)")
    kept = codec.message_bytes(length, 4) - 8
    (sent,) = set(closed_form("all_reduce", "butterfly", 8, length, codec, 4, 2**18))
    assert 0.99 * (1 + 2 + 4) * kept < sent < (1 + 2 + 4) * kept + 3 * 16
    full = codec_of("topk(100%)")
    dense = set(closed_form("all_reduce", "butterfly", 8, length, full, 4, 2**18))
    assert dense == {3 * (4 * length + 16)}


def test_balanced_parts_keep_ok_topks_bound() -> None:
    """At most 6 k (P - 1) / P words, beside the sample of positions and 16 bytes a message."""
    for num_ranks in range(2, 9):
        length, codec = 2**20, codec_of("topk(1%)")
        sent = max(closed_form("all_reduce", "balanced", num_ranks, length, codec, 4, 2**18))
        beside = (num_ranks - 1) * (8 * (1 + SAMPLES * num_ranks) + 2 * 16)
        words = 6 * num_ranks * math.ceil(length / num_ranks / 100) * (num_ranks - 1) / num_ranks
        assert sent - beside <= 4 * words


def test_sizes_that_are_not_known_cost_a_round_each() -> None:
    for codec, rounds in (("qsgd(4)", 6), ("qsgd(4, elias=on)", 12), ("topk(1%)", 12)):
        parsed = codec_of(codec)
        steps = in_bytes(coded(build("all_reduce", "ring", 4, 1000), parsed), parsed, 4, 512)
        assert len(steps.rounds) == rounds


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(ScheduleError, match="no closed form"):
        closed_form("all_reduce", "double-tree", 4, 10, codec_of("fp16"), 4, 16)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOR_SELECTIONS)
def test_a_plan_may_name_algorithms_for_selections(name: str) -> None:
    """Without a selection, they are all-reduces like others; comparisons of dense algorithms leave them out."""
    assert chosen(name, "all_reduce", 100) == name
    assert chosen(f"all_reduce shares, 1024 {name}; all_gather star", "all_reduce", 2048) == name
    assert check(build("all_reduce", name, 5, 33))
    assert name not in ALGORITHMS["all_reduce"]
    with pytest.raises(PlanError, match=f"there is no algorithm '{name}' of all_gather"):
        chosen(name, "all_gather", 100)


# --- the command -----------------------------------------------------------------------------------------------------


def test_algorithms_are_compared_in_coded_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["collectives", "--ranks", "4", "--bytes", "1MiB", "--codec", "topk(1%) + qsgd(4)", "--json"]) == 0
    decoded = json.loads(capsys.readouterr().out)
    assert decoded["codec"] == "topk(1%)+qsgd(4)"
    rows = {row["algorithm"]: row for row in decoded["rows"]}
    assert set(FOR_SELECTIONS) < set(rows)
    assert {each["algorithm"] for each in decoded["refused"]} == {"naive", "butterfly", "one-by-one", "contention-free"}
    codec = codec_of("topk(1%)+qsgd(4)")
    sent = closed_form("all_reduce", "ring", 4, 2**18, codec, 4, chunk_of(codec, 4))
    assert rows["ring"]["count"]["moved"] == sum(sent)
    assert cli(["collectives", "--ranks", "4", "--bytes", "1MiB", "--codec", "qsgd(4)"]) == 0
    text = capsys.readouterr().out
    assert "coded as qsgd(4)" in text
    assert "not with this codec: butterfly: ranks 0 and 1 hold the same sum when it is coded" in text


@pytest.mark.parametrize(
    ("operation", "codec", "problem"),
    [
        ("all_reduce", "topk(1%", "is not a codec"),
        ("all_reduce", "gzip", "there is no codec 'gzip'"),
        ("all_reduce", "powersgd(4)", "codec powersgd(4) changes no message of all_reduce"),
        ("all_reduce", "factors", "codec factors changes no message of all_reduce"),
        ("barrier", "fp16", "codec fp16 changes no message of barrier"),
    ],
)
def test_a_bad_codec_is_refused(operation: str, codec: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["collectives", operation, "--codec", codec]) == 2
    assert problem in capsys.readouterr().err


def test_a_lossy_codec_is_faster_where_links_are_slow() -> None:
    dense = {row.algorithm: row.alone_s for row in compare("all_reduce", "cpu-local", 2, 2**26).rows}
    fp16 = {row.algorithm: row.alone_s for row in compare("all_reduce", "cpu-local", 2, 2**26, "fp16").rows}
    assert all(time_s < 0.51 * dense[name] + 1e-3 for name, time_s in fp16.items())
    with pytest.raises(PlanError, match="there is no codec"):
        compare("all_reduce", "cpu-local", 2, 2**20, "zip")
