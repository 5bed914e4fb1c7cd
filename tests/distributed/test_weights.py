"""Weights of Hugging Face: read in slices by each rank, and written so that ``from_pretrained`` loads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.cli import run
from meshwright.errors import CheckpointError
from meshwright.runtime import shards
from meshwright.runtime.safetensors_files import SafetensorsSource
from tests.distributed.pool import Ranks

IDS = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(1))


def llama(tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return GPT2LMHeadModel(config)


MAKES = {"llama": llama, "llama, tied": lambda: llama(tied=True), "gpt2": gpt2}


def loss_fn(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(input_ids=batch["ids"], labels=batch["ids"], use_cache=False).loss
    return loss


def on_meta(name: str) -> Any:
    with mw.auto_parallelize():
        return MAKES[name]()


def trainer_of(model: Any, layout: mw.Layout | None = None, **options: Any) -> mw.Trainer:
    return mw.parallelize(model, loss_fn, {"ids": IDS}, plan=layout or mw.Layout(), seed=7, **options)


def state(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def read_slices(folder: str, name: str, layout: mw.Layout) -> tuple[bool, int, int, float]:
    """Load a folder into a model on the meta device: whether all values came, bytes read, bytes held, and the loss."""
    read: list[SafetensorsSource] = []
    leave = SafetensorsSource.__exit__

    def noted(source: SafetensorsSource, *error: object) -> None:
        read.append(source)
        leave(source, *error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsSource, "__exit__", noted)
        trainer = trainer_of(on_meta(name), layout, weights=folder)
    held = sum(value.nbytes for value in trainer.parameters.own.values())
    whole = trainer.full_state_dict(all_ranks=True)
    expected = {key: value for key, value in MAKES[name]().state_dict().items() if key in whole}
    return equal(whole, expected), sum(source.num_bytes for source in read), held, trainer.evaluate({"ids": IDS}).item()


@pytest.mark.parametrize(("name", "layout"), [("llama", mw.Layout(tp=2)), ("llama, tied", mw.Layout(dp=2, zero=3))])
def test_each_rank_reads_its_slices_only(ranks: Ranks, tmp_path: Path, name: str, layout: mw.Layout) -> None:
    model = MAKES[name]()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    num_files = len(list(tmp_path.glob("*.safetensors")))
    assert num_files > 2
    expected = loss_fn(model.eval(), {"ids": IDS}).item()
    total = sum(value.nbytes for value in model.parameters())
    for same, num_bytes, held, loss in ranks(2, read_slices, str(tmp_path), name, layout):
        assert same
        assert num_bytes <= held, "nothing is read that the rank does not hold (padding is held, and not read)"
        assert held < 0.75 * total
        assert loss == pytest.approx(expected, rel=1e-5)


def test_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No read is larger than a chunk: besides its parts, a rank needs memory for one."""
    llama().save_pretrained(tmp_path)
    sizes: list[int] = []
    read = SafetensorsSource.read

    def measured(source: SafetensorsSource, *place: Any) -> Tensor:
        value = read(source, *place)
        sizes.append(value.nbytes)
        return value

    monkeypatch.setattr(SafetensorsSource, "read", measured)
    monkeypatch.setattr(shards.cut_chunk, "__defaults__", (1024,))
    trainer = trainer_of(on_meta("llama"), weights=tmp_path)
    assert max(sizes) <= 1024
    assert sum(sizes) == sum(value.nbytes for value in trainer.parameters.own.values())
    assert equal(trainer.full_state_dict(), state(llama()))


def write_folder(folder: str, name: str, layout: mw.Layout) -> None:
    trainer_of(MAKES[name](), layout).save_pretrained(folder, max_file_bytes=20_000)


@pytest.mark.parametrize("name", ["llama, tied", "gpt2"])
def test_from_pretrained_loads_what_ranks_write(ranks: Ranks, tmp_path: Path, name: str) -> None:
    ranks(2, write_folder, str(tmp_path / "hf"), name, mw.Layout(tp=2))
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model) is type(MAKES[name]())
    assert equal(state(model), state(MAKES[name]()))


def test_bfloat16_goes_out_and_comes_in(tmp_path: Path) -> None:
    trainer = trainer_of(llama())
    trainer.save_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    again = trainer_of(on_meta("llama"), weights=tmp_path / "hf")
    expected = {name: value.bfloat16().float() for name, value in state(llama()).items()}
    assert equal(again.full_state_dict(), expected)


def test_names_without_the_base_models_prefix(tmp_path: Path) -> None:
    """As GPT-2's own files on Hugging Face's hub have them, which were written from the model without its head."""
    model = gpt2()
    save_file(
        {name: value.contiguous() for name, value in model.transformer.state_dict().items()}, tmp_path / "x.safetensors"
    )
    trainer = trainer_of(on_meta("gpt2"), weights=tmp_path / "x.safetensors")
    assert equal(trainer.full_state_dict(), state(model))


def test_a_checkpoint_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_of(llama(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    trainer.step({"ids": IDS})
    trainer.save_in(tmp_path / "run" / "checkpoints")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(llama().config.to_dict()))
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "hf"), "--config", str(config)]
    assert run(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.match(r"21 tensors of \S*/step-00000001 are written to \S*/hf", text)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    assert equal(state(model), trainer.full_state_dict())
    assert run(command) == 2
    assert "the folder holds weights already" in capsys.readouterr().err
    assert run([*command[:3], str(tmp_path / "x"), "--dtype", "int8"]) == 2
    assert "'int8' is no floating-point dtype" in capsys.readouterr().err


def test_bad_folders_are_refused_by_name(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    first = min((tmp_path / "hf").glob("*.safetensors"))
    trainer = trainer_of(llama())
    before = trainer.full_state_dict()

    def refusal(path: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            trainer.load_weights(path)
        assert equal(trainer.full_state_dict(), before)
        return str(caught.value)

    data = first.read_bytes()
    first.write_bytes(data[:-10])
    assert refusal(tmp_path / "hf").startswith(f"{first}: damaged: SafetensorError: ")
    first.unlink()
    assert refusal(tmp_path / "hf") == (
        f"{first}: there is no such file\n"
        "  -> give a folder with model.safetensors or model.safetensors.index.json, and all files that it names"
    )
    gpt2().save_pretrained(tmp_path / "other")
    assert "there is no tensor model.embed_tokens.weight, nor 20 others of 21" in refusal(tmp_path / "other")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text("{")
    assert "is no index of safetensors files" in refusal(tmp_path / "hf")


def test_missing_tensors_are_left_as_they_are_if_asked(tmp_path: Path) -> None:
    model = llama()
    some = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if "mlp" in name}
    save_file(some, tmp_path / "mlp.safetensors")
    trainer = trainer_of(model)
    before = {name: value.clone() for name, value in trainer.full_state_dict().items()}
    with pytest.raises(CheckpointError, match=r"there is no tensor model\.embed_tokens\.weight"):
        trainer.load_weights(tmp_path / "mlp.safetensors")
    trainer.load_weights(tmp_path / "mlp.safetensors", strict=False)
    assert equal(trainer.full_state_dict(), before | some)
