"""Kept plans: an equal request is answered without a search; what is stale or damaged is searched for again."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright.api import plan_cache, plans
from meshwright.api.plan_cache import KeptPlan, SearchRequest
from meshwright.catalog import load_cluster
from meshwright.cli import run as cli
from meshwright.cost.optimizer import ADAMW, SGD
from meshwright.errors import LayoutError
from meshwright.ir import files
from meshwright.ir.graph import Graph
from meshwright.models import MLP, classification_loss
from meshwright.ops.base import OperatorRule, make_rule
from meshwright.planner.auto import plan_auto
from meshwright.planner.time_limit import TimeLimit, was_stopped

CLUSTER = load_cluster("cpu-local", 2, "meshwright")
FOUND: dict[bytes, mw.Plan] = {}
WORDS = ["plan", "mlp", "--ranks", "2", "--layout.plan", "auto", "--cluster", "cpu-local"]


def batch(samples: int = 8) -> dict[str, torch.Tensor]:
    return {"inputs": torch.zeros(samples, 6), "label": torch.zeros(samples, dtype=torch.int64)}


@cache
def mlp(samples: int = 8, dtype: torch.dtype = torch.float32) -> Graph:
    given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch(samples).items()}
    return mw.capture(MLP((6, 8, 4)).to(dtype), classification_loss, given)


def plan(**options: Any) -> mw.Plan:
    return mw.plan(mlp(), options.pop("cluster", CLUSTER), devices=2, **options)


def request_of(**changes: Any) -> SearchRequest:
    given = {"graph": mlp(), "cluster": CLUSTER, "devices": 2, "memory_bytes": None, "optimizer": ADAMW}
    return SearchRequest(**{**given, "clips": False, "only": "both", "offload": False, **changes})


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that were searched for. An equal search is made once for all tests, to save their time."""
    graphs: list[Graph] = []

    def counted(graph: Graph, devices: int, cluster: mw.Cluster, lowering: Any, **options: Any) -> mw.Plan:
        graphs.append(graph)
        key = msgspec.msgpack.encode((graph.fingerprint, devices, cluster, options["only"]))
        if key not in FOUND:
            FOUND[key] = plan_auto(graph, devices, cluster, lowering, **options)
        return FOUND[key]

    monkeypatch.setattr(plans, "plan_auto", counted)
    return graphs


def test_an_equal_request_is_answered_without_a_search(searches: list[Graph], caplog: pytest.LogCaptureFixture) -> None:
    first = plan()  # on a busy machine it takes so long that it tells how far it is
    with caplog.at_level(logging.INFO, "meshwright"):
        assert plan() == first
        assert len(searches) == 1
        path = request_of().file
        (message,) = caplog.messages
        today = time.strftime("%Y-%m-%d")
        assert message.startswith(f"the plan is from the cache: it was searched for at {today} ")
        assert message.endswith(
            f"; to search again: `meshwright plan --fresh`, mw.plan(..., fresh=True), or remove {path}"
        )
        plan(seconds=600.0)
        assert len(searches) == 1, "a finished search is an answer whatever the time limit"
        assert plan(fresh=True) == first
        path.unlink()
        plan()
    assert len(searches) == 3
    again = mw.capture(MLP((6, 8, 4)), classification_loss, batch())
    assert mw.plan(again, CLUSTER, devices=2) == first, "another capture of the same step"
    assert len(searches) == 3


def test_parallelize_takes_the_kept_plan(searches: list[Graph]) -> None:
    digests = {mw.parallelize(MLP((6, 8, 4)), classification_loss, batch()).plan.digest for _ in range(2)}
    assert len(digests) == len(searches) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": 1},
        {"memory_bytes": 1e9},
        {"optimizer": SGD},
        {"clips": True},
        {"only": "intra"},
        {"offload": True},
        {"cluster": mw.Cluster.load("cpu-local", 4)},
        {"cluster": mw.Cluster.load("h100-dgx", 2)},
        {"graph": mlp(16)},
        {"graph": mlp(8, torch.float64)},
        {"graph": msgspec.structs.replace(mlp(), precision="bfloat16")},
    ],
)
def test_another_request_has_another_file(changes: dict[str, Any]) -> None:
    assert request_of().file == request_of(memory_bytes=None).file
    assert request_of(**changes).file != request_of().file


