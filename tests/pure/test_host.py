"""The host: kernels take what device and host need, and each lot waits by its share of launches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.host import launched_s, waits_s
from meshwright.cost.work import Communicate, Compute, Piece, launched

SECONDS = st.floats(1e-6, 1.0)


@given(SECONDS, SECONDS)
def test_kernels_take_at_least_what_device_and_host_need_and_at_most_both(busy_s: float, launch_s: float) -> None:
    seconds = launched_s(busy_s, launch_s)
    assert max(busy_s, launch_s) * (1 - 1e-9) <= seconds <= busy_s + launch_s
    assert launched_s(launch_s, busy_s) == pytest.approx(seconds)
    assert launched_s(3 * busy_s, 3 * launch_s) == pytest.approx(3 * seconds)
    assert launched_s(busy_s, 0.0) == busy_s


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_lots_together_wait_no_longer_than_each_alone(a: float, b: float, c: float, d: float) -> None:
    """Layers that are priced one by one are an upper bound of their stage."""
    assert launched_s(a + b, c + d) <= (launched_s(a, c) + launched_s(b, d)) * (1 + 1e-9)


@given(SECONDS, st.lists(st.floats(0.0, 1.0), max_size=5))
def test_waits_add_up_to_what_the_host_adds(busy_s: float, launch_s: list[float]) -> None:
    assert sum(waits_s(busy_s, launch_s)) == pytest.approx(launched_s(busy_s, sum(launch_s)) - busy_s, abs=1e-12)


def test_kernels_wait_by_their_launches_and_the_host_goes_on_beside_collectives() -> None:
    def pieces(ahead_s: float, launch_s: float) -> list[Piece]:
        reduced = Communicate("tp", "all_reduce", "tp", 100, ahead_s=ahead_s)
        return [Compute("a", 1.0, 5.0, 7, launch_s), reduced, Compute("b", 1.0, launch_s=3 * launch_s)]

    first, between, second = launched(pieces(0.0, 100.0))
    assert isinstance(first, Compute)
    assert isinstance(second, Compute)
    assert between == pieces(0.0, 100.0)[1]
    assert first.seconds + second.seconds == pytest.approx(400.0)
    assert second.host_s == pytest.approx(3 * first.host_s)
    assert first.device_s == pytest.approx(1.0)
    assert (first.flops, first.bytes) == (5.0, 7)
    covered = launched(pieces(10_000.0, 100.0))
    assert sum(piece.seconds for piece in covered if isinstance(piece, Compute)) == pytest.approx(2.0, rel=1e-2)
    assert launched(pieces(0.0, 0.0)) == tuple(pieces(0.0, 0.0))


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=4))
def test_joined_actions_wait_as_one(parts: list[tuple[float, float]]) -> None:
    """Stages are joined from layers whose kernels had waited already."""
    alone: list[Piece] = [Compute("x", device_s, launch_s=launch_s) for device_s, launch_s in parts]
    waited = [piece for each in alone for piece in launched([each])]
    for piece, expected in zip(launched(waited), launched(alone), strict=True):
        assert isinstance(piece, Compute)
        assert isinstance(expected, Compute)
        assert piece.seconds == pytest.approx(expected.seconds)
        assert piece.host_s == pytest.approx(expected.host_s, abs=1e-9)
