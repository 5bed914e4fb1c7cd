"""RUN.toml: what is trained, on which data, how and where; typed, and changed key by key from the command line."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, inspect

from meshwright.errors import FileFormatError
from meshwright.ir import files
from meshwright.ir.plan import Layout, Plan

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0.0)]
Fraction = Annotated[float, Meta(ge=0.0, lt=1.0)]

STANDARD_LIBRARY = "standard-library"


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of RUN.toml: values that cannot be changed, no unknown keys."""


# --- [model] ---------------------------------------------------------------------------------------------------------


class _Model(_Section, frozen=True, tag_field="name"):
    loss: str = ""
    """``language_model``, ``classification``, or ``package.module:function``; empty: the one that the model has."""


class GPTModel(_Model, frozen=True, tag="gpt"):
    """``meshwright.models.GPT``: a decoder-only language model."""

    layers: Positive = 4
    """Number of transformer blocks."""
    width: Positive = 256
    """Size of the hidden state; a multiple of ``heads``."""
    heads: Positive = 4
    """Attention heads per block."""
    vocabulary: Positive = 256
    """Number of different tokens; text is bytes: 256."""
    sequence_length: Count = 0
    """Positions the model has; 0: as many as ``data.sequence_length``."""
    dropout: Fraction = 0.0
    """Probability of dropping an activation."""
    tied_head: bool = True
    """Whether the output head shares the token embedding's weight."""


class MLPModel(_Model, frozen=True, tag="mlp"):
    """``meshwright.models.MLP``: linear layers with ReLU between them."""

    sizes: Annotated[tuple[Positive, ...], Meta(min_length=2)] = (64, 64, 10)
    """Values per sample, then outputs of each layer; the last is the number of classes."""
    bias: bool = True
    """Whether the layers have a bias."""


class LeNetModel(_Model, frozen=True, tag="lenet"):
    """``meshwright.models.LeNet``: convolutions with pooling, then dense layers."""

    image_size: Positive = 28
    """Height and width of the images, in pixels."""
    image_channels: Positive = 1
    """Colours: 1 or 3."""
    classes: Positive = 10
    """Number of classes."""
    channels: tuple[Positive, ...] = (6, 16)
    """Output channels of each convolution."""
    dense: tuple[Positive, ...] = (120, 84)
    """Sizes of the hidden dense layers."""
    kernel: Positive = 5
    """Height and width of the convolutions, in pixels."""


class ResNetModel(_Model, frozen=True, tag="resnet"):
    """``meshwright.models.ResNet``: a small residual network with batch normalization."""

    depth: Positive = 8
    """Layers with weights on the main path: 8, 14, 20, ..."""
    width: Positive = 16
    """Channels of the first stage."""
    image_channels: Positive = 3
    """Colours: 1 or 3."""
    classes: Positive = 10
    """Number of classes."""


class FactoryModel(_Model, frozen=True, tag="factory"):
    """Any model: ``factory(**arguments)`` returns it. ``name`` may be left out; ``loss`` must be given."""

    factory: str
    """``package.module:function`` (or a class); the current folder is searched first."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the factory."""


Model = GPTModel | MLPModel | LeNetModel | ResNetModel | FactoryModel


# --- [data] ----------------------------------------------------------------------------------------------------------


class _Data(_Section, frozen=True, tag_field="kind"):
    batch_size: Positive = 16
    """Samples in a global batch, over all ranks."""
    held_out: Fraction = 0.05
    """Part of the data that is not trained on, for evaluation; 0: none."""


class TextData(_Data, frozen=True, tag="text"):
    """Text as bytes (a byte is a token), in windows; the last part is held out."""

    paths: str | tuple[str, ...] = STANDARD_LIBRARY
    """Files or globs, joined in order; or ``standard-library``: Python's own documentation and sources."""
    sequence_length: Positive = 256
    """Tokens in a window."""
    max_bytes: Count = 0
    """Use no more than so many bytes; 0: all (of the standard library: 8,000,000)."""


