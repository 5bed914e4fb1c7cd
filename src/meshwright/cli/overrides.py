"""Put dotted options of the command line, such as ``--optimizer.lr 3e-4``, into the tables of a RUN.toml."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import typer
from msgspec import inspect

from meshwright.config import completed, structs
from meshwright.errors import FileFormatError
from meshwright.ir import files
from meshwright.ir.call_text import sizes_of
from meshwright.ir.run import Run

EXTRA: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of a command that takes dotted options in addition to its own."""


def overridden(raw: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    """The tables with ``arguments`` applied (``--section.key value`` or ``--section.key=value``).

    Raises:
        FileFormatError: a key does not exist, or cannot have that value; the error names the option.
    """
    raw = completed(raw)
    # Names and kinds decide which other keys exist, so they are set first.
    for option, text in sorted(_options(arguments), key=lambda item: not item[0].endswith((".name", ".kind"))):
        _override(raw, option, text)
    return raw


def target_of(context: typer.Context, target: str, default: str) -> tuple[str, list[str]]:
    """The target and the arguments of the run. If an option stands in the place of the target, the option is an
    argument, and the target is ``default``."""
    if target.startswith("--"):
        return default, [target, *context.args]
    return target, list(context.args)


def keys() -> Iterator[tuple[str, str, str]]:
    """Yield every dotted key of RUN.toml with its default as text, and the name of its table's variant (empty if there
    are no variants)."""
    for section in msgspec.structs.fields(Run):
        tables = structs(inspect.type_info(section.type))
        for struct in tables:
            for field in struct.fields:
                default = "" if field.default is msgspec.NODEFAULT else msgspec.json.encode(field.default).decode()
                yield f"{section.name}.{field.encode_name}", default, str(struct.tag) if struct.tag_field else ""


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The pairs (``a.b``, value) of arguments ``--a.b value`` and ``--a.b=value``."""
    words = iter(arguments)
    for word in words:
        if not word.startswith("--"):
            raise FileFormatError(
                f"unexpected argument {word!r}", where="command line", remedy="write keys as --section.key value"
            )
        name, has_value, value = word[2:].partition("=")
        text = value if has_value else next(words, None)
        if text is None:
            raise FileFormatError("has no value", where=word, remedy=f"write {word} VALUE")
        yield name, text


def _override(raw: dict[str, Any], option: str, text: str) -> None:
    here, node, steps = raw, inspect.type_info(Run), option.split(".")
    while True:
        tables = structs(node, here) or structs(node)
        if not tables:  # a table with keys that the user chooses; they may contain dots: layout.pin.blocks.*
            here[".".join(steps)] = _value(text, Any, option)
            return
        key = steps.pop(0)
        if any(key == table.tag_field for table in tables) and not steps:
            here[key] = text
            return
        kinds = [field.type for table in tables for field in msgspec.structs.fields(table.cls) if field.name == key]
        if not kinds:
            prefix = option[: len(option) - len(".".join([key, *steps]))]
            raise _unknown_option(option, [f"{prefix}{field.name}" for table in tables for field in table.fields])
        node = inspect.type_info(kinds[0])
        is_table = bool(structs(node)) or isinstance(node, inspect.DictType)
        if not steps and is_table:
            remedy = f"give one of its keys: --{option}.KEY VALUE"
            raise FileFormatError("is a table", where=f"--{option}", remedy=remedy)
        if not steps:
            here[key] = _value(text, kinds[0], option)
            return
        below = here.setdefault(key, {})
        if not is_table or not isinstance(below, dict):
            raise _unknown_option(option)
        below = here[key] = dict(below)
        here = below


def _value(text: str, kind: Any, option: str) -> Any:
    """Convert the text to the key's type. It is read as TOML, as a TOML list without brackets, as sizes such as 2x2x1,
    or as plain text."""
    candidates: list[Any] = [text, *([list(sizes_of(text))] if sizes_of(text) else [])]
    for index, toml in enumerate((text, f"[{text}]")):
        with suppress(msgspec.DecodeError):
            candidates.insert(2 * index, msgspec.toml.decode(f"value = {toml}".encode())["value"])
    problem = ""
    for candidate in candidates:
        try:
            msgspec.convert(candidate, kind, strict=False)
        except msgspec.ValidationError as error:
            problem = problem or str(error)
            continue
        return candidate
    node = inspect.type_info(kind)
    literals = [literal for literal in getattr(node, "types", (node,)) if isinstance(literal, inspect.LiteralType)]
    allowed = ", ".join(str(value) for literal in literals for value in literal.values)
    remedy = f"give one of {allowed}" if allowed else "correct the value"
    raise FileFormatError(f"{text!r}: {problem}", where=f"--{option}", remedy=remedy)


def _unknown_option(option: str, beside: Sequence[str] = ()) -> FileFormatError:
    known = list(dict.fromkeys(name for name, _, _ in keys()))
    last = option.rpartition(".")[2]
    near = [name for name in known if name.rpartition(".")[2] == last]
    hint = f"did you mean {' or '.join(f'`--{name}`' for name in near)}?" if near and option not in near else ""
    if option in known:
        hint = f"only another {option.partition('.')[0]} has it"
    hint = hint or files.did_you_mean(f"--{option}", [f"--{name}" for name in beside or known])
    remedy = hint or "`meshwright train --help` lists the keys"
    return FileFormatError("there is no such key in RUN.toml", where=f"--{option}", remedy=remedy)
