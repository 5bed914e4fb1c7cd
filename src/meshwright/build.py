"""Makes the model, loss function, loaders and optimizer of a run file, and writes text with a trained model."""

import glob
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from meshwright import models, optim
from meshwright.capture.opaque import opaque
from meshwright.data.ahead import PrefetchLoader
from meshwright.data.loaders import Loader, TensorLoader, TextLoader
from meshwright.data.shards import Shards
from meshwright.data.stored import StoreLoader
from meshwright.data.stores import Images, PartOfStore, Store, Tokens, decode_image
from meshwright.errors import DataError, FileFormatError
from meshwright.ir.plan import starred
from meshwright.ir.run import Run, Sample
from meshwright.ir.run_data import (
    STANDARD_LIBRARY,
    DigitsData,
    RandomData,
    ShardsData,
    Stored,
    TensorsData,
    TextData,
    TokensData,
)
from meshwright.ir.run_model import AUTO, FactoryModel, GPTModel, UNetModel
from meshwright.runtime.corpus import standard_library_text
from meshwright.runtime.loop import Progress
from meshwright.runtime.trust import imported

LossFunction = Callable[[nn.Module, Any], Any]
Tensors = dict[str, Tensor]

STANDARD_LIBRARY_BYTES = 8_000_000
"""Default bytes of the standard library's text, held-out text included."""
_OURS: dict[str, Callable[..., nn.Module]] = {
    "MLPModel": models.MLP,
    "LeNetModel": models.LeNet,
    "ResNetModel": models.ResNet,
    "AlexNetModel": models.AlexNet,
    "VGGModel": models.VGG,
    "GoogLeNetModel": models.GoogLeNet,
    "WideResNetModel": models.WideResNet,
    "UNetModel": models.UNet,
}
_LOSSES: dict[str, LossFunction] = {
    "language_model": models.language_model_loss,
    "classification": models.classification_loss,
    "segmentation": models.segmentation_loss,
}


# --- model, loss, optimizer ------------------------------------------------------------------------------------------


def model(run: Run) -> nn.Module:
    """The model of ``[model]``, with initial values drawn from the run's seed. Raise a FileFormatError if its sizes do
    not fit, or the factory cannot be imported or called, or is not trusted (``runtime/trust.py``)."""
    section = run.model
    torch.manual_seed(run.train.seed)
    if isinstance(section, FactoryModel):
        module = _call_factory(section)
        _mark_opaque(module, section.opaque)
    else:
        arguments = msgspec.structs.asdict(section)
        del arguments["loss"]
        try:
            if isinstance(section, GPTModel):
                wanted = run.data.sequence_length if isinstance(run.data, TextData | TokensData) else 1024
                arguments["sequence_length"] = section.sequence_length or wanted
                module = models.GPT(models.GPTConfig(**arguments))
            else:
                module = _OURS[type(section).__name__](**arguments)
        except ValueError as error:
            raise FileFormatError(str(error), where="model", remedy="correct the sizes in [model]") from None
    return module.to(getattr(torch, run.train.dtype))


def opaque_choice(run: Run) -> Literal["", "auto"]:
    """Whether capture may make submodules of the run's model opaque by itself."""
    return run.model.opaque_choice if isinstance(run.model, FactoryModel) else ""