class DigitsData(_Data, frozen=True, tag="digits"):
    """scikit-learn's handwritten digits: ``image`` [n, 1, 8, 8] from 0 to 1 and ``label`` [n]; needs ``meshwright[demo]``."""


class TensorsData(_Data, frozen=True, tag="tensors"):
    """Named tensors with one row per sample; the names are those that the loss reads."""

    path: str
    """A ``.npz``, ``.safetensors`` or ``.pt`` file (a dict of tensors)."""


class RandomData(_Data, frozen=True, tag="random"):
    """Random ``inputs`` and ``label``: for planning, verifying and timing, not for learning."""

    shape: tuple[Positive, ...] = (64,)
    """Shape of one sample."""
    classes: Positive = 10
    """Number of classes."""
    samples: Positive = 1024
    """Number of samples."""


Data = TextData | DigitsData | TensorsData | RandomData


# --- [layout], [optimizer], [schedule], [train], [sample] ------------------------------------------------------------


class RunLayout(Layout, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the step is divided: the sizes of a layout, or a plan file. By default the batch is divided over all ranks."""

    dp: int = -1
    """Data-parallel size; -1: what is left of the ranks."""
    plan: str = ""
    """A plan file (``meshwright plan --output``), in place of sizes."""

    def chosen(self) -> Layout:
        """The layout without ``plan``."""
        return Layout(**{name: getattr(self, name) for name in Layout.__struct_fields__})


class _Optimizer(_Section, frozen=True, tag_field="name"):
    lr: Rate = 1e-3
    """Learning rate (the highest, where a schedule changes it)."""
    weight_decay: Rate = 0.0
    """Weight decay."""


class SGD(_Optimizer, frozen=True, tag="sgd"):
    """``torch.optim.SGD``."""

    momentum: Rate = 0.0
    """Momentum."""
    dampening: Rate = 0.0
    """Dampening of the momentum."""
    nesterov: bool = False
    """Nesterov's momentum."""


class Adam(_Optimizer, frozen=True, tag="adam"):
    """``torch.optim.Adam``."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: Rate = 1e-8
    """Added to the denominator."""
    amsgrad: bool = False
    """The AMSGrad variant."""


class AdamW(_Optimizer, frozen=True, tag="adamw"):
    """``torch.optim.AdamW``."""

    weight_decay: Rate = 0.01
    """Weight decay, apart from the gradient."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square."""
    eps: Rate = 1e-8
    """Added to the denominator."""
    amsgrad: bool = False
    """The AMSGrad variant."""


class RMSprop(_Optimizer, frozen=True, tag="rmsprop"):
    """``torch.optim.RMSprop``."""

    alpha: Rate = 0.99
    """Decay of the running mean of the squared gradient."""
    momentum: Rate = 0.0
    """Momentum."""
    eps: Rate = 1e-8
    """Added to the denominator."""


class Adagrad(_Optimizer, frozen=True, tag="adagrad"):
    """``torch.optim.Adagrad``."""

    lr_decay: Rate = 0.0
    """Decay of the learning rate."""
    eps: Rate = 1e-10
    """Added to the denominator."""


Optimizer = SGD | Adam | AdamW | RMSprop | Adagrad


class LearningRate(_Section, frozen=True):
    """How the learning rate goes: a linear warm-up, then down to ``final`` times the highest."""

    name: Literal["none", "linear", "cosine"] = "none"
    """The way down: ``none`` stays at the highest."""
    warmup_steps: Count = 0
    """Steps until the highest."""
    final: Fraction = 0.1
    """The last learning rate, as a part of the highest."""

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by at ``step`` (from 0) of ``steps``."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        done = min(1.0, (step - self.warmup_steps) / max(1, steps - 1 - self.warmup_steps))
        if self.name == "linear":
            return 1 - (1 - self.final) * done
        if self.name == "cosine":
            return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))
        return 1.0


