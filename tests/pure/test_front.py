"""The front: nothing on it is beaten, nothing off it is missed."""

from typing import cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.search import THINNED, SetupOption
from meshwright.planner.search import front as front_of


class One(msgspec.Struct, frozen=True):
    """An option by what is weighed."""

    sequence_s: float
    peak_bytes: float
    sequence_usd: float | None


def front(options: list[One]) -> tuple[One, ...]:
    """As of a search's options."""
    return cast("tuple[One, ...]", front_of(cast("list[SetupOption]", options)))


numbers = st.integers(1, 6).map(float)
options = st.lists(st.builds(One, numbers, numbers, numbers), max_size=12, unique=True)


def dominates(one: One, other: One) -> bool:
    """No worse in anything; memory that differs by less than the front tells apart is alike."""
    assert one.sequence_usd is not None
    assert other.sequence_usd is not None
    return (
        one.sequence_s <= other.sequence_s
        and THINNED * one.peak_bytes <= other.peak_bytes
        and one.sequence_usd <= other.sequence_usd
    )


@given(options)
def test_the_front_is_what_brute_force_finds(some: list[One]) -> None:
    kept = front(some)
    assert set(kept) == {one for one in some if not any(other != one and dominates(other, one) for other in some)}
    assert [one.sequence_s for one in kept] == sorted(one.sequence_s for one in kept)


def test_without_a_price_time_and_memory_decide() -> None:
    slow, cheap = One(2.0, 1.0, None), One(3.0, 2.0, 0.1)
    fast = One(1.0, 2.0, 5.0)
    assert front([slow, cheap, fast]) == (fast, slow)
    assert front([cheap, fast]) == (fast, cheap)  # slower, but it costs less


def test_an_option_needs_clearly_less_memory() -> None:
    assert front([One(1.0, 100.0, 1.0), One(2.0, 98.0, 2.0)]) == (One(1.0, 100.0, 1.0),)
    assert len(front([One(1.0, 100.0, 1.0), One(2.0, 96.0, 2.0)])) == 2
