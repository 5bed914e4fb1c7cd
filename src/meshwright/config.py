"""Reads RUN.toml: its tables become a ``Run``; errors name the file and the key."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from meshwright.errors import FileFormatError, Problem, refuse
from meshwright.ir import files
from meshwright.ir.run import LearningRate, Run
from meshwright.ir.run_data import TextData, TokensData
from meshwright.ir.run_model import FactoryModel, GPTModel

REFERENCES: dict[str, dict[str, Any]] = {
    "gpt": {"model": {"name": "gpt"}, "data": {"kind": "text", "batch_size": 8, "sequence_length": 128}},
    "mlp": {"model": {"name": "mlp"}, "data": {"kind": "random", "shape": [64]}},
    "lenet": {"model": {"name": "lenet"}, "data": {"kind": "random", "shape": [1, 28, 28]}},
    "resnet": {"model": {"name": "resnet"}, "data": {"kind": "random", "shape": [3, 16, 16]}},
} | {
    name: {"model": {"name": name}, "data": {"kind": "random", "shape": [3, 224, 224], "samples": 64}}
    for name in ("vgg", "googlenet", "wide-resnet")
}
"""Maps the name of a reference model to its run, which is used if only the name is given."""


def load(path: str | os.PathLike[str]) -> Run:
    """Read a RUN.toml.

    Raises:
        FileFormatError: the file cannot be read, or a key or value is wrong; names file and key.
    """
    return make(read(path), where=str(path))


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a TOML file, not yet checked.

    Raises:
        FileFormatError: the file cannot be read or is not TOML.
    """
    return tables(files.read_bytes(path), where=str(path))


def tables(text: bytes, *, where: str) -> dict[str, Any]:
    """The tables of a TOML text. Raise a FileFormatError if the text is not TOML."""
    try:
        document: dict[str, Any] = msgspec.toml.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileFormatError(f"not valid TOML: {error}", where=where, remedy="correct that line") from None
    return document


def make(raw: dict[str, Any], *, where: str) -> Run:
    """The run that these tables describe; ``where`` names them in errors.

    Raises:
        FileFormatError: a key or value is wrong; names ``where`` and the key.
    """
    raw = completed(raw)
    _check_keys(inspect.type_info(Run), raw, where, "")
    run = files.decode(msgspec.toml.encode(raw), Run, where=where, toml=True)
    refuse(FileFormatError, _problems(run, raw), where)
    return run


PATHS = ("data.path", "data.paths", "data.cache_directory", "layout.plan", "layout.cluster", "train.directory")
"""The keys that hold paths, or may do so."""


def check_paths(raw: dict[str, Any], folder: Path, *, where: str) -> None:
    """Check that the paths in these tables, which may come from a stranger, lead neither out of ``folder`` nor out of
    the folder of the file that they stand in.

    Raises:
        FileFormatError: one does; names ``where``, the file, and the key.
    """
    for key in PATHS:
        section, _, name = key.partition(".")
        table = raw.get(section)
        value = table.get(name) if isinstance(table, dict) else None
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str) or not text:
                continue  # decoding refuses other types
            matches = glob.glob(text, recursive=True) if glob.has_magic(text) else []
            for path in (text, *matches):
                problem = files.way_out(folder, path)
                if problem and files.way_out(Path(where).absolute().parent, str(folder / path)):
                    remedy = f"give it as an option (--{key}), or add --trust if you trust this file"
                    raise FileFormatError(f"{path!r} {problem} {folder}", where=f"{where}: {key}", remedy=remedy)


def save(run: Run, path: Path) -> None:
    """Write the run, with all its defaults, as a RUN.toml."""
    files.write_if_changed(path, _toml(run))


def _toml(run: Run) -> bytes:
    return msgspec.toml.encode(_given(msgspec.to_builtins(run)))


def _given(table: Any) -> Any:
    """The table without keys whose value is None, which TOML cannot hold."""
    if not isinstance(table, dict):
        return table
    return {key: _given(value) for key, value in table.items() if value is not None}


def completed(raw: dict[str, Any]) -> dict[str, Any]:
    """A copy of the tables with missing names filled in: ``adamw`` for the optimizer, ``factory`` for a model with
    one."""
    raw = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    model, optimizer = raw.get("model"), raw.setdefault("optimizer", {})
    if isinstance(model, dict) and "factory" in model:
        model.setdefault("name", "factory")
    if isinstance(optimizer, dict):
        optimizer.setdefault("name", "adamw")
    return raw


def structs(node: inspect.Type, raw: dict[str, Any] | None = None) -> list[inspect.StructType]:
    """The struct types that a value of type ``node`` may have; with ``raw``, only the types that match the tag of
    ``raw``."""
    candidates = [struct for struct in files.alternatives(node) if isinstance(struct, inspect.StructType)]
    if raw is None:
        return candidates
    return [struct for struct in candidates if struct.tag_field is None or raw.get(struct.tag_field) == struct.tag]


