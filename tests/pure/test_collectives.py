"""Steps of collectives: each result holds each contribution once, for any ranks, lengths and boxes; what they cost is
what the published tables say; faulty steps are refused by name."""

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.catalog import load_cluster
from meshwright.cli import run as cli
from meshwright.errors import LayoutError, ScheduleError
from meshwright.ir.cluster import Cluster
from meshwright.ir.level import Level
from meshwright.prediction.collectives import compare
from meshwright.schedules.collectives.check import check
from meshwright.schedules.collectives.hierarchy import (
    ACROSS,
    HALVES_ACROSS,
    INSIDE,
    Boxes,
    Leveled,
    equal_boxes,
    leaves,
    named_boxes,
    nested,
    read,
    written,
)
from meshwright.schedules.collectives.operations import (
    ALGORITHMS,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    build,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from meshwright.schedules.collectives.picture import rounds
from meshwright.schedules.collectives.steps import Move, Steps, count, programs
from tests.tries import tries

ALL = [(operation, name) for operation, names in ALGORITHMS.items() for name in names]
DIFFER = ("naive", "one-by-one", "contention-free")
"""All-reduces whose ranks add in different orders."""
GOLDEN = Path(__file__).parents[1] / "golden"


# --- right ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("operation", "name"), ALL)
@given(num_ranks=st.integers(1, 11), length=st.integers(0, 40))
@tries(8)
def test_each_contribution_arrives_exactly_once(operation: str, name: str, num_ranks: int, length: int) -> None:
    check(build(operation, name, num_ranks, length))


@pytest.mark.parametrize("name", ALGORITHMS["reduce_scatter"])
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_parts_may_be_of_any_sizes(name: str, counts: list[int]) -> None:
    check(reduce_scatter(name, counts))
    check(all_gather(name, counts))


@pytest.mark.parametrize("name", ALGORITHMS["gather"])
@given(data=st.data(), counts=st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_parts_come_from_and_go_to_any_root(name: str, data: st.DataObject, counts: list[int]) -> None:
    root = data.draw(st.integers(0, len(counts) - 1))
    check(gather(name, counts, root))
    check(scatter(name, counts, root))


@pytest.mark.parametrize("name", ALGORITHMS["reduce"])
@given(data=st.data(), num_ranks=st.integers(1, 9), length=st.integers(0, 20))
def test_sums_go_to_and_vectors_come_from_any_root(name: str, data: st.DataObject, num_ranks: int, length: int) -> None:
    root = data.draw(st.integers(0, num_ranks - 1))
    check(reduce(name, num_ranks, length, root))
    check(broadcast(name, num_ranks, length, root))


@pytest.mark.parametrize("name", ALGORITHMS["all_to_all"])
@given(data=st.data(), num_ranks=st.integers(1, 6))
def test_an_all_to_all_may_send_any_counts(name: str, data: st.DataObject, num_ranks: int) -> None:
    row = st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks)
    check(all_to_all(name, data.draw(st.lists(row, min_size=num_ranks, max_size=num_ranks))))


def _boxes() -> st.SearchStrategy[Boxes]:
    """Up to three levels of unequal boxes."""

    def numbered(sizes: list[list[int]]) -> Boxes:
        ranks = iter(range(100))
        return tuple(tuple(tuple(next(ranks) for _ in range(size)) for size in box) for box in sizes)

    return st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=2, max_size=3).map(numbered)


@pytest.mark.parametrize("across", ACROSS)
@pytest.mark.parametrize("inside", INSIDE)
@given(boxes=_boxes(), length=st.integers(0, 50), pieces=st.integers(1, 4))
@tries(8)
def test_levels_compose(inside: str, across: str, boxes: Boxes, length: int, pieces: int) -> None:
    name = written(inside, across, named_boxes(boxes), pieces)
    assert check(all_reduce(name, len(leaves(boxes)), length))


@given(boxes=_boxes(), pieces=st.integers(1, 3))
def test_what_is_written_of_boxes_is_read(boxes: Boxes, pieces: int) -> None:
    name = written("star", "ring", named_boxes(boxes), pieces)
    assert read(name) == Leveled("star", "ring", boxes, pieces)


