"""Worked examples with models on two ranks: the filtered pixel and the losses are those of one rank."""

import pytest

from meshwright.api import worked_models
from meshwright.ir.layout import Layout
from tests.distributed.pool import Ranks


def test_the_filter_exchanges_rows(ranks: Ranks) -> None:
    assert ranks(2, worked_models._filtered, Layout(spatial=(2,))) == [(-3.0, "y@sy")] * 2


@pytest.mark.parametrize(("what", "split"), [("batch", "batch@dp"), ("class", "v@tp")])
def test_the_regression_is_split(ranks: Ranks, what: str, split: str) -> None:
    alone = worked_models._trained(Layout(), steps=3)
    result = ranks(2, worked_models._trained, worked_models.SPLITS[what], 3)[0]
    assert result.losses == pytest.approx(alone.losses, rel=1e-9)
    assert result.split == split
    assert result.losses[2] < result.losses[0]
