"""The front: nothing on it is beaten, nothing off it is missed."""

from typing import cast

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.search import THINNED, SetupOption
from meshwright.planner.search import front as front_of


class Option(msgspec.Struct, frozen=True):
    """An option by what is weighed."""

    sequence_s: float
    peak_bytes: float
    sequence_usd: float | None


def front(options: list[Option]) -> tuple[Option, ...]:
    """As of a search's options."""
    return cast("tuple[Option, ...]", front_of(cast("list[SetupOption]", options)))


numbers = st.integers(1, 6).map(float)
options = st.lists(st.builds(Option, numbers, numbers, numbers), max_size=12, unique=True)


def dominates(option: Option, other: Option) -> bool:
    """No worse in anything; memory that differs by less than the front tells apart is alike."""
    assert option.sequence_usd is not None
    assert other.sequence_usd is not None
    return (
        option.sequence_s <= other.sequence_s
        and THINNED * option.peak_bytes <= other.peak_bytes
        and option.sequence_usd <= other.sequence_usd
    )


@given(options)
def test_the_front_is_what_brute_force_finds(all_options: list[Option]) -> None:
    kept = front(all_options)
    assert set(kept) == {
        option
        for option in all_options
        if not any(other != option and dominates(other, option) for other in all_options)
    }
    assert [option.sequence_s for option in kept] == sorted(option.sequence_s for option in kept)


def test_without_a_price_time_and_memory_decide() -> None:
    slow, cheap = Option(2.0, 1.0, None), Option(3.0, 2.0, 0.1)
    fast = Option(1.0, 2.0, 5.0)
    assert front([slow, cheap, fast]) == (fast, slow)
    assert front([cheap, fast]) == (fast, cheap)  # slower, but it costs less


def test_an_option_needs_clearly_less_memory() -> None:
    assert front([Option(1.0, 100.0, 1.0), Option(2.0, 98.0, 2.0)]) == (Option(1.0, 100.0, 1.0),)
    assert len(front([Option(1.0, 100.0, 1.0), Option(2.0, 96.0, 2.0)])) == 2