def test_boxes_are_written_shortly() -> None:
    assert named_boxes(((0, 1), (2, 3))) == "2x2"
    assert named_boxes(((0, 2), (1, 3))) == "0.2|1.3"
    assert named_boxes(((0, 1, 2), (3,))) == "0.1.2|3"
    assert named_boxes((((0, 1), (2,)), ((3,),))) == "0.1|2||3"
    assert named_boxes(nested((2, 3, 4))) == "2x3x4"


@pytest.mark.parametrize("across", HALVES_ACROSS)
@pytest.mark.parametrize("inside", INSIDE)
@given(
    fans=st.lists(st.integers(1, 3), min_size=2, max_size=3), data=st.data(), order=st.randoms(use_true_random=False)
)
@tries(8)
def test_halves_compose(inside: str, across: str, fans: list[int], data: st.DataObject, order: random.Random) -> None:
    """Equal boxes, of any ranks."""
    ranks = list(range(math.prod(fans)))
    order.shuffle(ranks)
    name = written(inside, across, named_boxes(_renamed(nested(fans), ranks)))
    if "|" not in name and "x" not in name:
        return
    counts = data.draw(st.lists(st.integers(0, 5), min_size=len(ranks), max_size=len(ranks)))
    check(reduce_scatter(name, counts))
    check(all_gather(name, counts))


def _renamed(boxes: Boxes, ranks: list[int]) -> Boxes:
    return tuple(ranks[box] if isinstance(box, int) else _renamed(box, ranks) for box in boxes)