def _check_keys(node: inspect.Type, raw: Any, where: str, at: str) -> None:
    """Raise a FileFormatError for an unknown key or tag; the error suggests the nearest known name."""
    if not isinstance(raw, dict):
        return
    all_structs, candidates = structs(node), structs(node, raw)
    if not candidates and all_structs and all_structs[0].tag_field:
        tag, known = all_structs[0].tag_field, [str(candidate.tag) for candidate in all_structs]
        place = f"{where}: {at}"
        if tag not in raw:
            raise FileFormatError(f"`{tag}` is missing", where=place, remedy=f"add {tag} = one of {', '.join(known)}")
        remedy = files.did_you_mean(str(raw[tag]), known, f"known: {', '.join(known)}")
        raise FileFormatError(f"unknown {tag} {raw[tag]!r}", where=f"{place}.{tag}", remedy=remedy)
    for struct in candidates[:1]:
        fields = {field.encode_name: field.type for field in struct.fields}
        known = [*fields, *([struct.tag_field] if struct.tag_field else [])]
        for key, value in raw.items():
            if key not in known:
                remedy = files.did_you_mean(key, known, f"known keys: {', '.join(known)}")
                raise FileFormatError("unknown key", where=f"{where}: {f'{at}.{key}' if at else key}", remedy=remedy)
            if key in fields:
                _check_keys(fields[key], value, where, f"{at}.{key}" if at else key)


def _problems(run: Run, raw: dict[str, Any]) -> Iterator[Problem]:
    """Yield the problems of a run that its types do not rule out."""
    model, data = run.model, run.data
    keys = [key for key in raw.get("layout", {}) if key not in ("plan", "cluster")]
    if run.layout.file and keys:
        remedy = "give the plan, which says everything, or sizes"
        yield "layout", f"both a plan and {keys[0]} are given", remedy
    if run.sample is not None and not isinstance(data, TextData):
        yield "sample", "only a model of text can write", "leave [sample] out"
    yield from _schedule_problems(run.schedule)
    if isinstance(model, FactoryModel):
        for key, text in (("factory", model.factory), ("loss", model.loss)):
            known = key == "loss" and text in ("language_model", "classification")
            if not known and (text.count(":") != 1 or not all(text.split(":"))):
                problem = f"{text!r} does not name a function" if text else "is missing"
                remedy = "write package.module:function" + (", or classification" if key == "loss" else "")
                yield f"model.{key}", problem, remedy
    if isinstance(model, GPTModel) and model.width % model.heads:
        problem = f"{model.width} is not divisible by heads = {model.heads}"
        yield "model.width", problem, "choose a width that is a multiple of the heads"
    if isinstance(model, GPTModel) and isinstance(data, TextData | TokensData):
        positions, length = model.sequence_length, data.sequence_length
        if positions and positions < length:
            problem = f"the model has {positions} positions, but data.sequence_length is {length}"
            yield "model.sequence_length", problem, "leave it out, or give at least as many"
        if isinstance(data, TextData) and model.vocabulary < 256:
            problem = f"text has 256 different bytes, the model's vocabulary is {model.vocabulary}"
            yield "model.vocabulary", problem, "give at least 256"


def _schedule_problems(schedule: LearningRate) -> Iterator[Problem]:
    scaled, base = schedule.scaling != "none", schedule.base_batch_size
    if scaled and not base:
        yield "schedule.base_batch_size", "is missing", "give the batch that optimizer.lr was found for"
    if base and not scaled:
        problem = f"is {base}, but nothing is scaled"
        yield "schedule.base_batch_size", problem, 'give scaling = "linear", or "sqrt"'
    if schedule.warmup_from == "base" and not (scaled and schedule.warmup_steps):
        problem = "'base' means nothing without warmup_steps and scaling"
        yield "schedule.warmup_from", problem, "give both, or leave it out"
    begins = [begin for begin, _ in schedule.batch_sizes]
    if begins != sorted(set(begins)):
        problem = f"the steps {begins} do not rise"
        yield "schedule.batch_sizes", problem, "write [[step, batch], ...] in order"


def changes(path: Path, run: Run) -> list[str]:
    """The changes since the run that was saved at ``path``, such as ``optimizer.lr: 0.001 -> 0.0003``."""
    try:
        before = _flat(tables(path.read_bytes(), where=str(path)))
    except (OSError, FileFormatError):
        return []
    after = _flat(tables(_toml(run), where=str(path)))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name, 'not given')} -> {after.get(name, 'not given')}" for name in names]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
