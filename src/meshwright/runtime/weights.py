"""Weights from elsewhere: folders of Hugging Face, safetensors files, and checkpoints of torch.distributed.checkpoint.

Each rank reads the slices that it holds, in pieces, and no tensor is whole in memory unless it is whole on the rank.
Names may differ from the model's by what programs put before them (``model.``, ``module.``), or by the name of the base
model, which Hugging Face leaves out or adds.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from torch import nn

from meshwright.errors import CheckpointError
from meshwright.ir import files
from meshwright.ir.graph import Graph
from meshwright.runtime import manifest
from meshwright.runtime.chunk_files import ChunkReader
from meshwright.runtime.chunk_index import INDEX, TORCH_INDEX, read_index
from meshwright.runtime.object_path import AnyPath
from meshwright.runtime.safetensors_files import SafetensorsSource
from meshwright.runtime.shards import StoredPart, cut_chunk, part_of
from meshwright.runtime.state import LocalParameters

log = logging.getLogger("meshwright")

PREFIXES = ("", "model.", "module.", "model.module.", "state_dict.", "app.model.")
"""What programs put before the names of a model's tensors."""


class WeightSource(Protocol):
    """Whole tensors by name, of which parts are read."""

    num_bytes: int

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of its tensors, by name."""

    def fill(self, name: str, part: StoredPart) -> None:
        """Read a part of a tensor. The dtype may differ."""


class TorchSource(ChunkReader):
    """The tensors of a checkpoint of ours, or of a program that uses torch.distributed.checkpoint."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, by name."""
        return {name: tensor.shape for name, tensor in self.index.tensors.items()}


class FolderSource(SafetensorsSource):
    """The tensors of a folder of Hugging Face, or of a safetensors file."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, by name."""
        return {name: self.shape(name) for name in self.names()}

    def fill(self, name: str, part: StoredPart) -> None:
        """Read a part of a tensor, in pieces. The dtype may differ."""
        for chunk in part.chunks:
            for piece in cut_chunk(chunk, part.value.element_size()):
                part.view(piece).copy_(self.read(name, piece.offsets, piece.sizes))


def open_weights(path: AnyPath) -> WeightSource:
    """The weights at a place.

    Raises:
        CheckpointError: there are none, or they cannot be read.
    """
    if not path.exists():
        raise CheckpointError("there are no weights", where=f"{path}", remedy="check the path")
    if (path / manifest.MANIFEST).is_file():
        saved = manifest.read(path)
        directory = path / saved.data
        return TorchSource(directory, read_index(directory, saved))
    if (path / TORCH_INDEX).is_file() or (path / INDEX).is_file():
        return TorchSource(path, read_index(path))
    if not isinstance(path, Path):
        remedy = "copy the folder to a disk: safetensors files are mapped into memory"
        raise CheckpointError("holds no checkpoint", where=f"{path}", remedy=remedy)
    return FolderSource(path)


def named_in(model: nn.Module, graph: Graph, source: WeightSource, where: str, *, strict: bool) -> dict[str, str]:
    """The name in the source of each parameter and buffer of a model that the source has.

    Raises:
        CheckpointError: a tensor has another shape, or, if ``strict``, a tensor of the state dict is missing.
    """
    shapes = source.shapes()
    aliases: dict[str, list[str]] = {name: [name] for name in (*graph.parameters, *graph.buffers)}
    for alias, first in graph.tied.items():
        aliases[first].append(alias)
    renamed = max(_renamings(model), key=lambda rename: sum(rename(name) in shapes for name in aliases))
    source_names: dict[str, str] = {}
    for name, known in aliases.items():
        there = next((renamed(alias) for alias in known if renamed(alias) in shapes), None)
        if there is not None:
            if shapes[there] != graph.tensors[name].shape:
                raise CheckpointError(
                    f"the weights are of another model: {there} has shape {list(shapes[there])}, in this model "
                    f"{list(graph.tensors[name].shape)}",
                    where=where,
                    remedy="build the model with the config of these weights",
                )
            source_names[name] = there
    persistent = {graph.tied.get(name, name) for name in model.state_dict()}
    missing = [name for name in aliases if name in persistent and name not in source_names]
    if missing and (strict or not source_names):
        near = files.did_you_mean(missing[0], shapes, "give the weights of this model, or strict=False")
        problem = f"there is no tensor {missing[0]}, nor {len(missing) - 1} others of {len(persistent)}"
        raise CheckpointError(problem, where=where, remedy=near)
    return source_names


def _renamings(model: nn.Module) -> list[Callable[[str], str]]:
    base = getattr(model, "base_model_prefix", "")
    changes: list[Callable[[str], str]] = [lambda name, prefix=prefix: prefix + name for prefix in PREFIXES]  # type: ignore[misc]
    if isinstance(base, str) and base:
        changes += [lambda name: name.removeprefix(f"{base}."), lambda name: f"{base}.{name}"]
    return changes


def load_weights(parameters: LocalParameters, source: WeightSource, names: Mapping[str, str]) -> None:
    """Read this rank's parts of all tensors. ``names``: as ``named_in``."""
    for name, there in names.items():
        if parameters.holds(name):
            source.fill(there, part_of(parameters, name, parameters[name].detach()))


def config_of(model: Any) -> dict[str, Any] | None:
    """The config of a model of Hugging Face; None for other models."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if not callable(to_dict):
        return None
    return {**to_dict(), "architectures": [type(model).__name__]}