class Train(_Section, frozen=True):
    """The run itself."""

    steps: Positive = 1000
    """Training steps."""
    max_grad_norm: Rate = 0.0
    """Clip gradients to this norm over the whole model; 0: do not."""
    seed: int = 0
    """Seed of initial values, data order and dropout."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Of parameters and of floating-point data."""
    log_every: Positive = 10
    """Steps between log lines."""
    evaluate_every: Count = 0
    """Steps between evaluations on held-out data; 0: only before the first step and after the last."""
    checkpoint_every: Count = 100
    """Steps between checkpoints; 0: only after the last step."""
    keep: Positive = 2
    """Checkpoints that are kept."""
    directory: str = ""
    """Where the run lies; empty: ``runs/`` and the name of the RUN file. A run that stopped there is continued."""
    ranks: Positive | Literal["auto"] = "auto"
    """Processes; ``auto``: one a core, at most as many as the layout and the batch can use."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The port through which ranks meet; 0: a free one."""


class Sample(_Section, frozen=True):
    """Text that a language model of bytes writes after training."""

    prompt: str = "\n"
    """What it goes on from."""
    length: Count = 400
    """Bytes to write."""
    temperature: Rate = 0.8
    """0: always the likeliest byte."""


class Run(_Section, frozen=True):
    """A whole RUN.toml."""

    model: Model
    """What is trained."""
    data: Data
    """What it is trained on."""
    layout: RunLayout = RunLayout()
    """How the step is divided over the ranks."""
    optimizer: Optimizer = AdamW()
    """The optimizer."""
    schedule: LearningRate = LearningRate()
    """The course of the learning rate."""
    train: Train = Train()
    """Steps, seed, checkpoints, ranks."""
    sample: Sample | None = None
    """Text to write at the end."""

    def num_ranks(self, num_cores: int) -> int:
        """Processes to start on a machine of ``num_cores`` cores: one a core, as far as layout and batch can use them."""
        if self.layout.plan:
            return files.load(Path(self.layout.plan), Plan).mesh.world_size
        if self.train.ranks != "auto":
            return self.train.ranks
        sizes = (self.layout.dp, self.layout.tp)
        fixed = math.prod(size for size in sizes if size > 0)
        if min(sizes) > 0:
            return fixed
        for parts in range(num_cores // fixed, 1, -1):
            if self.layout.dp > 0 or self.data.batch_size % parts == 0:
                return parts * fixed
        return fixed


REFERENCES: dict[str, dict[str, Any]] = {
    "gpt": {"model": {"name": "gpt"}, "data": {"kind": "text", "batch_size": 8, "sequence_length": 128}},
    "mlp": {"model": {"name": "mlp"}, "data": {"kind": "random", "shape": [64]}},
    "lenet": {"model": {"name": "lenet"}, "data": {"kind": "random", "shape": [1, 28, 28]}},
    "resnet": {"model": {"name": "resnet"}, "data": {"kind": "random", "shape": [3, 16, 16]}},
}
"""By name of a model of ours: the run that is meant where only the name is given."""


# --- reading ---------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Run:
    """Read a RUN.toml, and change it by ``overrides`` such as ``["--optimizer.lr", "3e-4"]``.

    Raises:
        FileFormatError: the file cannot be read, or a key or value is wrong; names file (or option) and key.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise FileFormatError(
            f"cannot read the file: {error.strerror}", where=str(path), remedy="check the path"
        ) from None
    return parse(text, overrides, where=str(path))


def parse(text: bytes, overrides: Sequence[str] = (), *, where: str) -> Run:
    """As ``load``, from the text of a file that errors call ``where``."""
    try:
        raw: dict[str, Any] = msgspec.toml.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileFormatError(f"not valid TOML: {error}", where=where, remedy="correct that line") from None
    return make(raw, overrides, where=where)


def make(raw: dict[str, Any], overrides: Sequence[str] = (), *, where: str) -> Run:
    """As ``load``, from the tables of a file that errors call ``where``."""
    raw = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    for option, text in sorted(_options(overrides), key=lambda item: not _is_tag(item[0])):
        _override(raw, option, text)
    model = raw.get("model")
    if isinstance(model, dict) and "factory" in model:
        model.setdefault("name", "factory")
    _check_keys(inspect.type_info(Run), raw, where, "")
    run = files.decode(msgspec.toml.encode(raw), Run, where=where, toml=True)
    _check(run, raw, where)
    return run


def keys() -> Iterator[tuple[str, str]]:
    """Every key of RUN.toml with dots, and its default as text."""
    for section in msgspec.structs.fields(Run):
        for struct in _structs(inspect.type_info(section.type)):
            for field in struct.fields:
                default = "" if field.default is msgspec.NODEFAULT else msgspec.json.encode(field.default).decode()
                yield f"{section.name}.{field.encode_name}", default


def _check(run: Run, raw: dict[str, Any], where: str) -> None:
    """What the types cannot say."""
    given = [key for key in raw.get("layout", {}) if key != "plan"]
    if run.layout.plan and given:
        raise FileFormatError(
            f"both a plan and {given[0]} are given",
            where=f"{where}: layout",
            remedy="give the plan, which says everything, or sizes",
        )
    if isinstance(run.model, FactoryModel):
        for key, text in (("factory", run.model.factory), ("loss", run.model.loss)):
            known = key == "loss" and text in ("language_model", "classification")
            if not known and (text.count(":") != 1 or not all(text.split(":"))):
                raise FileFormatError(
                    f"{text!r} does not name a function" if text else "is missing",
                    where=f"{where}: model.{key}",
                    remedy="write package.module:function" + (", or classification" if key == "loss" else ""),
                )
    if isinstance(run.model, GPTModel) and run.model.width % run.model.heads:
        raise FileFormatError(
            f"{run.model.width} is not divisible by heads = {run.model.heads}",
            where=f"{where}: model.width",
            remedy="choose a width that is a multiple of the heads",
        )
    if isinstance(run.model, GPTModel) and isinstance(run.data, TextData):
        positions = run.model.sequence_length
        if positions and positions < run.data.sequence_length:
            raise FileFormatError(
                f"the model has {positions} positions, but data.sequence_length is {run.data.sequence_length}",
                where=f"{where}: model.sequence_length",
                remedy="leave it out, or give at least as many",
            )
        if run.model.vocabulary < 256:
            raise FileFormatError(
                f"text has 256 different bytes, the model's vocabulary is {run.model.vocabulary}",
                where=f"{where}: model.vocabulary",
                remedy="give at least 256",
            )


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """``--a.b value`` and ``--a.b=value`` as (``a.b``, value)."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise FileFormatError(
                f"unexpected argument {word!r}", where="command line", remedy="write keys as --section.key value"
            )
        name, has_value, value = word[2:].partition("=")
        if not has_value:
            if not rest:
                raise FileFormatError("has no value", where=word, remedy=f"write {word} VALUE")
            value = rest.pop(0)
        yield name, value


