"""The catalog's models: transformers by name, family or Hugging Face config.json, and convolutional networks."""

from importlib import resources
from typing import Any

import msgspec

from meshwright.catalog.models.convolutional import load_network, network_names
from meshwright.catalog.models.hugging_face import from_config, is_config, load_config
from meshwright.errors import FileFormatError, LayoutError
from meshwright.ir import files
from meshwright.ir.transformer import Transformer

__all__ = ["family_names", "load_model", "load_network", "make_model", "model_names", "network_names"]


class ModelsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``models.toml``: the fields that the models of a family share, and the family and own fields of each model."""

    families: dict[str, dict[str, Any]]
    models: dict[str, dict[str, Any]]


def model_names() -> list[str]:
    """The names of the catalog's models."""
    return sorted(_read().models)


def family_names() -> list[str]:
    """The names of the families. The models of a family have the same norms, gates, positions and dropout."""
    return sorted(_read().families)


def load_model(name_or_path: str, *, sequence: int = 0) -> Transformer:
    """Load a model by its name, or from the path of a Hugging Face ``config.json``. ``sequence``, if not 0, replaces
    the sequence length.

    Raises:
        LayoutError: no model has that name; the message suggests similar names.
        FileFormatError: the file cannot be read, or its architecture is not a known transformer.
    """
    if is_config(name_or_path):
        model = from_config(load_config(name_or_path), where=name_or_path)
    else:
        known = _read().models
        if name_or_path not in known:
            others = f"models: {', '.join(sorted(known))}; or the path of a config.json"
            remedy = files.did_you_mean(name_or_path, [*known, *network_names()], others)
            if name_or_path in network_names():
                remedy = f"it is a convolutional network, which `meshwright plan` divides layer by layer; {others}"
            raise LayoutError(f"unknown model {name_or_path!r}", remedy=remedy)
        entry = dict(known[name_or_path])
        model = make_model(entry.pop("family"), name=name_or_path, **entry)
    return msgspec.structs.replace(model, sequence=sequence) if sequence else model


def make_model(family: str, **sizes: Any) -> Transformer:
    """A model of a family; the width of the MLP defaults to four times the width of the model.

    Raises:
        LayoutError: the family is unknown, or the sizes are impossible.
        FileFormatError: a key or a type is wrong.
    """
    known = _read().families
    if family not in known:
        remedy = files.did_you_mean(family, known, f"one of {', '.join(sorted(known))}")
        raise LayoutError(f"unknown family {family!r}", where="family", remedy=remedy)
    fields = {**known[family], **sizes}
    fields.setdefault("ffn", 4 * int(fields.get("hidden", 0)))
    try:
        return msgspec.convert(fields, Transformer)
    except msgspec.ValidationError as error:
        raise FileFormatError(str(error), where=str(sizes.get("name", family)), remedy="correct that key") from None


def _read() -> ModelsFile:
    data = resources.files(__name__).joinpath("models.toml").read_bytes()
    return files.decode(data, ModelsFile, where="catalog/models/models.toml", toml=True)
