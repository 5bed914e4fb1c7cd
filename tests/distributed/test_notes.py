"""Values between ranks: what is sent arrives, and nothing that arrives becomes code."""

from __future__ import annotations

import dataclasses
import math
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from meshwright.comm.board import Board
from meshwright.comm.groups import from_every_rank, from_rank_0
from meshwright.comm.notes import DICT, ERROR, MEMBER, NAMED, RECORD, STRUCT, TENSOR, TORCH, from_bytes, to_bytes
from meshwright.comm.transport.base import Trouble
from meshwright.errors import DiskError, MeshwrightError, RankError
from meshwright.ir.layout import Layout
from meshwright.ir.trace import Span, Trace
from meshwright.runtime.chunk_index import IndexedTensor, SavedChunk
from meshwright.runtime.manifest import DamagedCheckpointError, SavedFile
from meshwright.runtime.saving import SaveReport
from tests.distributed.pool import Ranks

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text(), st.integers()), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_with_their_types(value: object) -> None:
    decoded = from_bytes(to_bytes(value))
    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.uint16]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 2)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape).to(dtype)
    decoded = from_bytes(to_bytes(value))
    assert decoded.dtype == dtype
    assert decoded.shape == value.shape
    assert torch.equal(decoded.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
    turned = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(from_bytes(to_bytes(turned)), turned)


def test_structs_errors_and_reports_of_saves_come_back() -> None:
    chunk = SavedChunk((0, 2), (3, 4), "0.chunks", 0, 120)
    values: list[Any] = [
        Layout(dp=2, tp=(2, 1, 2)),
        SaveReport("a", "b", {"w": IndexedTensor((3, 9), "bfloat16", (chunk,))}, {"a": SavedFile(num_bytes=1)}, b"c"),
        Trouble("rank 1", "it has ended"), torch.float16, torch.strided, Path("a/b"), 2**70, 1j,
        {Trouble("a", "b"): (1, [2])}, "a\udce9b", np.float64(2.5), bytearray(b"x"),
    ]  # fmt: skip
    assert from_bytes(to_bytes(values)) == values
    assert np.array_equal(from_bytes(to_bytes(np.arange(6).reshape(2, 3))), np.arange(6).reshape(2, 3))
    trace = Trace(source="simulated", spans=(Span(0, "compute", "mm", 0.0, 1.0),))
    assert from_bytes(to_bytes(trace)) == trace
    for error in (DamagedCheckpointError("is damaged", where="x", remedy="y"), DiskError("full"), _OwnError("mine")):
        decoded = from_bytes(to_bytes(error))
        assert str(decoded) == str(error)
        assert isinstance(error, type(decoded))


class _OwnError(MeshwrightError):
    """An error of a user's own; others get it as its nearest class of ours."""


class Marked:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


@dataclasses.dataclass
class Foreign:
    """Plain data of a program that is not ours."""

    path: str = ""

    def __post_init__(self) -> None:
        Path(self.path).touch()


class Pair(NamedTuple):
    """A named tuple of a program: making one runs no code."""

    first: int
    second: int


def test_named_tuples_of_programs_come_back_and_other_classes_are_refused() -> None:
    assert from_bytes(to_bytes(Pair(1, 2))) == Pair(1, 2)
    for value in (object(), lambda: 0, Marked("x"), torch.nn.Linear(1, 1)):
        with pytest.raises(RankError, match=r"cannot be sent to other ranks\n  -> send numbers, texts, tensors, lists"):
            to_bytes(value)


@pytest.mark.parametrize(
    "content",
    [
        [STRUCT, "subprocess:Popen", b""], [RECORD, "subprocess:Popen", "true"], [RECORD, "os:system", "true"],
        [RECORD, "builtins:eval", "1"], [RECORD, "meshwright.runtime.ranks:run_ranks"],
        [RECORD, "meshwright.cli.__main__:main"], [RECORD, "meshwright.runtime.saving:Path", "x"],
        [RECORD, "meshwright.errors:MeshwrightError", "x"], [RECORD, "meshwright.none:Thing"],
        [RECORD, "torch.distributed.checkpoint.filesystem:FileSystemWriter", "x"],
        [STRUCT, "meshwright.ir.layout:Layout", b"\x93\x01"], [STRUCT, "meshwright.ir.layout:Layout", "text"],
        [NAMED, "os:terminal_size", 1, 2], [NAMED, "meshwright.comm.transport.base:Trouble", 1],
        [ERROR, "subprocess:CalledProcessError", "a", "b", "c"], [ERROR, "meshwright.errors:DataError", 1, "b", "c"],
        [MEMBER, "signal:Signals", "SIGKILL"], [TORCH, "torch.load"], [TORCH, "os.system"],
        [TENSOR, "torch.float32", [2**40], b""], [TENSOR, "torch.float32", [-1], b""],
        [TENSOR, "torch.int8", [2], b"a"],
        [DICT, "key"], [99], [], {"a": 1}, [DICT, [DICT], 1], msgspec.msgpack.Ext(1, b"a"),
    ],
)  # fmt: skip
def test_what_is_not_plain_data_of_ours_is_refused(content: object) -> None:
    with pytest.raises(RankError, match="what another rank sent cannot be read"):
        from_bytes(msgspec.msgpack.encode(content))


def test_a_class_that_runs_code_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "made"
    name = f"{Foreign.__module__}:{Foreign.__qualname__}"
    with pytest.raises(RankError, match="is not plain data of Meshwright"):
        from_bytes(msgspec.msgpack.encode([RECORD, name, str(path)]))
    assert not path.exists()


@given(st.binary(max_size=200))
def test_random_bytes_are_values_or_refused(data: bytes) -> None:
    with suppress(RankError):
        from_bytes(data)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(RankError, match="what another rank sent cannot be read"):
        from_bytes(pickle.dumps(Marked(str(path))))
    assert not path.exists()
    pickle.loads(pickle.dumps(Marked(str(path))))
    assert path.exists(), "the pickle would have run code"


# --- on two ranks ----------------------------------------------------------------------------------------------------


def exchanged(directory: str) -> list[Any]:
    rank, path = dist.get_rank(), Path(directory) / "run"
    results: list[Any] = [from_every_rank({"rank": rank, "value": torch.full((rank, 3), float(rank))})]
    results.append(from_rank_0(lambda: (Layout(dp=2), {1: [rank]})))
    try:
        from_rank_0(lambda: object())
    except Exception as error:  # noqa: BLE001 - rank 0 raises another than the others
        results.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    board = Board()
    if rank == 0:  # as somebody who reaches the store
        data = pickle.dumps(Marked(str(path)))
        board._store.set("board/key/0", data)
        board._store.set("board/key", "1")
    try:
        board.read("key", 0)
    except RankError as error:
        results.append(error.problem.partition(":")[0])
    dist.barrier()
    if rank == 0:
        board.remove("key")
    return [*results, path.exists()]


def test_ranks_exchange_values_and_a_pickle_in_the_store_is_not_run(ranks: Ranks, tmp_path: Path) -> None:
    for values, layout, refused, note, ran in ranks(2, exchanged, str(tmp_path)):
        assert [value["rank"] for value in values] == [0, 1]
        assert torch.equal(values[1]["value"], torch.ones(1, 3))
        assert layout == (Layout(dp=2), {1: [0]})
        assert "a builtins.object cannot be sent to other ranks" in refused
        assert (note, ran) == ("what another rank sent cannot be read", False)
