"""Objects between vertices as bytes: JSON, named arrays, or bytes as they are. Nothing is pickled."""

import io
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright.errors import JobError


def encode(value: Any, form: str) -> bytes:
    """The value as bytes of this form: ``json``, ``arrays`` (a dict of arrays, as ``.npz``) or ``bytes``. Equal values
    have equal bytes.

    Raises:
        JobError: the value does not have this form.
    """
    if form == "bytes" and isinstance(value, bytes | bytearray):
        return bytes(value)
    if form == "json":
        try:
            return msgspec.json.encode(value, order="deterministic")
        except (TypeError, msgspec.MsgspecError) as error:
            raise JobError(f"is no JSON: {error}", remedy="return numbers, texts, lists and dicts") from None
    if form == "arrays" and isinstance(value, Mapping):
        arrays = {str(name): np.asarray(array) for name, array in value.items()}
        if held := [name for name, array in arrays.items() if array.dtype.hasobject]:
            raise JobError(f"array {held[0]!r} holds Python objects", remedy="return arrays of numbers or of texts")
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        return buffer.getvalue()
    wanted = {"arrays": "a dict of arrays", "bytes": "bytes"}[form]
    raise JobError(f"is {type(value).__name__}, not {wanted}", remedy=f"return {wanted}, or change the output's form")


def decode(data: bytes, form: str) -> Any:
    """The value of bytes of this form. Raise a JobError if they are damaged."""
    try:
        if form == "json":
            return msgspec.json.decode(data)
        if form == "arrays":
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, msgspec.MsgspecError) as error:
        raise JobError(f"is not {form}: {error}", remedy="run the vertex that wrote it again") from None
    return data
