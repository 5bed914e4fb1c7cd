"""What ranks tell each other: what rank 0 makes, and what went wrong there."""

from __future__ import annotations

import pytest

from meshwright.comm.groups import from_rank_0
from meshwright.errors import LayoutError, RankError
from tests.distributed.pool import Ranks


class AwkwardError(Exception):
    """An error that cannot be pickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(lambda: first + second)


def made_by_rank_0(kind: str) -> str:
    def make() -> int:
        if kind == "value":
            return 7
        if kind == "layout":
            raise LayoutError("dp=3", where="layout")
        raise AwkwardError(1, 2) if kind == "awkward" else ZeroDivisionError("by zero")

    try:
        return f"{from_rank_0(make)}"
    except (LayoutError, RankError, ZeroDivisionError, AwkwardError) as error:
        return f"{type(error).__name__}: {error}"


def test_rank_0_makes_for_all(ranks: Ranks) -> None:
    assert ranks(2, made_by_rank_0, "value", timeout=20) == ["7", "7"]
    assert ranks(2, made_by_rank_0, "layout", timeout=20) == ["LayoutError: layout: dp=3"] * 2


@pytest.mark.parametrize(("kind", "name"), [("zero", "ZeroDivisionError: by zero"), ("awkward", "AwkwardError: ")])
def test_no_error_of_rank_0_leaves_the_others_waiting(ranks: Ranks, kind: str, name: str) -> None:
    own, message = ranks(2, made_by_rank_0, kind, timeout=20)
    assert own.startswith(name)
    assert message.startswith(f"RankError: rank 0: it failed: {name}")
