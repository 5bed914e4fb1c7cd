"""How long computing stands still for buckets: by hand, and what must hold whatever the sizes."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.exposed import Actions, BucketTransfer, Moment, computed_s, exposed_s, least_exposed
from meshwright.ir.plan import Bucket
from meshwright.planner.bucket_size import ALIKE, BucketSizes, ranked
from meshwright.planner.buckets import BUCKET_BYTES, BucketMember, filled

KEY = ((0,), "dp", (), False, 0, "float32")
OTHER = ((1,), "dp", (), False, 0, "float32")
Gradients = list[tuple[float, int]]
GRADIENTS = st.lists(st.tuples(st.floats(0.1, 3.0), st.integers(1, 100)), min_size=1, max_size=8)


def backward(gradients: Gradients) -> list[Actions]:
    """One gradient after each of some computing (seconds; bytes)."""
    return [Actions(1, tuple(Moment(seconds, gradients=(f"p{n}",)) for n, (seconds, _) in enumerate(gradients)))]


def reductions(
    gradients: Gradients, most: int, alpha_s: float, byte_s: float = 0.01, **kind: bool
) -> list[BucketTransfer]:
    members = [BucketMember(KEY, f"p{n}", size) for n, (_, size) in enumerate(gradients)]
    return [
        BucketTransfer("dp", bucket.parameters, alpha_s + byte_s * bucket.num_bytes, **kind)
        for bucket in filled(members, most, {})
    ]


# --- buckets ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from([KEY, OTHER]), st.integers(1, 100)), max_size=20), st.integers(0, 300))
def test_buckets_hold_every_member_in_order_and_no_more_than_they_may(
    sizes: list[tuple[tuple[tuple[int, ...], str, tuple[str, ...], bool, int, str], int]], most: int
) -> None:
    members = [BucketMember(key, f"p{n}", size) for n, (key, size) in enumerate(sizes)]
    buckets = filled(members, most, {"dp": "ring"})
    for key in (KEY, OTHER):
        names = [member.name for member in members if member.key == key]
        assert [name for bucket in buckets for name in bucket.parameters if name in names] == names
    of_name = {member.name: member for member in members}
    for bucket in buckets:
        held = [of_name[name] for name in bucket.parameters]
        assert len({member.key for member in held}) == 1
        assert bucket.algorithm == "ring"
        assert bucket.num_bytes == sum(member.num_bytes for member in held)
        assert bucket.num_bytes <= most or len(held) == 1
    assert sum(len(bucket.parameters) for bucket in buckets) == len(members)


def test_members_follow_the_buckets_of_another_plan() -> None:
    members = [BucketMember(KEY, name, BUCKET_BYTES) for name in "abcd"]
    base = [Bucket(axis="dp", parameters=("a", "c"), num_bytes=1), Bucket(axis="dp", parameters=("b",), num_bytes=1)]
    assert [bucket.parameters for bucket in filled(members, BUCKET_BYTES, {}, base)] == [("a", "c"), ("b",), ("d",)]


# --- the timeline ----------------------------------------------------------------------------------------------------


def test_what_ends_after_backward_is_exposed() -> None:
    """
    compute  | 1 | 1 | 1 |
    link         | p0 3      | p1 p2 4       |
    """
    actions = backward([(1.0, 1), (1.0, 1), (1.0, 1)])
    assert (
        exposed_s(actions, (), [BucketTransfer("dp", ("p0",), 3.0), BucketTransfer("dp", ("p1", "p2"), 4.0)])
        == 8.0 - 3.0
    )
    assert computed_s(actions) == 3.0


def test_parameters_are_gathered_one_bucket_ahead() -> None:
    """
    compute          | a 3       |       | b 1 |     | c 1 |
    link     | a 2   | b 5               | c 2   |
    """
    moments = (Moment(0.0, wanted=("a",)), Moment(3.0, wanted=("b",)), Moment(1.0, wanted=("c",)), Moment(1.0))
    gathers = [BucketTransfer("dp", (name,), seconds) for name, seconds in (("a", 2.0), ("b", 5.0), ("c", 2.0))]
    assert exposed_s([Actions(1, moments)], gathers, ()) == 2.0 + 2.0 + 1.0
    assert exposed_s([Actions(4, moments)], gathers, ()) == 4 * 5.0, "in every micro-batch"


def test_parts_are_reduced_one_bucket_at_a_time() -> None:
    """Computing waits for a bucket, and its sums over another axis (2), before the next one starts.

    compute  | 1 |       | 1 |          after: 3 + 2
    link         | p0 3 |(the sum: 2)
    """
    gradients = [(1.0, 1), (1.0, 1)]
    alone = [BucketTransfer("dp", (f"p{n}",), 3.0, after_s=2.0, alone=True) for n in (0, 1)]
    assert exposed_s(backward(gradients), (), alone) == (2.0 + 2.0) + (3.0 + 2.0)


def test_other_collectives_of_the_axis_wait_for_the_link() -> None:
    """
    compute  | 1 |           1 of dp |          compute  | 1 | 1 of tp |
    link         | p0 3      |                  link         | p0 3      |
    """
    for axis, exposed in (("dp", 3.0), ("tp", 2.0)):
        actions = [Actions(1, (Moment(1.0, gradients=("p0",)), Moment(0.0, ((axis, 1.0),))))]
        assert exposed_s(actions, (), [BucketTransfer("dp", ("p0",), 3.0)]) == exposed


@given(GRADIENTS)
def test_where_nothing_hides_all_is_exposed(gradients: Gradients) -> None:
    sums = reductions(gradients, 60, 0.5, hides=False)
    assert exposed_s(backward(gradients), (), sums) == pytest.approx(sum(transfer.seconds for transfer in sums))


@given(GRADIENTS, st.integers(1, 400))
def test_without_latency_small_buckets_are_best(gradients: Gradients, most: int) -> None:
    small, large = (exposed_s(backward(gradients), (), reductions(gradients, size, 0.0)) for size in (0, most))
    assert small <= large + 1e-9


@given(GRADIENTS, st.integers(0, 400))
def test_with_a_latency_longer_than_backward_one_bucket_is_best(gradients: Gradients, most: int) -> None:
    alpha_s = sum(seconds for seconds, _ in gradients)
    few, many = (exposed_s(backward(gradients), (), reductions(gradients, size, alpha_s)) for size in (10_000, most))
    assert few <= many + 1e-9


# --- the choice ------------------------------------------------------------------------------------------------------


def test_sizes_that_cost_the_same_are_as_usual_and_others_by_cost() -> None:
    def choice(times: float, exposed: float) -> BucketSizes:
        return BucketSizes(round(times * BUCKET_BYTES), BUCKET_BYTES, exposed)

    usual, small, large, dear = choice(1, 1.0 + ALIKE), choice(0.25, 1.0), choice(8, 3.0), choice(2, 2.0)
    assert ranked([small, large, dear, usual], computed_s=1.1) == [usual, small, dear, large]
    assert ranked([small, large, dear, usual], computed_s=0.9) == [small, usual, dear, large]


# --- choices ---------------------------------------------------------------------------------------------------------

options = st.lists(
    st.tuples(st.floats(0.0, 5.0), st.booleans(), st.sampled_from([0.0, 0.1, 0.5])), min_size=1, max_size=2
)


@given(GRADIENTS.flatmap(lambda m: st.tuples(st.just(m[:5]), st.lists(options, min_size=5, max_size=5))), st.booleans())
def test_the_choice_of_transfers_is_that_of_brute_force(
    drawn: tuple[Gradients, list[list[tuple[float, bool, float]]]], alone: bool
) -> None:
    """Transfers that computing hides or not, with charges; on two axes, with a gather and another collective."""
    gradients, chosen = drawn
    actions = backward(gradients)
    actions = [Actions(2, (Moment(0.5, wanted=("w",)), *actions[0].moments, Moment(0.2, (("dp", 0.3),))))]
    gathers = [BucketTransfer("dp", ("w",), 1.0)]
    choices = [
        [
            BucketTransfer("dp" if n % 3 else "dp+cp", (f"p{n}",), seconds, alone=alone, hides=hides, charge_s=charge)
            for seconds, hides, charge in each
        ]
        for n, each in enumerate(chosen[: len(gradients)])
    ]

    def objective_s(transfers: Sequence[BucketTransfer]) -> float:
        return exposed_s(actions, gathers, transfers) + sum(each.charge_s for each in transfers)

    best = least_exposed(actions, gathers, choices)
    assert [each.parameters for each in best] == [each[0].parameters for each in choices]
    assert objective_s(best) == pytest.approx(min(map(objective_s, itertools.product(*choices))), abs=1e-9)


def test_a_bucket_that_computing_hides_stays_as_it_is() -> None:
    """
    compute  | 4           | 1 | 1 |
    link                   | p0 1  | p1 p2 3        |
    """
    dense, coded = (
        [BucketTransfer("dp", ("p0",), a), BucketTransfer("dp", ("p1", "p2"), b)] for a, b in ((1.0, 3.0), (0.1, 0.5))
    )
    choices = [[transfer, other._replace(charge_s=0.01)] for transfer, other in zip(dense, coded, strict=True)]
    actions = backward([(4.0, 1), (1.0, 1), (1.0, 1)])
    assert [each.seconds for each in least_exposed(actions, (), choices)] == [1.0, 0.5]
