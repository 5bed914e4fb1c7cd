"""The targets of exports, by name."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Protocol

from meshwright.errors import FileFormatError, LayoutError
from meshwright.export import accelerate, deepspeed, megatron, torchtitan
from meshwright.export.exported import Exported, Imported
from meshwright.export.form import Form
from meshwright.export.narrowing import Narrowing
from meshwright.ir.files import did_you_mean
from meshwright.ir.transformer import Transformer


class Target(Protocol):
    """A trainer that reads a configuration. Each target is a module; its functions have docstrings there.

    ``PACKAGE`` and ``VERSION`` name the package for which exports are written, ``SOFTWARE`` its software profile."""

    NAME: str
    PACKAGE: str
    VERSION: str
    SOFTWARE: str

    def express(self, form: Form) -> Narrowing:
        """The nearest form that the trainer can run."""

    def write(self, form: Form, per_node: int) -> Exported:
        """The configuration for the nearest form. ``per_node``: the number of devices of a machine."""

    def read(self, text: str, where: str, num_ranks: int, model: Transformer | None) -> Imported:
        """The form that a configuration describes."""


TARGETS: Mapping[str, Target] = {
    torchtitan.NAME: torchtitan, megatron.NAME: megatron, deepspeed.NAME: deepspeed, accelerate.NAME: accelerate,
}  # fmt: skip
"""All targets, except ``fsdp2``: that is a Python file for one module (``export.fsdp2``)."""
FSDP2 = "fsdp2"
NAMES = (*TARGETS, FSDP2)


def target(name: str, where: str = "--to") -> Target:
    """The target of a name other than ``fsdp2``; raises a LayoutError if there is no such target."""
    if name not in TARGETS:
        known = NAMES if where == "--to" else tuple(TARGETS)
        remedy = did_you_mean(name, known, f"one of {', '.join(known)}")
        raise LayoutError(f"unknown trainer {name!r}", where=where, remedy=remedy)
    return TARGETS[name]


def check(name: str, base: str) -> None:
    """Raise a LayoutError if there is no target ``name``, or if it takes no ``base``."""
    if name != FSDP2:
        target(name)
    if base and name != torchtitan.NAME:
        raise LayoutError(f"{name} has no base", where="--base", remedy="leave it out")


def write(name: str, form: Form, per_node: int, base: str = "") -> Exported:
    """The configuration of a form for a target other than ``fsdp2``. ``per_node``: the number of devices of a machine.
    ``base``: the configuration that the exported one changes, for torchtitan."""
    check(name, base)
    if name == torchtitan.NAME:
        return torchtitan.write(form, per_node, base)
    return target(name).write(form, per_node)


def read(text: str, where: str, num_ranks: int, model: Transformer | None, source: str = "") -> Imported:
    """The form that a configuration describes. ``source`` is the name of its trainer; empty: by the file's name and
    contents.

    Raises:
        FileFormatError, LayoutError: as ``read`` of the target's module.
    """
    return target(source or guessed(text, where), "--from").read(text, where, num_ranks, model)


def guessed(text: str, where: str) -> str:
    """The trainer of a configuration, by the file's suffix and its words; raises a FileFormatError if they do not
    tell."""
    suffix = PurePath(where).suffix
    by_suffix = {".toml": torchtitan.NAME, ".py": torchtitan.NAME, ".yaml": accelerate.NAME, ".yml": accelerate.NAME}
    if suffix in by_suffix:
        return by_suffix[suffix]
    if suffix == ".json":
        return accelerate.NAME if '"distributed_type"' in text else deepspeed.NAME
    if "-model-parallel-size" in text or "--micro-batch-size" in text:
        return megatron.NAME
    raise FileFormatError("its trainer is not known", where=where, remedy=f"name it: --from {' or '.join(TARGETS)}")
