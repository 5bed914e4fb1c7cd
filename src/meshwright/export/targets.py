"""The targets of exports, by name."""

from collections.abc import Callable
from pathlib import PurePath
from types import ModuleType

from meshwright.catalog.models import load_model
from meshwright.errors import FileFormatError, LayoutError
from meshwright.export import accelerate, deepspeed, megatron, torchtitan
from meshwright.export.exported import Exported, Imported
from meshwright.export.form import Form
from meshwright.export.narrowing import Narrowing
from meshwright.ir.files import did_you_mean
from meshwright.ir.transformer import Transformer

TARGETS: dict[str, ModuleType] = {module.NAME: module for module in (torchtitan, megatron, deepspeed, accelerate)}
"""Trainers that read a configuration. The target ``fsdp2`` is a Python file for one module (``export.fsdp2``)."""
FSDP2 = "fsdp2"
NAMES = (*TARGETS, FSDP2)


def target(name: str, where: str = "--to") -> ModuleType:
    """The module of a target other than ``fsdp2``; raises a LayoutError if there is no such target."""
    if name not in TARGETS:
        known = NAMES if where == "--to" else tuple(TARGETS)
        remedy = did_you_mean(name, known, f"one of {', '.join(known)}")
        raise LayoutError(f"unknown trainer {name!r}", where=where, remedy=remedy)
    return TARGETS[name]


def write(name: str, form: Form, per_node: int, base: str = "") -> Exported:
    """The configuration of a form for a target. ``per_node``: the number of devices of a machine. ``base``: the
    configuration that the exported one changes, for torchtitan."""
    if base and name != torchtitan.NAME:
        raise LayoutError(f"{name} has no base", where="--base", remedy="leave it out")
    module = target(name)
    made: Exported = module.write(form, per_node, base) if module is torchtitan else module.write(form, per_node)
    return made


def express(name: str, form: Form) -> Narrowing:
    """The nearest form that a target can run."""
    find: Callable[[Form], Narrowing] = target(name).express
    return find(form)


def read(
    text: str, where: str, num_ranks: int, model: Transformer | None, source: str = "", sequence: int = 0
) -> Imported:
    """The form that a configuration describes. ``source`` is the name of its trainer; empty: by the file's name and
    contents. ``sequence`` replaces the length of sequences.

    Raises:
        FileFormatError, LayoutError: as ``read`` of the target's module.
    """
    name = source or guessed(text, where)
    module = target(name, "--from")
    if module is torchtitan:
        return torchtitan.read(text, where, num_ranks, model, load_model)
    found: Imported = module.read(text, where, num_ranks, model)
    return found


def guessed(text: str, where: str) -> str:
    """The trainer of a configuration, by the file's suffix and its words; raises a FileFormatError if no trainer is
    known by them."""
    suffix = PurePath(where).suffix
    by_suffix = {".toml": torchtitan.NAME, ".py": torchtitan.NAME, ".yaml": accelerate.NAME, ".yml": accelerate.NAME}
    if suffix in by_suffix:
        return by_suffix[suffix]
    if suffix == ".json":
        return accelerate.NAME if '"distributed_type"' in text else deepspeed.NAME
    if "-model-parallel-size" in text or "--micro-batch-size" in text:
        return megatron.NAME
    raise FileFormatError("its trainer is not known", where=where, remedy=f"name it: --from {' or '.join(TARGETS)}")
