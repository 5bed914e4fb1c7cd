"""Grids of tensor-parallel ranks by sizes: the words of a product, setups, estimates and the search."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright import config
from meshwright.catalog import load_cluster
from meshwright.catalog.models import make_model
from meshwright.cli.overrides import overridden
from meshwright.cli.plan import layout_of
from meshwright.cost.collective import Group, Network
from meshwright.cost.grid import linear_parts, linear_words
from meshwright.cost.kernels import Rates
from meshwright.cost.layer import layer_pass
from meshwright.cost.memory import estimate_memory
from meshwright.cost.setup import Setup
from meshwright.cost.step import KnownCosts, estimate_step
from meshwright.errors import FileFormatError, LayoutError
from meshwright.ir.call_text import sizes_of
from meshwright.ir.layout import Layout
from meshwright.planner.grids import products_of, promising_grids
from meshwright.planner.search import search
from meshwright.prediction import predict

MODEL = make_model("gpt", layers=4, hidden=1024, heads=16, vocabulary=8192, sequence=512)
CLUSTER = load_cluster("a100-80gb-dgx-hdr200x8", 32)


def words_rank_by_rank(rows: int, inputs: int, outputs: int, grid: tuple[int, int, int], dp: int) -> float:
    """The words that one rank receives, from the blocks of operands that its peers hold."""
    x, y, z = grid
    block = rows // (z * dp)
    parts = [inputs // x * outputs // y // z] * z  # the weight, in parts over tz
    gathers = 2 * sum(parts[1:])
    scatter = sum(parts[1:])
    ring = [2 * (size - 1) * (elements // size) for size, elements in (
        (x, block * outputs // y), (y, block * inputs // x), (dp, inputs // x * outputs // y // z)
    )]  # fmt: skip
    return gathers + scatter + sum(ring)


@pytest.mark.parametrize("grid", list(itertools.product((1, 2, 4), repeat=3)), ids=str)
def test_words_are_those_of_rings_over_the_blocks(grid: tuple[int, int, int]) -> None:
    for dp in (1, 2):
        assert linear_words(64, 128, 256, grid, dp).total == words_rank_by_rank(64, 128, 256, grid, dp)


def test_a_weight_that_is_kept_is_gathered_once() -> None:
    twice, once = (linear_words(64, 32, 32, (1, 2, 4), kept=kept).weight_gathers for kept in (False, True))
    assert (twice, once) == (2 * 3 / 4 * 32 * 32 / 2, 3 / 4 * 32 * 32 / 2)


def setup(**sizes: Any) -> Setup:
    return Setup(model=MODEL, global_batch=64, micro_batch=2, **sizes)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_grid_along_one_axis_is_tensor_parallelism(recompute: str) -> None:
    """Sums of input gradients overlap on a grid only, so they are at most as long."""
    line, grid = setup(dp=8, tp=4, recompute=recompute), setup(dp=8, tp=4, recompute=recompute, grid=(1, 4, 1))
    assert estimate_memory(grid, CLUSTER) == estimate_memory(line, CLUSTER)
    grid_estimate, line_estimate = estimate_step(grid, CLUSTER), estimate_step(line, CLUSTER)
    assert grid_estimate.compute_s == line_estimate.compute_s
    assert grid_estimate.tensor_comm_s < line_estimate.tensor_comm_s


@pytest.mark.parametrize("grid", [(2, 1, 1), (1, 4, 1), (2, 2, 1), (4, 2, 2)], ids=str)
def test_the_estimate_of_a_layer_sums_what_its_products_sum(
    grid: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, z = grid
    given = setup(dp=2 * z, tp=x * y, grid=grid)
    network, summed = Network(CLUSTER), []

    def collected(operation: str, num_bytes: float, group: Group, algorithm: str = "native") -> float:
        summed.append((operation, num_bytes, group))
        return 0.0

    monkeypatch.setattr(network, "collective_s", collected)
    layer_pass(given, Rates(CLUSTER.device, CLUSTER.software), network)
    expected = []
    for inputs, outputs, is_second in products_of(MODEL):
        sizes = (y, x, z) if is_second else grid
        parts = linear_parts(given.tokens * z * 2, inputs, outputs, sizes, 2)
        groups = [Group(x), Group(y, x)]
        for elements, group in zip((parts.output, parts.input), groups[::-1] if is_second else groups, strict=True):
            if group.size > 1:
                expected.append(("all_reduce", given.element_bytes * elements, group))
    norms = ("all_reduce", 8.0 * given.tokens, Group(x))  # the two sums of a norm
    assert Counter(each for each in summed if each != norms) == Counter(expected)


def test_each_axis_of_a_grid_divides_memory() -> None:
    """Features over tx and ty, state over tz; samples stay as they are."""
    line, square, deep = (
        estimate_memory(setup(dp=8, tp=4, recompute="full", grid=grid), CLUSTER)
        for grid in ((1, 4, 1), (2, 2, 1), (2, 2, 4))
    )
    assert square.optimizer_bytes == line.optimizer_bytes == 4 * deep.optimizer_bytes
    assert 2 * square.activations_bytes == line.activations_bytes


@pytest.mark.parametrize(
    ("sizes", "pattern"),
    [
        ({"tp": 4, "grid": (2, 4, 1)}, r"grid: grid=\[2, 4, 1\] with tp=4 and dp=1\n  -> tp is the product"),
        ({"dp": 2, "tp": 4, "grid": (2, 2, 4)}, r"grid=\[2, 2, 4\] with tp=4 and dp=2\n  -> .*the third divides dp"),
        ({"tp": 4, "grid": (2, 2)}, r"grid=\[2, 2\]\n  -> give three sizes"),
        ({"dp": 2, "tp": 2, "grid": (2, 1, 2), "zero": 1}, r"grid=\[2, 1, 2\] with zero\n  -> leave zero out"),
        ({"tp": 2, "grid": (2, 1, 1), "sequence_parallel": True}, r"with sequence_parallel\n  -> leave"),
        ({"tp": 2, "cp": 2, "grid": (2, 1, 1)}, r"grid=\[2, 1, 1\] with cp\n  -> leave cp out"),
        ({"tp": 3, "grid": (3, 1, 1)}, r"hidden = 1024 is not divisible by grid = 3"),
    ],
)  # fmt: skip
def test_setups_that_cannot_be_are_refused(sizes: dict[str, Any], pattern: str) -> None:
    with pytest.raises(LayoutError, match=pattern):
        setup(**sizes)


def test_a_prediction_takes_a_grid_as_a_layout_does() -> None:
    forecast = predict(MODEL, CLUSTER, devices=32, tp=(2, 2, 4), global_batch=64)
    assert (forecast.setup.dp, forecast.setup.tp, forecast.setup.grid) == (8, 4, (2, 2, 4))
    with pytest.raises(LayoutError, match="give three sizes of 1 or more"):
        predict(MODEL, CLUSTER, devices=32, tp=(2, 2), global_batch=64)


def test_a_search_knows_grids() -> None:
    only = search(MODEL, CLUSTER, global_batch=64, grids="only").options
    assert only
    assert all(option.setup.grid and option.setup.world_size == 32 for option in only)
    assert "tp=" + "x".join(map(str, only[0].setup.grid)) in only[0].text
    both, none = (search(MODEL, CLUSTER, global_batch=64, grids=grids) for grids in ("also", "none"))
    assert both.options[0].step_s <= none.options[0].step_s
    assert not any(option.setup.grid for option in none.options)


def test_the_best_grid_is_among_those_that_a_search_estimates() -> None:
    """The estimate of every grid, against that of the grids with the least communication."""
    kept = {
        (*grid.sizes, grid.dp) for grid in promising_grids(MODEL, CLUSTER, 64, KnownCosts(CLUSTER), "bf16", every=True)
    }
    best: tuple[float, Any] = (float("inf"), None)
    for x, y, z in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)):
        if x * y * z == 1 or 32 % (x * y * z):
            continue
        for micro_batch in (1, 2, 4, 8, 16, 32):
            if 64 % (micro_batch * (32 // (x * y))):
                continue
            step_setup = msgspec.structs.replace(
                setup(), dp=32 // (x * y), tp=x * y, grid=(x, y, z), micro_batch=micro_batch
            )
            best = min(best, (estimate_step(step_setup, CLUSTER).step_s, (x, y, z, 32 // (x * y * z))))
    assert best[1] in kept


# --- texts ------------------------------------------------------------------------------------------------------------


def test_run_files_and_options_take_grids() -> None:
    raw = {"model": {"name": "mlp"}, "data": {"kind": "random", "shape": [64]}}
    for tables in (
        {**raw, "layout": {"tp": [2, 1, 4]}},
        overridden(raw, ["--layout.tp", "2x1x4"]),
        overridden(raw, ["--layout.tp=[2, 1, 4]"]),
    ):
        assert config.make(tables, where="run.toml").layout.tp == (2, 1, 4)
    assert layout_of("dp=2,tp=2x1x4") == Layout(dp=2, tp=(2, 1, 4))
    with pytest.raises(FileFormatError, match=r"--layout.tp: '2x1'"):
        overridden(raw, ["--layout.tp", "2x1"])


def test_a_run_saves_its_grid(tmp_path: Path) -> None:
    raw = {"model": {"name": "mlp"}, "data": {"kind": "random", "shape": [64]}, "layout": {"dp": 2, "tp": [2, 1, 4]}}
    config.save(config.make(raw, where="run.toml"), tmp_path / "run.toml")
    assert config.load(tmp_path / "run.toml").layout.sizes().num_ranks == 16


@pytest.mark.parametrize(
    ("text", "sizes"), [("2x2x1", (2, 2, 1)), ("4x2", (4, 2)), ("4", ()), ("x2", ()), ("2x-1x1", ()), ("gpt", ())]
)
def test_sizes_in_a_text(text: str, sizes: tuple[int, ...]) -> None:
    assert sizes_of(text) == sizes
