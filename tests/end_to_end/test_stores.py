"""Stores of samples on disk: what they read, and how damaged, truncated and vanished files are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from meshwright.data.ahead import PrefetchLoader
from meshwright.data.encoded import Samples, decode, encode
from meshwright.data.loaders import TextLoader
from meshwright.data.shards import Shards
from meshwright.data.stored import StoreLoader
from meshwright.data.stores import Images, PartOfStore, Tokens
from meshwright.errors import DataError
from tests.end_to_end.data_cases import image_folder, npy, shard

MANY = 10**7


def every(store: Any) -> list[Any]:
    return [store.decode(index, store.read(index)) for index in range(len(store))]


# ------------------------------------------------------------------------------------------------------------- images


def test_images_lie_in_the_folders_of_their_classes(tmp_path: Path) -> None:
    from PIL import Image

    store = Images(image_folder(tmp_path / "images"))
    samples = every(store)
    assert store.classes == ["cat", "dog"]
    assert [sample["label"] for sample in samples] == [0] * 4 + [1] * 4
    for index, sample in enumerate(samples):
        with Image.open(store.name(index)) as image:
            assert np.array_equal((sample["image"] * 255).round().byte().permute(1, 2, 0).numpy(), np.array(image))
    with PrefetchLoader(store, 8, MANY, shuffle=False, threads=2, epochs=1) as loader:
        batch = next(iter(loader))
    assert batch["image"].shape == (8, 3, 6, 6)
    assert batch["label"].tolist() == [0] * 4 + [1] * 4


def test_bad_images_are_named_and_skipped(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "images")
    store = Images(folder)
    (folder / "cat" / "0.png").unlink()
    (folder / "dog" / "1.png").write_bytes((folder / "dog" / "1.png").read_bytes()[:40])
    whole = (folder / "dog" / "2.png").read_bytes()
    (folder / "dog" / "2.png").write_bytes(bytes(len(whole)))
    for index, problem in (
        (0, "has vanished"),
        (5, "has 40 bytes, but had"),
        (6, "cannot be decoded: it is no image"),
    ):
        with pytest.raises(DataError, match=problem) as error:
            store.decode(index, store.read(index))
        assert error.value.where == store.name(index)
        assert "skip_bad" in error.value.remedy
    with PrefetchLoader(store, 4, MANY, skip_bad=True, epochs=1, threads=2) as loader:
        assert sum(len(batch["label"]) for batch in loader) == 8
        assert loader.num_bad == 3
        assert sorted(loader.bad) == sorted(store.name(index) for index in (0, 5, 6))


def test_images_of_unequal_sizes_name_the_batch(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "images", per_class=1, side=6)
    image_folder(tmp_path / "others", per_class=1, side=5)
    (tmp_path / "others" / "dog" / "0.png").rename(folder / "dog" / "0.png")
    with pytest.raises(DataError, match="do not stack: stack expects each tensor to be equal size") as error:
        next(iter(StoreLoader(Images(folder), 2, shuffle=False)))
    assert "decode=" in error.value.remedy


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: Images(path / "none"), "cannot be listed: No such file"),
        (lambda path: Images(path), "there are no files with suffix .jpg"),
        (lambda path: Tokens(path / "none.bin", 4), "cannot be read: No such file"),
        (lambda path: Shards(path / "none.tar"), "cannot be read: No such file"),
        (lambda path: Shards(str(path / "*.tar")), "no file matches"),
        (lambda path: Samples(iter([])), "is no map-style dataset"),
    ],
)
def test_data_that_are_not_there_are_refused(tmp_path: Path, make: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        make(tmp_path)


# ------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_windows_of_tokens_equal_those_of_text_in_memory(tmp_path: Path, suffix: str) -> None:
    content = np.random.default_rng(0).integers(0, 256, 100, dtype=np.uint16)
    path = tmp_path / f"tokens{suffix}"
    path.write_bytes(npy(content) if suffix == ".npy" else content.tobytes())
    ours = StoreLoader(Tokens(path, 7), 3, seed=2, epochs=2)
    theirs = TextLoader(bytes(content.astype(np.uint8)), 7, 3, seed=2, epochs=2)
    for batch, other in zip(ours, theirs, strict=True):
        assert torch.equal(batch["tokens"], other["tokens"])
        assert torch.equal(batch["targets"], other["targets"])
        assert batch["tokens"].dtype == torch.int64


def test_damaged_files_of_tokens_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(101))
    with pytest.raises(DataError, match="is truncated: 50 tokens and 1 bytes are there"):
        Tokens(path, 4)
    path.write_bytes(bytes(8))
    with pytest.raises(DataError, match="has 4 tokens, but a window of 4 needs 5"):
        Tokens(path, 4)
    (tmp_path / "floats.npy").write_bytes(npy(np.zeros(50)))
    with pytest.raises(DataError, match="holds float64, not integers"):
        Tokens(tmp_path / "floats.npy", 4)
    (tmp_path / "cut.npy").write_bytes(npy(np.zeros(50, np.int32))[:-40])
    with pytest.raises(DataError, match="is truncated: 50 tokens are announced, 40 tokens"):
        Tokens(tmp_path / "cut.npy", 4)
    path.write_bytes(bytes(200))
    store = Tokens(path, 4)
    path.write_bytes(bytes(100))
    with pytest.raises(DataError, match="is truncated: 4 of 10 bytes from byte 96 on"):
        every(store)


# ------------------------------------------------------------------------------------------------------------- shards


def some_shard(path: Path, first: int, count: int) -> Path:
    samples = {
        f"data/{number:03d}": {"npy": npy(np.full((2, 2), number)), "cls": str(number % 3).encode()}
        for number in range(first, first + count)
    }
    return shard(path, samples)


def test_samples_of_shards_are_read_alone(tmp_path: Path) -> None:
    some_shard(tmp_path / "a.tar", 0, 3)
    some_shard(tmp_path / "b.tar", 3, 2)
    store = Shards(str(tmp_path / "*.tar"))
    samples = every(store)
    assert [int(sample["npy"][0, 0]) for sample in samples] == list(range(5))
    assert [sample["cls"] for sample in samples] == [0, 1, 2, 0, 1]
    assert store.name(3) == f"{tmp_path / 'b.tar'}: data/003"
    batch = next(iter(StoreLoader(store, 5, shuffle=False)))
    assert batch["npy"].shape == (5, 2, 2)
    assert batch["cls"].tolist() == [0, 1, 2, 0, 1]
    part = PartOfStore(store, np.array([4, 0]))
    assert [int(sample["npy"][0, 0]) for sample in every(part)] == [4, 0]
    assert part.sizes.tolist() == store.sizes[[4, 0]].tolist()


def test_truncated_shards_are_named_or_used_as_far_as_they_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = some_shard(tmp_path / "a.tar", 0, 4)
    whole = path.read_bytes()
    path.write_bytes(whole[:3000])
    with pytest.raises(DataError, match=r"a\.tar: is truncated, or no tar file") as error:
        Shards(path)
    assert "skip_bad" in error.value.remedy
    store = Shards(path, skip_bad=True)
    assert store.truncated == [str(path)]
    assert f"{path} is truncated, or no tar file" in caplog.text
    assert f"its first {len(store)} samples are used" in caplog.text
    with PrefetchLoader(PartOfStore(store, np.arange(len(store))), 1, MANY, skip_bad=True) as loader:
        assert (loader.num_bad, loader.bad) == (1, [f"{path} (truncated)"])
    assert [int(sample["npy"][0, 0]) for sample in every(store)] == list(range(len(store)))
    path.write_bytes(whole)
    store = Shards(path)
    path.write_bytes(whole[:3000])
    with pytest.raises(DataError, match=r"a.tar: data/003: is truncated: 0 of"):
        store.read(3)
    path.unlink()
    with pytest.raises(DataError, match=r"a.tar: data/000: has vanished"):
        store.read(0)
    with pytest.raises(DataError, match="nothing decodes files of suffix 'xyz'"):
        Shards(shard(tmp_path / "b.tar", {"0": {"xyz": b""}}))


# ----------------------------------------------------------------------------------------------------------- datasets


def test_samples_of_datasets_survive_as_bytes() -> None:
    sample: dict[str, Any] = {
        "image": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "array": np.arange(4, dtype=np.int16).reshape(2, 2),
        "pair": (1, [2.5, None]), "label": np.int64(3), "name": "cat", "raw": b"\x00\xff", "flag": True,
    }  # fmt: skip
    decoded = decode(encode(sample, "sample"))
    assert torch.equal(decoded["image"], sample["image"])
    assert torch.equal(decoded["half"], sample["half"])
    assert decoded["empty"].shape == (0, 3)
    assert np.array_equal(decoded["array"], np.arange(4).reshape(2, 2))
    assert decoded["array"].dtype == np.int16
    assert {name: decoded[name] for name in ("pair", "label", "name", "raw", "flag")} == {
        "pair": (1, [2.5, None]), "label": 3, "name": "cat", "raw": b"\x00\xff", "flag": True,
    }  # fmt: skip


def test_datasets_that_fail_or_return_other_things_are_named() -> None:
    class Odd(Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return dict[str, int]()["missing"] if index else object()

    with pytest.raises(DataError, match="Odd: sample 0: holds a object, which cannot be kept"):
        Samples(Odd()).read(0)
    with pytest.raises(DataError, match="Odd: sample 1: cannot be read: KeyError: 'missing'"):
        Samples(Odd()).read(1)


def test_a_dataset_whose_first_sample_is_bad_is_used_without_it() -> None:
    class Holes(Dataset[Any]):
        def __init__(self, good: range) -> None:
            self.good = good

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if index not in self.good:
                raise OSError("hole")
            return torch.tensor(index)

    with PrefetchLoader(Samples(Holes(range(2, 8))), 8, MANY, epochs=1, skip_bad=True, shuffle=False) as loader:
        assert [batch.tolist() for batch in loader] == [[2, 2, 2, 3, 4, 5, 6, 7]]
        assert loader.num_bad == 2
        assert "8 samples of Holes" in loader.state_dict()["fingerprint"]
    for ask in (Samples.describe, lambda store: store.sizes):
        with pytest.raises(DataError, match="Holes: sample 0: cannot be read: OSError: hole"):
            ask(Samples(Holes(range(0))))


def test_batches_of_a_dataset_are_those_of_a_data_loader() -> None:
    data = TensorDataset(torch.arange(24).reshape(12, 2), torch.arange(12.0))
    theirs: Any = torch.utils.data.DataLoader(data, 4)
    with PrefetchLoader(Samples(data), 4, MANY, shuffle=False, epochs=1, threads=2) as ours:
        for batch, other in zip(iter(ours), theirs, strict=True):
            ours_: list[Any] = list(batch)
            theirs_: list[Any] = list(other)
            assert type(batch) is type(other)
            assert all(torch.equal(a, b) for a, b in zip(ours_, theirs_, strict=True))