def _is_tag(name: str) -> bool:
    return name in ("model.name", "data.kind", "optimizer.name")


def _override(raw: dict[str, Any], option: str, text: str) -> None:
    here, node, steps = raw, inspect.type_info(Run), option.split(".")
    kind: Any = None
    while steps:
        structs = _structs(node, here)
        if not structs:
            if any(isinstance(one, inspect.DictType) for one in _alternatives(node)):
                here[".".join(steps)] = _value(text, Any, option)
                return
            raise _unknown_option(option)
        key = steps.pop(0)
        found = [(one.cls, field) for one in structs for field in one.fields if field.encode_name == key]
        if not found and len(structs) == 1 and structs[0].tag_field == key:
            kind, node = str, inspect.StrType()
        elif not found and any(one.tag_field == key for one in structs):
            here[key] = text
            return
        elif not found:
            raise _unknown_option(option)
        else:
            owner, field = found[0]
            node = field.type
            kind = next(one.type for one in msgspec.structs.fields(owner) if one.encode_name == key)
        if steps:
            below = here.setdefault(key, {})
            if not isinstance(below, dict):
                raise _unknown_option(option)
            here = below
        elif _structs(node) and not any(isinstance(one, inspect.DictType) for one in _alternatives(node)):
            raise FileFormatError("is a table", where=f"--{option}", remedy=f"give one of its keys: --{option}.KEY VALUE")
        else:
            here[key] = _value(text, kind, option)


