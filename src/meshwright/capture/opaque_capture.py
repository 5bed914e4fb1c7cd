"""Captures a step with its opaque regions: those that the user has marked, and those that capture finds."""

import logging
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from meshwright.capture import builder
from meshwright.capture.batch import take_apart
from meshwright.capture.builder import Capture
from meshwright.capture.opaque import Opaque, OpaqueRegions, is_within, marked
from meshwright.capture.opaque_samples import can_run, sample
from meshwright.capture.opaque_trace import StandIns
from meshwright.capture.reads import Reads
from meshwright.capture.tracer import LossFunction
from meshwright.errors import CaptureError
from meshwright.ir.precision import Precision
from meshwright.ops.base import OperatorRule, Target

log = logging.getLogger("meshwright")

OpaqueChoice = Literal["", "auto"]
"""Whether capture may make modules opaque by itself."""


def capture(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    training: bool = True,
    rules: Mapping[Target, OperatorRule] | None = None,
    precision: Precision | None = None,
    opaque: OpaqueChoice = "",
    known: OpaqueRegions | None = None,
) -> Capture:
    """Capture one training step (or evaluation) of ``model``, with marked modules as opaque regions.

    If there are regions, the step's forward first runs eagerly on the batch, to learn what the regions return.
    ``opaque="auto"`` also makes each innermost module opaque whose capture fails, or the next module
    around it that can be one operator. ``known`` are the regions of an
    earlier capture: nothing is run then. The other arguments are those of ``builder.capture``.

    Raises:
        CaptureError: the step cannot be traced, or a region cannot be one operator.
    """
    if opaque not in ("", "auto"):
        raise CaptureError(f"opaque={opaque!r}", where="opaque", remedy="write 'auto', or leave it out")
    settings = known.settings if known is not None else marked(model)
    while True:
        regions = OpaqueRegions(settings, precision, {} if known is None else known.samples)
        try:
            if settings and known is None and can_run(model, leaves := take_apart(batch)):
                with Reads(model, loss_fn):  # undoes what the run changes in Python objects
                    regions.samples = sample(model, loss_fn, leaves, regions, training, precision)
            captured = builder.capture(
                model, loss_fn, batch, training=training, rules=rules, precision=precision,
                in_place=StandIns(model, regions).in_place if settings else None,
            )  # fmt: skip
        except CaptureError as error:
            path = error.module
            if path in settings and settings[path].chosen:  # it cannot be one operator: the module around it may be
                path = _around(model, path)
            if opaque != "auto" or known is not None or not path or is_within(path, settings):
                raise
            log.warning("module %s runs as an opaque region: %s", path, error.problem)
            kept = {name: setting for name, setting in settings.items() if not is_within(name, {path: None})}
            settings = {**kept, path: Opaque(chosen=error.problem)}
            continue
        captured.opaque = regions
        for path in sorted(settings.keys() - set(regions.names)) if training else ():
            log.warning("the step does not call module %s, which is marked as opaque", path)
        return captured


def _around(model: nn.Module, path: str) -> str:
    """The module that calls a submodule, as far as paths tell; empty for the model itself."""
    while path:
        path = path.rpartition(".")[0]
        if not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
            break
    return path