def test_lines_of_source_do_not_count() -> None:
    moved = tuple(msgspec.structs.replace(operator, source="elsewhere.py:7") for operator in mlp().operators)
    assert request_of(graph=msgspec.structs.replace(mlp(), operators=moved)).file == request_of().file


# --- stale -----------------------------------------------------------------------------------------------------------


def test_other_numbers_of_the_cluster_make_it_stale(searches: list[Graph], caplog: pytest.LogCaptureFixture) -> None:
    plan()
    level = msgspec.structs.replace(CLUSTER.levels[0], alpha_s=CLUSTER.levels[0].alpha_s * 2)
    slower = msgspec.structs.replace(CLUSTER, levels=(level,))
    with caplog.at_level(logging.INFO, "meshwright"):
        plan(cluster=slower)
        assert re.fullmatch(
            r"\S+\.json is stale: the numbers of cluster cpu-local changed since \S+ \S+; the search starts anew",
            caplog.messages[0],
        )
        assert len(searches) == 2
        plan(cluster=slower)
    assert len(searches) == 2, "the new plan has replaced it"


def test_other_code_makes_it_stale(
    searches: list[Graph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan()
    monkeypatch.setattr(plan_cache, "code_digest", lambda: "of a later version")
    with caplog.at_level(logging.INFO, "meshwright"):
        plan()
    assert "is stale: Meshwright's code, or a package that it plans with, changed since" in caplog.text
    assert len(searches) == 2


def test_every_source_is_part_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = plan_cache.code_digest.__wrapped__
    assert digest() == plan_cache.code_digest()
    monkeypatch.setattr(mw, "__file__", str(tmp_path / "__init__.py"))
    digests = [digest()]
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("planner/b.py", "x = 2")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        digests.append(digest())
    assert len(set(digests)) == len(digests)


# --- damaged ---------------------------------------------------------------------------------------------------------


def edited(change: Callable[[dict[str, Any]], None], *, checked: bool = True) -> Callable[[bytes], bytes]:
    """A function that changes the JSON of a kept plan. If ``checked``, it also writes the checksum of the changed
    plan into the file, so that only other checks can find the change."""

    def apply(data: bytes) -> bytes:
        kept = json.loads(data)
        change(kept)
        if checked:
            text = files.encode_json(files.decode(json.dumps(kept["plan"]).encode(), mw.Plan, where="edited"))
            kept["checksum"] = hashlib.sha256(text).hexdigest()
        return json.dumps(kept).encode()

    return apply


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "not valid JSON"),
        (lambda data: data[: len(data) // 2], "not valid JSON"),
        (lambda data: bytes(255 - byte for byte in data), "not valid JSON"),
        (lambda data: b"[" * 200_000, "cannot be used"),
        (lambda data: b"[1]", "Expected `object`"),
        (edited(lambda kept: kept.update(version=99), checked=False), "version is 99"),
        (edited(lambda kept: kept["plan"].update(version=1), checked=False), "cannot be used"),
        (edited(lambda kept: kept.pop("plan"), checked=False), "missing required field `plan`"),
        (edited(lambda kept: kept.update(more=1), checked=False), "unknown field `more`"),
        (edited(lambda kept: kept["plan"].update(notes=[]), checked=False), "the plan is not the one that was kept"),
        (edited(lambda kept: kept["plan"].update(graph_fingerprint="0" * 16)), "the plan was made for MLP"),
        (edited(lambda kept: kept["plan"]["prediction"].update(step_s=1e-9)), "its costs differ from the search"),
        (edited(lambda kept: kept["plan"].update(prediction=None)), "it is a plan for 2 ranks"),
        (edited(lambda kept: kept["plan"]["stages"][0].update(strategies={"*": {"dp": "nothing"}})), "cannot be used"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_never_trusted(
    damage: Callable[[bytes], bytes], reason: str, searches: list[Graph], caplog: pytest.LogCaptureFixture
) -> None:
    expected, path = plan(only="intra"), request_of(only="intra").file
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert plan(only="intra") == expected
    assert len(searches) == 2
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert message.startswith(f"{path} cannot be used: ")
    assert reason in message
    assert message.endswith("; the search starts anew")
    assert files.load(path, KeptPlan).plan == expected, "the search has replaced it"


# --- what is not kept ------------------------------------------------------------------------------------------------


def test_the_plan_of_a_stopped_search_is_not_kept() -> None:
    lines: list[str] = []
    planned = mw.plan(
        mlp(), CLUSTER, devices=2, progress=lines.append, stop=lambda: any("; best so far: " in text for text in lines)
    )
    assert was_stopped(planned)
    assert re.search(r"\(planner\) +stopped after [\d.]+ s +[1-9]\d* of \d+ layouts were considered", planned.explain())
    assert not request_of().file.exists()
    assert not was_stopped(plan())
    assert request_of().file.exists()


def test_plans_by_rules_of_ones_own_are_not_kept() -> None:
    rule = OperatorRule(lambda call: make_rule(call, "b -> b"))
    plan(rules={torch.ops.aten.sin.default: rule})
    assert not request_of().file.exists()


def test_a_folder_that_cannot_be_written_is_told(searches: list[Graph], caplog: pytest.LogCaptureFixture) -> None:
    folder = request_of().file.parent
    folder.parent.mkdir(parents=True)
    folder.write_text("a file is in its place")
    assert plan().mesh.world_size == 2
    assert "the plan is not kept for the next time: " in caplog.text


def test_bad_numbers_are_refused_although_a_plan_is_kept(searches: list[Graph]) -> None:
    plan()
    for name, value in (("seconds", 0), ("memory_bytes", -1), ("memory_bytes", 0)):
        with pytest.raises(LayoutError, match=f"{name}: {value!r} is"):
            plan(**{name: value})
    for devices in (0, -3):
        with pytest.raises(LayoutError, match=f"devices: {devices} is not above 0"):
            mw.plan(mlp(), CLUSTER, devices=devices)


# --- many plans, and many processes ----------------------------------------------------------------------------------


def test_the_oldest_plans_are_removed(searches: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST_PLANS", 3)
    planned = plan()
    requests = [request_of(memory_bytes=float(size)) for size in range(10**9, 10**9 + 5)]
    for request in requests:
        plan_cache.keep(request, planned)
        time.sleep(0.01)
    assert [request.file.exists() for request in requests] == [False, False, True, True, True]
    assert not request_of().file.exists()


def test_a_reader_never_sees_half_a_plan(searches: list[Graph], caplog: pytest.LogCaptureFixture) -> None:
    expected, request = plan(), request_of()
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            plan_cache.keep(msgspec_copy(request), expected)

    def msgspec_copy(given: SearchRequest) -> SearchRequest:
        return SearchRequest(**{name: getattr(given, name) for name in SearchRequest.__dataclass_fields__})

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(20):
            assert plan_cache.find(request) == expected
    finally:
        done.set()
        for writer in writers:
            writer.join()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [path.suffix for path in request.file.parent.iterdir()] == [".json"], "no temporary file is left"


# --- at the command line ---------------------------------------------------------------------------------------------


def test_plan_says_that_it_comes_from_the_cache(searches: list[Graph], capsys: pytest.CaptureFixture[str]) -> None:
    texts: list[str] = []
    for more, count in ([], 1), ([], 1), (["--fresh"], 2), (["--json"], 2):
        assert cli([*WORDS, *more]) == 0
        out, err = capsys.readouterr()
        assert len(searches) == count
        assert ("the plan is from the cache: " in err) == (more != ["--fresh"] and bool(texts))
        texts.append(out)
    assert texts[0] == texts[1] == texts[2]
    assert files.decode(texts[3].encode(), mw.Plan, where="output").explain() in texts[0]


def test_a_clock_says_why_a_search_has_ended() -> None:
    assert TimeLimit(7.0).spent == "7 s"
    assert re.fullmatch(r"[\d.e-]+ s", TimeLimit(7.0, stop=lambda: True).spent)
    assert not TimeLimit().over
    assert TimeLimit(stop=lambda: True).over
