"""Loaders: one global order for every shard layout, each sample once an epoch, resumed where they stopped."""

import random
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.loaders import Loader, TensorLoader, TextLoader
from meshwright.errors import DataError
from tests.tries import tries

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**63)
few_examples = tries(15)


def rows(count: int) -> dict[str, torch.Tensor]:
    return {"inputs": torch.arange(count * 3, dtype=torch.float32).view(count, 3), "label": torch.arange(count)}


def labels(loader: Loader, batches: int | None = None) -> list[list[int]]:
    return [batch["label"].tolist() for batch in islice(loader, batches)]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


# ------------------------------------------------------------------------------------------------------------- order


@given(samples=sizes, batch_size=sizes, seed=seeds)
@few_examples
def test_every_sample_comes_exactly_once_per_epoch(samples: int, batch_size: int, seed: int) -> None:
    loader = TensorLoader(rows(samples), batch_size, seed, epochs=1)
    for _ in range(2):
        batches = labels(loader)
        assert sorted(flat(batches)) == list(range(samples))
        assert len(batches) == len(loader)
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert len(batches[-1]) == (samples % batch_size or min(batch_size, samples))


@given(samples=sizes, batch_size=sizes)
@few_examples
def test_drop_last_gives_whole_batches_only(samples: int, batch_size: int) -> None:
    if samples < batch_size:
        with pytest.raises(DataError, match=f"{samples} samples, but a batch has {batch_size}"):
            TensorLoader(rows(samples), batch_size, drop_last=True)
        return
    loader = TensorLoader(rows(samples), batch_size, drop_last=True, epochs=1)
    batches = labels(loader)
    assert len(batches) == len(loader) == samples // batch_size
    assert {len(batch) for batch in batches} == {batch_size}


def test_an_epoch_has_its_own_order_and_a_seed_too() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        loader = TensorLoader(rows(50), 50, seed, epochs=1)
        loader.rewind(epoch)
        return labels(loader)

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(first != second for place, first in enumerate(orders) for second in orders[:place])
    assert order(1, 2) == order(1, 2)


def test_without_shuffle_the_order_is_that_of_the_data() -> None:
    assert labels(TensorLoader(rows(5), 2, shuffle=False, epochs=2)) == [[0, 1], [2, 3], [4]] * 2


def test_batches_keep_names_types_and_rows_together() -> None:
    (batch,) = TensorLoader(rows(7), 7, epochs=1)
    assert batch["inputs"].dtype == torch.float32
    assert batch["inputs"].shape == (7, 3)
    assert torch.equal(batch["inputs"][:, 0], 3.0 * batch["label"])


# ------------------------------------------------------------------------------------------------------------ shards


@given(count=st.integers(1, 5), parts=st.integers(1, 6), seed=seeds, data=st.data())
@few_examples
def test_the_shards_side_by_side_are_the_global_batch(count: int, parts: int, seed: int, data: st.DataObject) -> None:
    batch_size = count * parts
    samples = batch_size * data.draw(st.integers(1, 3)) + count * data.draw(st.integers(0, parts - 1))
    whole = TensorLoader(rows(samples), batch_size, seed, epochs=2)
    shards = [TensorLoader(rows(samples), batch_size, seed, shard=(index, count), epochs=2) for index in range(count)]
    for batch, *pieces in zip(whole, *shards, strict=True):
        for name in batch:
            joined = torch.cat([piece[name] for piece in pieces])
            assert torch.equal(joined, batch[name])
            assert all(torch.equal(a[name], b) for a, b in zip(pieces, batch[name].chunk(count), strict=True))


def test_text_shards_side_by_side_are_the_global_batch() -> None:
    text = bytes(random.Random(0).randbytes(300))
    whole = TextLoader(text, 7, 6, seed=3, epochs=1)
    shards = [TextLoader(text, 7, 6, seed=3, shard=(index, 3), epochs=1) for index in range(3)]
    for batch, *pieces in zip(whole, *shards, strict=True):
        assert all(torch.equal(torch.cat([piece[name] for piece in pieces]), batch[name]) for name in batch)


def test_a_batch_that_the_shards_do_not_divide_is_refused() -> None:
    with pytest.raises(DataError, match="a batch of 6 samples does not divide into 4 shards") as error:
        TensorLoader(rows(12), 6, shard=(0, 4))
    assert "a multiple of 4" in str(error.value)


def test_a_last_batch_that_the_shards_do_not_divide_is_refused_before_the_first() -> None:
    with pytest.raises(DataError, match="a batch of 2 samples does not divide into 4 shards") as error:
        TensorLoader(rows(10), 4, shard=(0, 4))
    assert "the last batch of 10 samples in batches of 4" in str(error.value)
    assert "drop_last=True" in str(error.value)
    assert len(TensorLoader(rows(10), 4, shard=(0, 4), drop_last=True)) == 2


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_that_does_not_exist_is_refused(shard: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="shard is"):
        TensorLoader(rows(4), 2, shard=shard)


