"""The words of a layout by sizes, such as ``dp=4,tp=8,zero=1``: reading them, and writing them for a setup."""

import shlex
from typing import Any

import msgspec

from meshwright.cost.setup import Setup, precision_on
from meshwright.errors import LayoutError
from meshwright.ir.call_text import sizes_of
from meshwright.ir.device import Device
from meshwright.ir.files import did_you_mean
from meshwright.ir.transformer import Transformer

FIELDS = tuple(name for name in Setup.__struct_fields__ if name not in ("model", "global_batch", "grid"))
"""The words of a layout. A grid of tensor-parallel ranks is a ``tp`` of three sizes, as in ``tp=2x2x4``."""
_WHERE = "--layout"


def setup_of(
    text: str, model: Transformer, global_batch: int, devices: int, device: Device, where: str = _WHERE
) -> Setup:
    """The setup that the words of ``text`` describe. Without ``dp``, the other axes share all ``devices``; without
    ``precision``, it is that of the ``device`` (``precision_on``).

    Raises:
        LayoutError: a word is unknown or given twice, the layout does not fit the model or the batch, or the device
            does not compute in its precision.
    """
    fields: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not equals or name not in FIELDS:
            words = f"words are {', '.join(FIELDS)}, as in tp=8,pp=2,zero=1"
            hint = words if name in FIELDS else did_you_mean(name, FIELDS, words)
            raise LayoutError(f"{word!r} is not a word of a layout", where=where, remedy=hint)
        if name in fields:
            raise LayoutError(f"{name} is given twice", where=where, remedy="give it once")
        known: dict[str, Any] = {"true": True, "false": False}
        fields[name] = sizes_of(value) or (int(value) if value.isdecimal() else known.get(value, value))
    setup = setup_with(fields, model, global_batch, devices, where)
    precision = precision_on(device, fields.get("precision"))
    return msgspec.structs.replace(setup, precision=precision)


def setup_with(
    fields: dict[str, Any], model: Transformer, global_batch: int, devices: int, where: str = _WHERE
) -> Setup:
    """The setup with these fields. ``tp`` may be a grid ``(x, y, z)``; ``dp`` then counts copies of the parameters.
    Without ``dp``, it is ``devices`` divided by the sizes of the other axes.

    Raises:
        LayoutError: the layout does not fit the model or the batch, or a value has the wrong type.
    """
    fields, depth, tp = dict(fields), 1, fields.get("tp", 1)
    if isinstance(tp, tuple):
        if len(tp) != 3 or min(tp) < 1:
            raise LayoutError(f"tp={tp}", where="tp", remedy="give three sizes of 1 or more, as in 2x2x4, or one")
        fields |= {"grid": tp, "tp": tp[0] * tp[1]}
        depth = tp[2]
    for name, default in _DEFAULTS.items():
        value = fields.get(name, default)
        if type(value) is not type(default):
            kind = {int: "a whole number", bool: "true or false"}.get(type(default), "a word")
            raise LayoutError(
                f"{name}={value} is not {kind}", where=where, remedy=f"write it as in {name}={str(default).lower()}"
            )
    inner = fields.get("tp", 1) * depth * fields.get("pp", 1) * fields.get("cp", 1)
    fields["dp"] = fields.get("dp", max(1, devices // max(1, inner))) * depth
    try:
        return Setup(model=model, global_batch=global_batch, **fields)
    except LayoutError as error:
        raise error.within(where) from None


def layout_words(setup: Setup) -> str:
    """The words of a setup's layout; ``setup_of`` reads them. Default values are left out, and so is ``dp``, which
    follows from the number of devices."""
    return ",".join(f"{name}={value}" for name, value in _given(setup).items()) or "tp=1"


def predict_command(setup: Setup, model: str, cluster: str, software: str = "") -> str:
    """The command line that predicts the setup. ``model``, ``cluster`` and ``software`` are names or paths."""
    words = ["meshwright", "predict", model, "--cluster", cluster]
    words += ["--software", software] * bool(software)
    words += [
        "--devices",
        str(setup.world_size),
        "--global-batch",
        str(setup.global_batch),
        "--sequence",
        str(setup.model.sequence),
    ]
    for name, value in _given(setup).items():
        option = f"--{name.replace('_', '-')}"
        words += [f"--no-{name}" if value == "false" else option] if value in ("true", "false") else [option, value]
    return shlex.join(words)


def _given(setup: Setup) -> dict[str, str]:
    values = {name: getattr(setup, name) for name in _DEFAULTS if name != "dp"}
    texts = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
        if value != _DEFAULTS[name]
    }
    return texts | ({"tp": "x".join(map(str, setup.grid))} if setup.grid else {})


_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in msgspec.structs.fields(Setup) if field.name in FIELDS
}
"""The value that each word has if it is left out."""
