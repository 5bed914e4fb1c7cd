"""Read and write plans, clusters and other structs as JSON or TOML, with errors that name file and key."""

import difflib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
from msgspec import inspect

from meshwright.errors import FileFormatError, MeshwrightError

T = TypeVar("T", bound=msgspec.Struct)

_AT = re.compile(r"^(?P<problem>.*?)(?: - at `\$\.?(?P<key>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `([^`]+)`")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_STEP = re.compile(r"\[([^\]]*)\]|([^.\[\]]+)")
_LINE_LENGTH = 120


def encode_json(value: msgspec.Struct) -> bytes:
    """The value as JSON that people can read and diff. Each nested value is on one line if it fits, else indented.

    A type with ``to_text`` and ``from_text`` (such as ``schedule.ActionList``) is written as one string.
    """
    return (_lay_out(msgspec.to_builtins(value, str_keys=True, enc_hook=_to_file), 0) + "\n").encode()


def encode_toml(value: msgspec.Struct) -> bytes:
    """The value as TOML."""
    return msgspec.toml.encode(value, enc_hook=_to_file)


def decode(data: bytes, kind: type[T], *, where: str, toml: bool = False) -> T:
    """Decode JSON (or TOML) bytes into a struct. Unknown keys, wrong types and other format versions are errors.

    Raises:
        FileFormatError: the bytes have one of these errors. The message names ``where`` (usually a file) and the key.
        MeshwrightError: the struct's own checks refused a value. The message begins with ``where``.
    """
    try:
        raw: Any = msgspec.toml.decode(data) if toml else msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileFormatError(
            f"not valid {'TOML' if toml else 'JSON'}: {error}",
            where=where,
            remedy="restore the file or write it again",
        ) from None
    version = getattr(kind, "VERSION", None)
    if version is not None and isinstance(raw, dict):
        file_version = raw.get("version", version)
        if file_version != version:
            raise FileFormatError(
                f"version is {file_version!r}, this Meshwright reads version {version}",
                where=f"{where}: version",
                remedy="write the file again with this Meshwright, or use the one that wrote it",
            )
    try:
        # People write TOML by hand: `80e9` is a float there, and must be accepted as a number of bytes.
        return msgspec.convert(raw, kind, strict=not toml, dec_hook=_from_file)
    except msgspec.ValidationError as error:
        raise _explained(error, kind, where) from None
    except MeshwrightError as error:
        raise error.within(where) from None