# ------------------------------------------------------------------------------------------------------------ resume


@given(samples=sizes, batch_size=sizes, seed=seeds, shuffle=st.booleans(), drop_last=st.booleans(), data=st.data())
@few_examples
def test_resuming_anywhere_equals_going_on(
    samples: int, batch_size: int, seed: int, shuffle: bool, drop_last: bool, data: st.DataObject
) -> None:
    batch_size = min(batch_size, samples)

    def loader(epochs: int | None) -> TensorLoader:
        return TensorLoader(rows(samples), batch_size, seed, shuffle, drop_last=drop_last, epochs=epochs)

    whole = labels(loader(2))
    stop = data.draw(st.integers(0, len(whole)))
    first = loader(None)
    head = labels(first, stop)
    second = loader(2)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert head + labels(second) == whole


def test_another_number_of_shards_takes_over() -> None:
    whole = labels(TensorLoader(rows(24), 4, epochs=1))
    first = TensorLoader(rows(24), 4, shard=(1, 2), epochs=1)
    head = labels(first, 2)
    rest = []
    for index in range(4):
        loader = TensorLoader(rows(24), 4, shard=(index, 4), epochs=1)
        loader.load_state_dict(first.state_dict())
        rest.append(labels(loader))
    assert head == [batch[2:] for batch in whole[:2]]
    assert [flat(pieces) for pieces in zip(*rest, strict=True)] == whole[2:]


def test_another_batch_size_takes_over() -> None:
    whole = flat(labels(TensorLoader(rows(20), 4, epochs=1)))
    first = TensorLoader(rows(20), 4)
    head = labels(first, 2)
    second = TensorLoader(rows(20), 5, epochs=1)
    second.load_state_dict(first.state_dict())
    assert flat(head + labels(second)) == whole


@pytest.mark.parametrize("inside_the_loop", [True, False])
def test_a_finished_run_has_nothing_left_when_it_is_resumed(inside_the_loop: bool) -> None:
    first = TensorLoader(rows(6), 2, epochs=2)
    if inside_the_loop:
        states = [first.state_dict() for _ in first]
    else:
        labels(first)
        states = [first.state_dict()]
    second = TensorLoader(rows(6), 2, epochs=2)
    second.load_state_dict(states[-1])
    assert labels(second) == []
    assert len(labels(second)) == 6  # a new loop is two new epochs


def test_a_loop_left_early_goes_on_and_rewind_starts_again() -> None:
    loader = TensorLoader(rows(6), 2, epochs=1)
    whole = labels(loader)
    loader.rewind()
    assert labels(loader, 2) + labels(loader) == whole
    loader.rewind()
    assert labels(loader, 3) == whole
    assert len(labels(loader)) == 3  # all of the first epoch was handed out: this is the second
    assert loader.epoch == 1


def test_a_position_in_other_data_is_refused_and_changes_nothing() -> None:
    first = TensorLoader(rows(6), 2)
    labels(first, 4)
    other = rows(6)
    other["inputs"][5, 2] += 1
    second = TensorLoader(other, 2)
    labels(second, 1)
    before = second.state_dict()
    with pytest.raises(DataError, match="the saved position is of other data: inputs float32") as error:
        second.load_state_dict(first.state_dict())
    assert "give the data that the saved run had" in str(error.value)
    assert second.state_dict() == before


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"seed": 5}, "of other seed: 5, but here 0"),
        ({"shuffle": False}, "of other shuffle: False, but here True"),
        ({"position": 7}, "epoch 0, sample 7 of 6"),
        ({"epoch": -1}, "epoch -1, sample 0 of 6"),
    ],
)
def test_a_position_in_another_order_is_refused(change: dict[str, int], problem: str) -> None:
    loader = TensorLoader(rows(6), 2)
    with pytest.raises(DataError, match=problem):
        loader.load_state_dict(loader.state_dict() | change)


def test_an_incomplete_position_is_refused() -> None:
    with pytest.raises(DataError, match="has no position, seed, shuffle, fingerprint"):
        TensorLoader(rows(6), 2).load_state_dict({"epoch": 0})


def test_text_cut_into_other_windows_is_other_data() -> None:
    state = TextLoader(bytes(100), 4, 2).state_dict()
    with pytest.raises(DataError, match=r"100 tokens in windows of 4.*, but here 100 tokens in windows of 5"):
        TextLoader(bytes(100), 5, 2).load_state_dict(state)


# -------------------------------------------------------------------------------------------------------------- text