def _mark_opaque(module: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        matches = [part for path, part in module.named_modules() if path and name in (path, starred(path))]
        if not matches and name != AUTO:
            known = ", ".join(dict.fromkeys(starred(path) for path, _ in module.named_modules() if path))
            raise FileFormatError(
                f"the model has no submodule {name!r}", where="model.opaque", remedy=f"name one of {known}"
            )
        for part in matches:
            opaque(part)


def loss_function(run: Run) -> LossFunction:
    """The loss function of ``[model]``. Raise a FileFormatError if it cannot be imported."""
    usual = {GPTModel: "language_model", UNetModel: "segmentation"}.get(type(run.model), "classification")
    name = run.model.loss or usual
    return _LOSSES[name] if name in _LOSSES else cast(LossFunction, imported(name, "model.loss"))


def hyperparameters(run: Run) -> dict[str, Any]:
    """The optimizer's keyword arguments."""
    return msgspec.structs.asdict(run.optimizer)


def optimizer(run: Run) -> Callable[[Any], torch.optim.Optimizer]:
    """The function that makes the optimizer of ``[optimizer]``, as ``parallelize`` takes it."""
    name = type(run.optimizer).__name__
    kind: Callable[..., torch.optim.Optimizer] = getattr(optim if name in optim.__all__ else torch.optim, name)
    return lambda parameters: kind(parameters, **hyperparameters(run))


def _call_factory(section: FactoryModel) -> nn.Module:
    factory = imported(section.factory, "model.factory")
    try:
        inspect.signature(factory).bind(**section.arguments)
    except TypeError as error:
        raise FileFormatError(
            f"{section.factory} cannot be called with them: {error}",
            where="model.arguments",
            remedy=f"its signature is {inspect.signature(factory)}",
        ) from None
    module = factory(**section.arguments)
    if not isinstance(module, nn.Module):
        raise FileFormatError(
            f"{section.factory} returned a {type(module).__name__}",
            where="model.factory",
            remedy="return a torch.nn.Module",
        )
    return module


# --- data ------------------------------------------------------------------------------------------------------------


class DataSource:
    """The data of ``[data]``, read once: ``training`` and ``held_out`` make loaders of it. Raises a DataError if data
    are missing, empty or too short."""

    def __init__(self, run: Run) -> None:
        self.run, self.section = run, run.data
        self._training: bytes | Tensors | Store
        self._held_out: bytes | Tensors | Store
        if isinstance(self.section, Stored):
            store = stored(self.section, getattr(torch, run.train.dtype))
            kept, out = _spread(len(store), self.section.held_out)
            self._training, self._held_out = PartOfStore(store, kept.numpy()), PartOfStore(store, out.numpy())
        elif isinstance(self.section, TextData):
            self._training, self._held_out = _read_text(self.section)
        else:
            floats = getattr(torch, run.train.dtype)
            tensors = {
                name: value.to(floats) if value.is_floating_point() else value
                for name, value in _read_tensors(self.section, run.train.seed).items()
            }
            self._training, self._held_out = _split_rows(tensors, self.section.held_out)

    @property
    def items_per_step(self) -> tuple[int, str]:
        """The number and the name of the items of a step: (4096, "tok") or (64, "samples")."""
        size = self.section.batch_size
        if isinstance(self.section, TextData | TokensData):
            return size * self.section.sequence_length, "tok"
        return size, "samples"

    def example(self) -> Any:
        """The first global batch, without fetching further ones."""
        if isinstance(self._training, Store):
            return next(iter(self._plain(self._training, shuffle=True)))
        return next(iter(self.training()))

    def training(self, shard: tuple[int, int] = (0, 1)) -> Loader:
        """The endless loader of training batches; ``shard`` is (index, number of shards) of each batch."""
        size, seed = self.section.batch_size, self.run.train.seed
        if isinstance(self._training, Store):
            assert isinstance(self.section, Stored)
            return PrefetchLoader(
                self._training, size, self.section.memory_bytes, cache_directory=self.section.cache_directory or None,
                seed=seed, shard=shard, skip_bad=self.section.skip_bad, pin=torch.cuda.is_available(),
            )  # fmt: skip
        return self._loader(self._training, size, seed=seed, shard=shard, drop_last=True)

    def held_out(self, shard: tuple[int, int] = (0, 1)) -> Loader | None:
        """The loader of held-out batches; each loop over it is one epoch. None if nothing is held out.

        Every shard gets the same number of samples; the few that remain are left out. For text, a smaller last batch is
        left out too.
        """
        if not self.section.held_out:
            return None
        count, size, data = shard[1], self.section.batch_size, self._held_out
        if isinstance(data, Store):
            rows = len(data) // count * count
            part = PartOfStore(data, np.arange(rows))
            return self._plain(part, min(size, max(1, rows)), shuffle=False, epochs=1, shard=shard, drop_last=False)
        if isinstance(data, dict):
            rows = min(map(len, data.values())) // count * count
            data, size = {name: value[:rows] for name, value in data.items()}, min(size, max(1, rows))
        elif isinstance(self.section, TextData):
            length = self.section.sequence_length
            size = min(size, max(0, len(data) - 1) // length // count * count)
            if size == 0:
                raise DataError(
                    f"the held-out part is {len(data)} bytes, but {count} windows of {length} need "
                    f"{count * length + 1}",
                    where="data.held_out",
                    remedy="give more text, hold out more, or nothing: held_out = 0",
                )
        return self._loader(data, size, shuffle=False, epochs=1, shard=shard)

    def _plain(self, store: Store, size: int = 0, **options: Any) -> StoreLoader:
        assert isinstance(self.section, Stored)
        skips = self.section.skip_bad
        return StoreLoader(store, size or self.section.batch_size, self.run.train.seed, skip_bad=skips, **options)

    def _loader(self, data: bytes | Tensors, size: int, **options: Any) -> Loader:
        if isinstance(data, dict):
            return TensorLoader(data, size, **options)
        assert isinstance(self.section, TextData)
        try:
            return TextLoader(data, self.section.sequence_length, size, **options)
        except DataError as error:
            paths = self.section.paths
            name = paths if isinstance(paths, str) else ", ".join(paths)
            raise DataError(error.problem, where=f"data.paths ({name})", remedy=error.remedy) from None


def example_batch(run: Run) -> dict[str, Tensor]:
    """A global batch of the right shapes. For text it holds zeros, and no text is read."""
    if isinstance(run.data, TextData):
        tokens = torch.zeros(run.data.batch_size, run.data.sequence_length, dtype=torch.int64)
        return {"tokens": tokens, "targets": tokens}
    return cast(Tensors, DataSource(run).example())


def stored(section: Stored, floats: torch.dtype = torch.float32) -> Store:
    """The samples of ``[data]`` that need not fit in memory, with images of type ``floats``.

    Raises:
        DataError: they are not there, or damaged.
    """
    if isinstance(section, TokensData):
        return Tokens(section.path, section.sequence_length, section.dtype)
    if isinstance(section, ShardsData):
        paths = section.paths if isinstance(section.paths, str) else list(section.paths)
        return Shards(paths, skip_bad=section.skip_bad)

    def scaled(content: memoryview) -> Tensor:
        return decode_image(content, section.size).to(floats)

    return Images(section.path, scaled)


def _read_text(section: TextData) -> tuple[bytes, bytes]:
    paths = [section.paths] if isinstance(section.paths, str) else list(section.paths)
    if paths == [STANDARD_LIBRARY]:
        size = section.max_bytes or STANDARD_LIBRARY_BYTES
        held_out = int(size * section.held_out)
        return standard_library_text(size - held_out, held_out)
    texts = []
    for pattern in paths:
        matches = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
        if not matches:
            raise DataError("no file matches", where=f"data.paths: {pattern}", remedy="correct the path or glob")
        for path in matches:
            try:
                texts.append(Path(path).read_bytes())
            except OSError as error:
                raise DataError(f"cannot be read: {error.strerror}", where=path, remedy="correct data.paths") from None
    text = b"\n".join(texts)
    text = text[: section.max_bytes] if section.max_bytes else text
    cut = len(text) - int(len(text) * section.held_out)
    return text[:cut], text[cut:]


def _read_tensors(section: DigitsData | TensorsData | RandomData, seed: int) -> Tensors:
    if isinstance(section, RandomData):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(section.samples, *section.shape, generator=generator)
        return {"inputs": inputs, "label": torch.randint(section.classes, (section.samples,), generator=generator)}
    if isinstance(section, TensorsData):
        return _read_file(Path(section.path))
    return read_digits()


def read_digits() -> Tensors:
    """scikit-learn's handwritten digits: ``image`` [n, 1, 8, 8] from 0 to 1, ``label`` [n].

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "scikit-learn, which has the digits, is not installed",
            where="data.kind",
            remedy="pip install 'meshwright[demo]'",
        ) from None
    data = load_digits()
    image = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return {"image": image, "label": torch.as_tensor(data.target, dtype=torch.int64)}


def _read_file(path: Path) -> Tensors:
    readers: dict[str, Callable[[Path], Mapping[str, Any]]] = {
        ".npz": _read_npz,
        ".safetensors": lambda path: importlib.import_module("safetensors.torch").load_file(path),
        ".pt": lambda path: cast(Mapping[str, Any], torch.load(path, map_location="cpu", weights_only=True)),
    }
    where = f"data.path: {path}"
    if path.suffix not in readers:
        raise DataError(
            f"{path.suffix or 'no suffix'!r} is not a kind of file that is read",
            where=where,
            remedy=f"give one of {', '.join(readers)}",
        )
    try:
        contents = dict(readers[path.suffix](path))
        return {name: torch.as_tensor(value) for name, value in contents.items()}
    except ImportError:
        raise DataError("safetensors is not installed", where=where, remedy="pip install safetensors") from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=where, remedy="correct data.path") from None
    except Exception as error:
        text = str(error).strip().splitlines()
        raise DataError(
            f"is not a {path.suffix} file of named tensors ({text[0] if text else type(error).__name__})",
            where=where,
            remedy="write it with numpy.savez, safetensors, or torch.save({name: tensor})",
        ) from error


def _read_npz(path: Path) -> Mapping[str, Any]:
    import numpy as np

    with np.load(path) as file:
        return dict(file)


def _split_rows(tensors: Tensors, held_out: float) -> tuple[Tensors, Tensors]:
    """Training rows and held-out rows; held-out rows are spread evenly over all rows."""
    kept, out = _spread(len(next(iter(tensors.values()))) if tensors else 0, held_out)
    return {name: value[kept] for name, value in tensors.items()}, {name: value[out] for name, value in tensors.items()}


def _spread(rows: int, held_out: float) -> tuple[Tensor, Tensor]:
    """The numbers of the rows for training, and of the rows that are held out. Held-out rows are spread evenly."""
    index = torch.arange(rows)
    out = ((index + 1) * held_out).floor() > (index * held_out).floor()
    return index[~out], index[out]


# --- writing ---------------------------------------------------------------------------------------------------------


def write_text(model: nn.Module, section: Sample, context: int, seed: int, progress: Progress) -> str:
    """The text with which a byte-level language model continues the prompt. ``model`` takes tokens [1, s], where s is
    at most ``context``, and returns logits [1, s, vocabulary]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list((section.prompt or "\n").encode())
    prompt = len(tokens)
    model.eval()
    progress.begin("writing", section.length)
    with torch.inference_mode():
        for _ in range(section.length):
            logits = model(torch.tensor([tokens[-context:]]))[0, -1, :256].float()
            if section.temperature == 0:
                tokens.append(int(logits.argmax()))
            else:
                chances = torch.softmax(logits / section.temperature, dim=0)
                tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
            progress.advance()
    progress.end()
    return bytes(tokens[prompt:]).decode(errors="replace")
