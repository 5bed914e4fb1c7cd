"""The batch of a step as leaves: their order, their paths, and which of them are tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwright.errors import DataError
from meshwright.torch_private import pytree


@dataclass(frozen=True)
class Leaves:
    """The leaves of a batch. ``names`` are their paths (``batch.label``), which also name the graph's inputs."""

    values: list[Any]
    spec: pytree.TreeSpec
    names: list[str]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by name."""
        return {name: value for name, value in zip(self.names, self.values, strict=True) if isinstance(value, Tensor)}

    @property
    def others(self) -> dict[int, Any]:
        """The leaves that are not tensors (numbers, texts), by position: constants of the step."""
        return {index: value for index, value in enumerate(self.values) if not isinstance(value, Tensor)}

    @property
    def size(self) -> int:
        """The batch size: the length of dim 0 of the first tensor that has a dim.

        Raises:
            DataError: the batch has no such tensor.
        """
        for value in self.values:
            if isinstance(value, Tensor) and value.dim():
                return int(value.shape[0])
        raise DataError("the batch holds no tensor", where="batch", remedy="pass tensors whose dim 0 is the batch")

    def without_values(self) -> "Leaves":
        """Return the same leaves with meta tensors, which hold no memory."""
        values = [value.to("meta") if isinstance(value, Tensor) else value for value in self.values]
        return Leaves(values, self.spec, self.names)

    def with_tensors(self, tensors: list[Tensor]) -> Any:
        """Return the batch with its tensors replaced by ``tensors``, in order."""
        given = iter(tensors)
        values = [next(given) if isinstance(value, Tensor) else value for value in self.values]
        return pytree.tree_unflatten(values, self.spec)


def take_apart(batch: Any) -> Leaves:
    """Return the leaves of a batch. A batch is a tree of dicts, lists and tuples. Mappings of other classes, such as a
    tokenizer's ``BatchEncoding``, become dicts.

    Raises:
        DataError: a leaf is an array but not a tensor.
    """
    leaves, spec = pytree.tree_flatten_with_path(as_dicts(batch))
    names = [f"batch{_path(path)}" for path, _ in leaves]
    for name, (_, value) in zip(names, leaves, strict=True):
        if not isinstance(value, Tensor) and hasattr(value, "__array__") and value.ndim:
            raise DataError(
                f"it is a {type(value).__module__}.{type(value).__name__}, whose values the step would take for "
                "constants",
                where=name,
                remedy="pass tensors: torch.as_tensor(...)",
            )
    return Leaves([value for _, value in leaves], spec, names)


def as_dicts(batch: Any) -> Any:
    """Return the batch with every mapping as a plain dict."""

    def convert(value: Any) -> Any:
        return {key: as_dicts(item) for key, item in value.items()} if _is_mapping(value) else value

    return pytree.tree_map(convert, batch, is_leaf=_is_mapping)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and type(value) not in pytree.SUPPORTED_NODES


def _path(path: Any) -> str:
    return "".join(str(pytree.keystr((part,))).replace("['", ".").replace("']", "") for part in path)