@given(text=st.binary(min_size=2, max_size=60), sequence_length=st.integers(1, 9), batch_size=st.integers(1, 5))
@few_examples
def test_every_token_is_a_target_once_per_epoch(text: bytes, sequence_length: int, batch_size: int) -> None:
    if len(text) <= sequence_length:
        with pytest.raises(DataError, match="too short"):
            TextLoader(text, sequence_length, batch_size)
        return
    loader = TextLoader(text, sequence_length, batch_size, shuffle=False, drop_last=False, epochs=1)
    batches = list(loader)
    tokens, targets = (torch.cat([batch[name] for batch in batches]) for name in ("tokens", "targets"))
    whole = (len(text) - 1) // sequence_length * sequence_length
    assert bytes(tokens.flatten().tolist()) == text[:whole]
    assert bytes(targets.flatten().tolist()) == text[1 : whole + 1]
    assert tokens.shape == targets.shape == (whole // sequence_length, sequence_length)
    assert tokens.dtype == targets.dtype == torch.int64
    assert all(batch["targets"].is_contiguous() for batch in batches)


def test_files_are_joined_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "b.txt").write_bytes(b"defg")
    loader = TextLoader([tmp_path / "b.txt", str(tmp_path / "a.txt")], 6, 1)
    (batch,) = islice(loader, 1)
    assert bytes(batch["tokens"][0].tolist()) + bytes(batch["targets"][0, -1:].tolist()) == b"defgabc"
    assert TextLoader(tmp_path / "b.txt", 3, 1).num_samples == 1


def test_a_tokenizer_turns_text_into_ids() -> None:
    def tokenizer(text: str) -> list[int]:
        return [len(word) + 70_000 for word in text.split()]

    (batch,) = islice(TextLoader("ä bb ccc dddd".encode(), 3, 1, tokenizer=tokenizer), 1)
    assert batch["tokens"].tolist() == [[70_001, 70_002, 70_003]]
    assert batch["targets"].tolist() == [[70_002, 70_003, 70_004]]


# --------------------------------------------------------------------------------------------------------- bad input


def empty_file(folder: Path) -> Loader:
    (folder / "empty.txt").touch()
    return TextLoader(folder / "empty.txt", 4, 2)


def returning(ids: Any) -> Callable[[str], Any]:
    return lambda text: ids


@pytest.mark.parametrize(
    ("make", "problem", "remedy"),
    [
        (lambda _: TextLoader(b"", 4, 2), "text: the text is empty: 0 bytes", "give a text"),
        (empty_file, "empty.txt: the text is empty: 0 bytes", "give a text"),
        (lambda _: TextLoader([], 4, 2), "0 files: the text is empty", "give a text"),
        (lambda _: TextLoader(b"abcd", 4, 2), "too short: 4 bytes, but a window of 4 and the byte", "at most 3"),
        (lambda _: TextLoader(b"a" * 9, 4, 3), "too short: 2 samples, but a batch has 3", "batch_size of at most 2"),
        (lambda _: TextLoader(b"abcd", 0, 2), "sequence_length is 0", "at least 1"),
        (lambda _: TextLoader(b"a\xff", 1, 1, tokenizer=returning([1])), "not UTF-8 .* at byte 1", "convert"),
        (lambda _: TextLoader(b"ab", 1, 1, tokenizer=returning({"ids": [1]})), "returned a dict", ".encode"),
        (lambda _: TextLoader(b"ab", 1, 1, tokenizer=returning([[1, 2]])), "returned a list", ".encode"),
        (lambda path: TextLoader(path / "no.txt", 4, 2), "no.txt: cannot be read: No such file", "give the path"),
        (lambda path: TextLoader(path, 4, 2), "cannot be read: Is a directory", "give the path"),
        (lambda _: TensorLoader({}, 2), "tensors: the data set is empty", "at least one batch"),
        (lambda _: TensorLoader(rows(0), 2), "tensors inputs, label: the data set is empty: 0 samples", "at least"),
        (lambda _: TensorLoader(rows(4) | {"label": torch.zeros(3)}, 2), "rows: inputs 4, label 3", "one row per"),
        (lambda _: TensorLoader({"x": [1, 2]}, 2), "x is a list", "torch.as_tensor"),
        (lambda _: TensorLoader({"x": torch.tensor(1)}, 2), "x is a scalar", "batch dim"),
        (lambda _: TensorLoader(rows(4), 0), "batch_size is 0", "at least 1"),
        (lambda _: TensorLoader(rows(4), 2, epochs=0), "epochs is 0", "None for no end"),
    ],
)
def test_bad_input_is_refused_with_its_sizes_and_a_remedy(
    tmp_path: Path, make: Callable[[Path], Loader], problem: str, remedy: str
) -> None:
    with pytest.raises(DataError, match=problem) as error:
        make(tmp_path)
    assert remedy in error.value.remedy