def _value(text: str, kind: Any, option: str) -> Any:
    """The text as the type that the key has: TOML where it is, else the text itself."""
    candidates: list[Any] = [text]
    try:
        candidates.insert(0, msgspec.toml.decode(f"value = {text}".encode())["value"])
    except msgspec.DecodeError:
        pass
    problem = ""
    for candidate in candidates:
        try:
            msgspec.convert(candidate, kind, strict=False)
        except msgspec.ValidationError as error:
            problem = problem or str(error)
            continue
        return candidate
    raise FileFormatError(f"{text!r}: {problem}", where=f"--{option}", remedy="correct the value")


def _unknown_option(option: str) -> FileFormatError:
    known = [name for name, _ in keys()]
    last = option.rpartition(".")[2]
    same = [f"--{name}" for name in known if name.rpartition(".")[2] == last]
    hint = f"did you mean `{'` or `'.join(same)}`?" if same else files.did_you_mean(f"--{option}", [f"--{n}" for n in known])
    return FileFormatError(
        "there is no such key in RUN.toml",
        where=f"--{option}",
        remedy=hint or "`meshwright train --help` shows the keys",
    )


def _check_keys(node: inspect.Type, raw: Any, where: str, at: str) -> None:
    """Unknown keys and tags, with the nearest that this very table may have."""
    if not isinstance(raw, dict):
        return
    every = _structs(node)
    structs = _structs(node, raw)
    if not structs and every and every[0].tag_field:
        tag, known = every[0].tag_field, [str(one.tag) for one in every]
        place = f"{where}: {at}"
        if tag not in raw:
            raise FileFormatError(f"`{tag}` is missing", where=place, remedy=f"add {tag} = one of {', '.join(known)}")
        hint = files.did_you_mean(str(raw[tag]), known)
        remedy = " ".join(filter(None, (hint, f"known: {', '.join(known)}")))
        raise FileFormatError(f"unknown {tag} {raw[tag]!r}", where=f"{place}.{tag}", remedy=remedy)
    for struct in structs[:1]:
        fields = {field.encode_name: field.type for field in struct.fields}
        known = [*fields, *([struct.tag_field] if struct.tag_field else [])]
        for key, value in raw.items():
            if key not in known:
                hint = files.did_you_mean(key, known)
                remedy = " ".join(filter(None, (hint, f"known keys: {', '.join(known)}")))
                raise FileFormatError(f"unknown key `{key}`", where=f"{where}: {at or 'top level'}", remedy=remedy)
            if key in fields:
                _check_keys(fields[key], value, where, f"{at}.{key}" if at else key)


def _alternatives(node: inspect.Type) -> tuple[inspect.Type, ...]:
    return node.types if isinstance(node, inspect.UnionType) else (node,)


def _structs(node: inspect.Type, raw: dict[str, Any] | None = None) -> list[inspect.StructType]:
    """The structs that a value of the type may be; with ``raw``, the ones that its tag leaves."""
    found = [one for one in _alternatives(node) if isinstance(one, inspect.StructType)]
    if raw is None:
        return found
    return [one for one in found if one.tag_field is None or raw.get(one.tag_field) == one.tag]


assert {str(one.__struct_config__.tag) for one in get_args(Model)} == {*REFERENCES, "factory"}
