"""Captures a step in which some modules are opaque regions: modules that the user marked, and with ``opaque="auto"``
modules whose capture fails."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec
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
    agree: Callable[[str], str] = lambda own: own,
) -> Capture:
    """Capture one training step (or evaluation) of ``model``, with marked modules as opaque regions.

    If there are regions, the step's forward first runs eagerly on the batch, which shows the results of the regions.
    ``opaque="auto"`` also makes each innermost module opaque whose capture fails. If it cannot be one operator, the
    module around it becomes opaque. ``known`` are the regions of an earlier capture; nothing is run then. ``agree``
    takes this rank's verdicts on regions and returns rank 0's, because ranks may have different parameters. The other
    arguments are those of ``builder.capture``.

    Raises:
        CaptureError: the step cannot be traced, or a region cannot be one operator.
    """
    if opaque not in ("", "auto"):
        raise CaptureError(f"opaque={opaque!r}", where="opaque", remedy="write 'auto', or leave it out")

    def traced(regions: OpaqueRegions) -> Capture:
        in_place = StandIns(model, regions).in_place if regions.settings else None
        return builder.capture(
            model, loss_fn, batch, training=training, rules=rules, precision=precision, in_place=in_place
        )

    settings = known.settings if known is not None else marked(model)
    samples = known.samples if known is not None else {}
    while True:
        regions = OpaqueRegions(settings, precision, {key: samples[key] for key in samples if key[0] in settings})
        try:
            if settings and known is None and can_run(model, leaves := take_apart(batch)):
                with Reads(model, loss_fn):  # undoes what the run changes in Python objects
                    samples = regions.samples = sample(model, loss_fn, leaves, regions, training, precision)
            captured = traced(regions)
        except CaptureError as error:
            path = error.module
            region = next((name for name in settings if is_within(path, {name: None})), "") if path else ""
            if region and settings[region].chosen:  # it is not called, or cannot be one operator: try the module around
                path = _around(model, region)
            if opaque != "auto" or known is not None or not path or is_within(path, settings):
                raise
            log.warning("module %s runs as an opaque region: %s", path, error.problem)
            kept = {name: setting for name, setting in settings.items() if not is_within(name, {path: None})}
            settings = {**kept, path: Opaque(chosen=error.problem)}
            continue
        if known is None and regions.samples and (verdicts := agree(own := _verdicts(regions))) != own:
            _take_over(regions, verdicts)
            captured = traced(regions)
        captured.opaque = regions
        for path in sorted(settings.keys() - set(regions.names)) if training else ():
            log.warning("the step does not call module %s, which is marked as opaque", path)
        return captured


def _around(model: nn.Module, path: str) -> str:
    """The path of the module that probably calls a submodule: the next one around it that is not a list or dict of
    modules. Empty for the model itself."""
    while path:
        path = path.rpartition(".")[0]
        if not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
            break
    return path


def _verdicts(regions: OpaqueRegions) -> str:
    """Which calls may be split by samples, as text."""
    rows = [(*key, call.rows, call.result_rows, call.reason) for key, call in regions.samples.items()]
    return msgspec.json.encode(rows).decode()


def _take_over(regions: OpaqueRegions, verdicts: str) -> None:
    """Put the verdicts of another rank in place of this rank's."""
    for path, number, rows, result_rows, reason in msgspec.json.decode(verdicts):
        if (call := regions.samples.get((path, number))) is not None:
            verdict = {"rows": tuple(rows), "result_rows": tuple(result_rows), "reason": reason}
            regions.samples[path, number] = replace(call, **verdict)
