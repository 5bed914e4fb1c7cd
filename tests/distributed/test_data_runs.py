"""Runs over data larger than memory: losses of a run in one process; waits in trace, ledger, page and prediction."""

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import meshwright as mw
from meshwright import config
from meshwright.api import train
from meshwright.api.data import FeedRates, foretell_feed, foretold, store_of, with_waits
from meshwright.data.ahead import PrefetchLoader
from meshwright.emulation.disk import SlowStore, TokenBucket
from meshwright.errors import DataError
from meshwright.ir import files
from meshwright.ir.data_use import DataUse
from meshwright.ir.ledger import Ledger
from meshwright.ir.summary import summarize
from meshwright.ir.trace import Span, Trace
from meshwright.report import read_run, render_run
from tests.distributed.pool import Ranks
from tests.end_to_end.data_cases import Counted, image_folder


def run_of(folder: Path, images: Path, **changes: Any) -> Any:
    data = {
        "kind": "images", "path": str(images), "batch_size": 4, "held_out": 0.0, "memory_bytes": 10**6,
        "cache_directory": str(folder / "cache"), **changes,
    }  # fmt: skip
    return config.make(
        {
            "model": {
                "factory": "tests.distributed.test_data_runs:model",
                "loss": "tests.distributed.test_data_runs:loss",
            },
            "data": data,
            "optimizer": {"name": "sgd", "lr": 0.01},
            "train": {"steps": 6, "directory": str(folder / "run"), "checkpoint_every": 0},
        },
        where="test",
    )


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))


def loss(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def _losses(folder: Path, images: Path) -> list[float]:
    with contextlib.chdir(Path(__file__).parents[2]):  # the project's folder, which has the factory
        train(run_of(folder, images))
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["data_s"] >= 0 for row in rows)
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("data") / "images", per_class=8, side=8)


def test_two_ranks_train_as_one_and_the_page_tells_of_the_data(images: Path, tmp_path: Path, ranks: Ranks) -> None:
    alone = _losses(tmp_path / "alone", images)
    together = ranks(2, _losses, tmp_path / "two", images)
    assert together[0] == pytest.approx(alone, rel=1e-4)
    ledger = files.load(tmp_path / "two" / "run" / "ledger.json", Ledger)
    use = ledger.data
    assert use is not None
    assert use.num_ranks == 2
    assert sum(use.fetches.values()) == 6 * 4
    assert use.misses == use.predicted_misses == use.belady_misses == 16
    assert use.lru_misses is not None
    assert use.lru_misses >= 16
    assert use.fetches["memory or disk of another rank"] > 0
    assert use.predicted_waited_s is not None
    page = render_run(read_run(tmp_path / "two" / "run"))
    for text in ("<h2>Data</h2>", "memory or disk of another rank", "of the best cache (Belady)", "staged on a rank"):
        assert text in page
    assert "data fetched ahead" in ledger.table()
    trace = files.load(tmp_path / "two" / "run" / "trace.json", Trace)
    assert {span.rank for span in trace.spans if span.stream == "data"} == {0, 1}


def test_a_stopped_run_goes_on_in_the_middle_of_an_epoch(images: Path, tmp_path: Path) -> None:
    whole = _losses(tmp_path / "whole", images)
    short = run_of(tmp_path / "parts", images)
    train(with_train(short, steps=3))
    assert _losses(tmp_path / "parts", images) == whole


def with_train(run: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(run, train=msgspec.structs.replace(run.train, **changes))


def test_waits_for_data_are_a_part_of_a_step() -> None:
    step = Trace(source="simulated", spans=(Span(0, "compute", "F", 1.0, 3.0), Span(1, "compute", "F", 1.0, 3.0)))
    summary = summarize(with_waits(step, [0.5, 0.0]))
    assert [(times.step_s, times.compute_s, times.data_s, times.bubble_s) for times in summary] == [
        (2.5, 2.0, 0.5, 0.0), (2.5, 2.0, 0.0, 0.5),
    ]  # fmt: skip


def test_a_disk_slower_than_the_step_is_foretold_with_its_rates() -> None:
    store = Counted(40, size=1000)
    with PrefetchLoader(store, 4, 16_000, epochs=5) as loader:
        slow = foretold(loader, 1.0, 50, FeedRates(file_bytes_per_s=2000.0))
        fast = foretold(loader, 1.0, 50, FeedRates(file_bytes_per_s=5000.0))
    kept = loader.room.memory_bytes // 1000
    assert slow.misses == slow.belady_misses == 40 + 4 * (40 - kept) < slow.lru_misses
    assert slow.waits[5] == pytest.approx(1.0)  # a batch takes 2 s, a step 1 s
    assert max(fast.waits[1:]) == 0.0
    assert slow.needed_bytes_per_s == pytest.approx(slow.misses * 1000 / 50)
    use = DataUse(
        data="", num_ranks=1, num_steps=1, fetches={}, misses=0, waited_s=1.0, file_bytes_per_s=2e9,
        needed_bytes_per_s=4e9,
    )  # fmt: skip
    assert "need 3.73 GiB/s from the file system, which gives 1.86 GiB/s: more memory_bytes" in use.explanation


def test_a_disk_slower_than_the_step_is_told_before_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with PrefetchLoader(SlowStore(Counted(32, size=100), TokenBucket(1e5)), 4, 1200) as loader:
        forecast = foretell_feed(loader, 1e-3, 8)
    assert forecast is not None
    assert forecast.waits[-1] > 1e-3
    assert "the data are slower than the steps: a step of 1 ms will wait for" in caplog.text
    assert "more memory_bytes, a cache_directory or more ranks read less of it" in caplog.text


def test_a_throttled_store_gives_the_same_samples() -> None:
    store = Counted(8, size=100)
    with PrefetchLoader(SlowStore(store, TokenBucket(1e6)), 2, 10**5, epochs=1) as loader:
        assert sorted(number for batch in loader for number in batch.tolist()) == list(range(8))


def test_load_knows_kinds_of_data(images: Path, tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    with mw.load(images, 4, 10**6) as loader:
        assert next(iter(loader))["image"].shape == (4, 3, 8, 8)
    with mw.load(tmp_path / "tokens.bin", 4, 10**6, sequence_length=8) as loader:
        assert next(iter(loader))["tokens"].shape == (4, 8)
    with mw.load(TensorDataset(torch.arange(8)), 4, 10**6) as loader:
        assert len(next(iter(loader))[0]) == 4
    with pytest.raises(DataError, match="is one file, of which it is not known what a sample is"):
        store_of(tmp_path / "tokens.bin")