def load(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Read a struct from a ``.json`` or ``.toml`` file.

    Raises:
        FileFormatError: the file is missing or is not JSON/TOML, or a key is wrong.
        MeshwrightError: the struct's own checks refused a value (see ``decode``).
    """
    return decode(read_bytes(path), kind, where=str(path), toml=Path(path).suffix == ".toml")


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of the file; raises a FileFormatError if the file cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FileFormatError(
            f"cannot read the file: {error.strerror}", where=str(path), remedy="check the path"
        ) from None


def save(value: msgspec.Struct, path: str | os.PathLike[str]) -> None:
    """Write a struct to a ``.json`` or ``.toml`` file, atomically (a reader never sees half a file)."""
    path = Path(path)
    data = encode_toml(value) if path.suffix == ".toml" else encode_json(value)
    write_if_changed(path, data)


def write_if_changed(path: Path, data: bytes) -> None:
    """Write ``data`` atomically. Write nothing if the file already holds ``data``: then a full disk causes no error."""
    if not path.is_file() or path.read_bytes() != data:
        write_atomically(path, data)


def write_atomically(path: Path, data: bytes) -> None:
    """Write to a temporary file in the same folder, then rename it to ``path``."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file in the same folder, which is renamed to ``path`` at the end of the ``with`` block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


_RESTORE = "restore the file that names it"


def way_out(folder: Path, name: str) -> str:
    """How a path that a file names leads out of a folder, in words; empty if it stays inside."""
    path = Path(name)
    try:
        if (folder / path).resolve().is_relative_to(folder.resolve()):
            return ""
    except (OSError, RuntimeError, ValueError):  # a link to itself, or a zero in the name
        return "is no path"
    if path.is_absolute():
        return "is an absolute path outside of the folder"
    return "leads out of the folder" if ".." in path.parts else "is a symbolic link out of the folder"


def inside(folder: Path, name: str) -> Path:
    """The path of a file that another file, such as a manifest, names in its own folder.

    Raises:
        FileFormatError: the name is absolute, contains ``..``, or is a symbolic link out of the folder.
    """
    if problem := way_out(folder, name):
        raise FileFormatError(f"{name!r} {problem}", where=str(folder), remedy=_RESTORE)
    check_plain(name, str(folder))
    return folder / name


def check_plain(name: str, where: str) -> None:
    """Raise a FileFormatError if a name in a folder ``where`` is empty, absolute, or contains ``..``."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise FileFormatError(f"{name!r} is no plain path in the folder", where=where, remedy=_RESTORE)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The hint ``did you mean `a` or `b`?``, then ``otherwise``. If no known word is similar to ``word``, the hint is
    ``otherwise`` alone."""
    near = difflib.get_close_matches(word, list(known), n=3)
    hint = f"did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""
    return f"{hint} {otherwise}".strip()


def _lay_out(value: Any, indent: int) -> str:
    # Encoding from the bottom up would be faster, but the depth is small and the encoder is fast.
    line = msgspec.json.format(msgspec.json.encode(value), indent=0).decode()
    if not value or not isinstance(value, dict | list | tuple) or (indent and indent + len(line) <= _LINE_LENGTH):
        return line
    inner, pad = indent + 1, " " * (indent + 1)
    if isinstance(value, dict):
        lines = [f"{pad}{msgspec.json.encode(key).decode()}: {_lay_out(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
    lines = [pad + _lay_out(item, inner) for item in value]
    return "[\n" + ",\n".join(lines) + "\n" + " " * indent + "]"


class _RefusedError(ValueError):
    """Carries a struct's own error through msgspec, which adds the path of the value to every ValueError."""

    def __init__(self, error: MeshwrightError) -> None:
        self.error = error
        super().__init__(error.problem)


def _to_file(value: Any) -> Any:
    if hasattr(value, "to_text"):
        return value.to_text()
    raise NotImplementedError(f"{type(value).__name__} has no file form")


def _from_file(kind: type[Any], value: Any) -> Any:
    if not hasattr(kind, "from_text"):
        raise NotImplementedError(f"{kind.__name__} has no file form")
    if not isinstance(value, str):
        raise TypeError(f"Expected `str`, got `{type(value).__name__}`")
    try:
        return kind.from_text(value)
    except MeshwrightError as error:
        raise _RefusedError(error) from None


def _explained(error: msgspec.ValidationError, kind: type[msgspec.Struct], where: str) -> MeshwrightError:
    match = _AT.match(str(error))
    problem, key = (match["problem"], match["key"] or "") if match else (str(error), "")
    place = f"{where}: {key}" if key else where
    if isinstance(error.__cause__, _RefusedError):
        return error.__cause__.error.within(place, ", ")
    remedy = "correct that key"
    if unknown := _UNKNOWN.search(problem):
        known = _keys_at(kind, key)
        remedy = did_you_mean(unknown[1], known, f"known keys: {', '.join(known)}")
    elif missing := _MISSING.search(problem):
        remedy = f"add `{missing[1]}`"
    return FileFormatError(problem, where=place, remedy=remedy)


def _keys_at(kind: type[msgspec.Struct], key: str) -> list[str]:
    """The keys that a struct allows at the path ``key`` (such as ``levels[0].members[1]``)."""
    here = list(alternatives(inspect.type_info(kind)))
    for index, name in _STEP.findall(key):
        there: list[inspect.Type] = []
        for node in here:
            if isinstance(node, inspect.StructType) and name:
                there += [field.type for field in node.fields if field.encode_name == name]
            elif isinstance(node, inspect.DictType):
                there.append(node.value_type)
            elif isinstance(node, inspect.TupleType) and index.isdigit():
                there += node.item_types[int(index) : int(index) + 1]
            elif isinstance(node, inspect.ListType | inspect.VarTupleType):
                there.append(node.item_type)
        here = [member for node in there for member in alternatives(node)]
    return [field.encode_name for node in here if isinstance(node, inspect.StructType) for field in node.fields]


def alternatives(node: inspect.Type) -> tuple[inspect.Type, ...]:
    """The members of a union type, or the type itself if it is no union."""
    return tuple(node.types) if isinstance(node, inspect.UnionType) else (node,)