@pytest.mark.parametrize("pieces", [2, 5])
def test_a_piece_goes_across_while_the_next_is_added_up(pieces: int) -> None:
    steps = all_reduce(f"star+butterfly@2x2/{pieces}", 4, 40 * pieces)
    crossing = [any(move.source // 2 != move.target // 2 for move in moves) for moves in steps.rounds]
    assert crossing == [False] + [True] * pieces + [False]
    assert count(steps).moved == count(all_reduce("star+butterfly@2x2", 4, 40 * pieces)).moved


@given(num_ranks=st.integers(3, 9), length=st.integers(1, 20))
@tries(5)
def test_which_all_reduces_end_with_the_same_bits(num_ranks: int, length: int) -> None:
    for name in ALGORITHMS["all_reduce"]:
        assert check(all_reduce(name, num_ranks, length)) == (name not in DIFFER)
        assert check(all_reduce(name, 2, length))  # a + b is b + a


@given(fans=st.lists(st.integers(2, 3), min_size=2, max_size=3), length=st.integers(0, 60))
def test_every_rank_of_a_box_drives_its_share_of_the_slow_link(fans: list[int], length: int) -> None:
    steps = all_reduce(f"star+ring@{equal_boxes(fans)}", math.prod(fans), length)
    box = math.prod(fans[:-1])
    sent = [0] * steps.num_ranks
    for message in (move for moves in steps.rounds for move in moves):
        if message.source // box != message.target // box:
            sent[message.source] += message.length
    share = 2 * (fans[-1] - 1) * length / fans[-1] / box
    assert all(abs(each - share) <= 2 * fans[-1] * len(fans) for each in sent)


# --- what they cost: N = 8, M elements ------------------------------------------------------------------------------


def test_what_all_reduces_move_as_published() -> None:
    """allreduce-table: 2NM, N(N-1)M, 2(N-1)M, 2(N-1)M, NM log N."""
    length = 64
    counts = {
        name: count(all_reduce(name, 8, length, server=True)) for name in ("star", "naive", "ring", "tree", "butterfly")
    }
    assert [total.moved / length for total in counts.values()] == [16, 56, 14, 14, 24]
    assert [total.rounds for total in counts.values()] == [2, 1, 14, 6, 3]
    assert [total.fan_in for total in counts.values()] == [8, 7, 1, 1, 1]
    assert [counts[name].busiest / length for name in ("ring", "tree")] == [1.75, 6]


@given(num_ranks=st.integers(2, 12))
def test_rounds_peak_and_fan_in_as_published(num_ranks: int) -> None:
    """staged and allreduce-table: star O(1), O(NP), O(P); one after another O(P²) rounds; decentral O(P), O(N), O(1);
    ring O(2P), O(N/P), O(1)."""
    size, length = num_ranks, 10 * num_ranks
    counts = {name: count(all_reduce(name, size, length, server=True)) for name in ALGORITHMS["all_reduce"]}
    shape = {name: (count.rounds, count.peak, count.fan_in) for name, count in counts.items()}
    assert shape["star"] == (2, length * size, size)
    assert shape["one-by-one"] == (size * (size - 1), length, 1)
    assert shape["contention-free"] == (size - 1, length, 1)
    assert shape["partitioned"] == shape["ring"] == (2 * (size - 1), length // size, 1)


@pytest.mark.parametrize("name", ["butterfly", "rabenseifner"])
@given(num_ranks=st.integers(2, 17))
def test_ranks_beyond_a_power_of_two_cost_two_rounds(name: str, num_ranks: int) -> None:
    log = int(math.log2(num_ranks))
    expected = log if name == "butterfly" else 2 * log
    assert count(all_reduce(name, num_ranks, 64)).rounds == expected + 2 * (num_ranks != 2**log)


@pytest.mark.parametrize(("operation", "name"), ALL)
def test_one_rank_has_nothing_to_send(operation: str, name: str) -> None:
    assert count(build(operation, name, 1, 5)).messages == 0


def test_seven_workers_in_a_binary_tree_as_published() -> None:
    """tree-7: 2, 5, 1, 6 at the leaves, 4 and 7 above them, 10 at the root: 11 and 14 on the way, 35 everywhere."""
    held, after = [10, 4, 7, 2, 5, 1, 6], []
    for moves in all_reduce("binary-tree", 7, 1).rounds:
        sent = list(held)
        for move in moves:
            held[move.target] = sent[move.source] + held[move.target] * move.adds
        after.append(list(held))
    assert after[0][1:3] == [11, 14]
    assert after[1][0] == 35
    assert after[-1] == [35] * 7
    assert len(after) == 4


def test_no_rank_is_inside_of_both_trees() -> None:
    for size in (4, 8, 14):
        takes = [0] * size
        for message in (move for moves in all_reduce("double-tree", size, 2).rounds for move in moves):
            takes[message.target] += message.adds
        assert max(takes) <= 3, "two children in one tree, and one where it is a root"


# --- refused ---------------------------------------------------------------------------------------------------------


def _ring() -> Steps:
    return all_reduce("ring", 3, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rounds: rounds[:-1], "not x0 + x1 + x2"),
        (lambda rounds: (rounds[0], *rounds), "2 x"),
        (lambda rounds: (*rounds, (Move(0, 1, 0, 0, 2, True),)), "2 x0"),
        (lambda rounds: (*rounds[:-1], rounds[-1][1:]), "rank 1"),
    ],
)
def test_a_missing_or_doubled_step_is_found(change: Callable[..., object], message: str) -> None:
    steps = msgspec.structs.replace(_ring(), rounds=change(_ring().rounds))
    with pytest.raises(ScheduleError) as error:
        check(steps)
    assert message in str(error.value)


def test_programs_that_do_not_match_are_refused() -> None:
    steps = _ring()
    each = list(programs(steps))
    with pytest.raises(ScheduleError, match=r"rank 0: it sends rank 1 2 elements, which that rank does not take"):
        check(steps, [each[0], (*each[1][:-1], each[1][-1][:1]), each[2]])
    backwards = tuple(tuple(sorted(actions, key=lambda move: move.target != 0)) for actions in each[0])
    with pytest.raises(ScheduleError, match="rank 0 waits for rank 2; rank 1 waits for rank 0; rank 2 waits"):
        check(steps, [tuple(tuple(reversed(actions)) for actions in program) for program in each])
    check(steps, [backwards, *each[1:]])  # one rank that takes before it sends breaks no circle
    shorter = msgspec.structs.replace(each[1][0][1], length=1)
    with pytest.raises(ScheduleError, match="rank 1: it takes 1 elements of rank 0, which sends 2"):
        check(steps, [each[0], ((each[1][0][0], shorter), *each[1][1:]), each[2]])


def test_what_nobody_brought_cannot_be_read() -> None:
    steps = build("broadcast", "tree", 2, 4)
    with pytest.raises(ScheduleError, match="rank 1: it reads elements 0 to 4, where nothing is"):
        check(msgspec.structs.replace(steps, rounds=((Move(1, 0, 0, 0, 4),),)))


def test_a_barrier_hears_of_everybody() -> None:
    steps = build("barrier", "dissemination", 5, 0)
    with pytest.raises(ScheduleError, match="without having heard of rank"):
        check(msgspec.structs.replace(steps, rounds=steps.rounds[:-1]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("all_reduce", "rign", 2, 1), "there is no algorithm 'rign'"),
        (lambda: build("all_sum", "ring", 2, 1), "there is no collective 'all_sum'"),
        (lambda: build("all_reduce", "ring", 0, 1), "0 ranks"),
        (lambda: build("all_reduce", "ring", 2, -1), "-1 elements"),
        (lambda: reduce("tree", 2, 1, root=2), "there is no rank 2"),
        (lambda: all_to_all("naive", [[1, 2], [3]]), "a row has another length"),
        (lambda: all_reduce("star+star@2x2", 4, 1), "there is no algorithm 'star+star@2x2'"),
        (lambda: all_reduce("star+ring@2", 2, 1), "there is no algorithm 'star+ring@2'"),
        (lambda: all_reduce("star+ring@0.1|1.2", 4, 1), "the boxes hold the ranks 0, 1, 1, 2"),
        (lambda: all_reduce("star+ring@2x2", 5, 1), "5 ranks, of which the boxes hold 4"),
        (lambda: reduce_scatter("star+ring@0.1|2", [1, 1, 1]), "boxes of 1 and 2 ranks"),
        (lambda: reduce_scatter("star+ring@2x2/3", [1] * 4), "there is no algorithm 'star+ring@2x2/3'"),
        (lambda: build("broadcast", "star+ring@2x2", 4, 1), "there is no algorithm 'star+ring@2x2'"),
    ],
)
def test_what_cannot_be_built_is_refused(call: Callable[[], Steps], message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        call()
    assert message in str(error.value)


# --- shown ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ring", "rabenseifner"])
def test_pictures(name: str) -> None:
    assert rounds(all_reduce(name, 5, 10)) == (GOLDEN / f"collective_{name}.txt").read_text()


def test_a_picture_says_what_it_leaves_out() -> None:
    assert rounds(all_reduce("ring", 40, 40)).splitlines()[-1] == "and 27 more ranks"


def test_the_comparison_finds_the_crossovers() -> None:
    comparison = compare("all_reduce", "a100-80gb-dgx-hdr200x8", 8, 2**20)
    assert comparison.rows[0].shared_s == min(row.shared_s or math.inf for row in comparison.rows)
    names = [crossover.algorithm for crossover in comparison.best_alone]
    assert names == ["butterfly", "rabenseifner"], "latency first, then bytes"
    assert not set(DIFFER) & {crossover.algorithm for crossover in comparison.best_shared}
    with pytest.raises(LayoutError, match="65 ranks"):
        compare("all_reduce", comparison.cluster, 65, 1)


def test_a_cluster_of_boxes_is_compared_with_levels() -> None:
    names = {row.algorithm for row in compare("all_reduce", _two_boxes(), 4, 2**20).rows}
    assert names == {*ALGORITHMS["all_reduce"], *(f"{inside}+{across}@2x2" for inside in INSIDE for across in ACROSS)}


def _two_boxes() -> Cluster:
    inner = Level(name="box", fan_out=2, alpha_s=1e-6, beta_s_per_byte=1e-11)
    outer = Level(name="rack", fan_out=2, alpha_s=1e-5, beta_s_per_byte=1e-9)
    device = load_cluster("a100-80gb-dgx-hdr200x8").device
    return Cluster(name="two boxes", num_devices=4, device=device, levels=(inner, outer))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["collectives", "--ranks", "4", "--picture", "ring"]) == 0
    assert "d>1+    a>2+    b>3+    c>0+" in capsys.readouterr().out
    assert cli(["collectives", "--ranks", "4", "--bytes", "1MiB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["algorithm"] for row in document["rows"]} == set(ALGORITHMS["all_reduce"])
    assert cli(["collectives", "--ranks", "4", "--bytes", "1 MiB"]) == 0
    assert "fastest, alone: butterfly, rabenseifner from" in capsys.readouterr().out
    assert cli(["collectives", "all_sum"]) == 2
    assert "there is no collective 'all_sum'" in capsys.readouterr().err


def test_the_command_does_without_torch() -> None:
    program = (
        "import sys; from meshwright.cli import run; code = run(['collectives', '--ranks', '4']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, check=False).returncode == 0
