"""Fits a form to another trainer: replaces each part that the trainer cannot express, and names the replacement."""

import math
from collections.abc import Collection
from typing import Any

import msgspec

from meshwright.export.form import Form, microbatches_of
from meshwright.ir.layout import Layout, Recompute
from meshwright.ir.pipeline import ScheduleName

NO_CODECS = {"codec": "", "parameter_codec": "", "activation_codec": ""}


class Gap(msgspec.Struct, frozen=True):
    """A part of a plan that a target cannot express (``what``), and its nearest replacement (``nearest``)."""

    what: str
    nearest: str


class Narrowing:
    """A form that is being fitted to a target. Each method replaces one part that the target cannot express."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.gaps: list[Gap] = []

    @property
    def layout(self) -> Layout:
        """The layout after the replacements until now."""
        return self.form.layout

    def note(self, what: str, nearest: str) -> None:
        """Add a gap that does not change the form."""
        self.gaps.append(Gap(what, nearest))

    def replace(self, what: str, nearest: str, **changes: Any) -> None:
        """Change fields of the layout, and add the gap."""
        self.note(what, nearest)
        self.form = msgspec.structs.replace(self.form, layout=msgspec.structs.replace(self.layout, **changes))

    def common(self, *, keeps_pins: bool = False) -> None:
        """Replace all parts that no target has. ``keeps_pins``: the target splits single modules."""
        layout = self.layout
        codecs = [text for text in (layout.codec, layout.parameter_codec, layout.activation_codec) if text]
        if layout.codec == "none":
            self.form = msgspec.structs.replace(self.form, layout=msgspec.structs.replace(layout, codec=""))
        elif codecs:
            self.replace(f"codec {' and '.join(codecs)}", "values are sent unchanged", **NO_CODECS)
        if layout.replicas > 1:
            dp = layout.dp * layout.replicas
            nearest = f"dp{dp}, and gradients are averaged in every step"
            self.replace(
                f"{layout.replicas} replicas under {layout.consistency}", nearest, dp=dp, replicas=1, consistency="sync"
            )
        if isinstance(layout.tp, tuple):
            self._flatten_grid(layout.tp)
        for name in ("spatial", "mixed"):
            sizes = getattr(layout, name)
            if max(sizes, default=1) > 1:
                self._fold(name, sizes, divides_parameters=False)
        if layout.stage_zero:
            nearest = f"zero={layout.zero} in all stages"
            self.replace(f"ZeRO stages {'/'.join(map(str, layout.stage_zero))}", nearest, stage_zero=())
        if layout.stage_sizes:
            self._level_stages()
        if layout.workspace_bytes:
            nearest = "the framework's own choice of algorithms"
            self.replace("a limit on workspace", nearest, workspace_bytes=0, workspace_over="operator")
        if layout.zero == -1:
            stage = 3 if layout.pp == 1 else 1
            self.replace("a ZeRO stage for each parameter", f"zero={stage} for all", zero=stage)
        if self.form.splits and not keeps_pins:
            names = ", ".join(self.form.splits[:4]) + ", ..." * (len(self.form.splits) > 4)
            self.note(f"splits of single modules ({names})", "the target's own tensor parallelism")
        if layout.pin and not keeps_pins:
            self.replace(f"pins of {', '.join(layout.pin)}", "the target's own tensor parallelism", pin={})

    def schedules(self, *known: ScheduleName) -> None:
        """Replace a schedule that the target does not have: with several chunks by ``interleaved``, else by 1F1B."""
        layout = self.layout
        if layout.pp == 1 or layout.schedule in known:
            return
        nearest: ScheduleName = "interleaved" if layout.chunks > 1 and "interleaved" in known else "1f1b"
        if nearest == "interleaved" and layout.microbatches % layout.pp:
            nearest = "1f1b"
        chunks = layout.chunks if nearest == "interleaved" else 1
        self.replace(f"schedule {layout.schedule}", nearest, schedule=nearest, chunks=chunks, in_flight=0)

    def equal_blocks(self) -> None:
        """Replace stages with different numbers of blocks by equal stages."""
        if self.form.blocks:
            counts = " and ".join(map(str, self.form.blocks))
            self.note(f"stages of {counts} blocks", "stages of equal numbers of blocks")
            self.form = msgspec.structs.replace(self.form, blocks=())

    def without(self, axis: str) -> None:
        """Give the ranks of an axis (pp, cp or tp) to data parallelism."""
        size = getattr(self.layout, axis)
        if size > 1:
            self._fold(axis, (size,), divides_parameters=axis != "cp")

    def without_experts(self) -> None:
        """Replace expert parallelism: all data-parallel ranks share the parameters of experts."""
        if self.layout.ep > 1:
            nearest = f"zero=3 over dp{self.layout.dp}: experts are gathered for each use"
            self.replace(f"expert parallelism ep{self.layout.ep}", nearest, ep=1, zero=3, zero_ranks=0)

    def zeros(self, known: Collection[int], reason: str = "") -> None:
        """Replace a ZeRO stage that the target does not have by the next higher stage, else by the highest."""
        zero = self.layout.zero
        if zero in known:
            return
        nearest = min((stage for stage in known if stage >= zero), default=max(known))
        what = f"zero={zero}{f' {reason}' if reason else ''}"
        if self.layout.dp == 1:
            nearest = 0
        self.replace(what, f"zero={nearest}", zero=nearest, **({} if nearest else {"zero_ranks": 0}))

    def recomputes(self, known: Collection[Recompute], reason: str = "") -> None:
        """Replace a kind of recomputation that the target does not have by ``full``."""
        kind = self.layout.recompute
        if kind not in known:
            self.replace(f"recompute {kind}{f' {reason}' if reason else ''}", "recompute full", recompute="full")

    def without_ring(self) -> None:
        """Replace ring attention by a gather of keys and values."""
        if self.layout.context == "ring":
            self.replace("ring attention", "keys and values are gathered", context="gather")

    def without_sharing_groups(self) -> None:
        """Replace groups of ranks that share state (``zero_ranks``) by all data-parallel ranks."""
        if self.layout.zero_ranks:
            what = f"state shared in groups of {self.layout.zero_ranks} ranks"
            self.replace(what, f"shared by all {self.layout.dp} data-parallel ranks", zero_ranks=0)

    def without_offload(self) -> None:
        """Replace optimizer state on the host by state on the device."""
        if self.layout.offload != "none":
            self.replace("optimizer state on the host", "optimizer state on the device", offload="none")

    def without_sequence_parallel(self) -> None:
        """Replace sequence parallelism by all-reduces."""
        if self.layout.sequence_parallel:
            self.replace("sequence parallel", "whole sequences outside of split layers", sequence_parallel=False)

    def as_usual_order(self) -> None:
        """Replace dp as the outermost axis by pp as the outermost axis."""
        if self.form.inner == "pp":
            self.note("pp inside of dp", "dp inside of pp")
            self.form = msgspec.structs.replace(self.form, inner="dp")

    def without_overlap(self) -> None:
        """Replace the overlap of communication inside layers by the overlap of data-parallel communication."""
        if self.form.overlap == "all":
            self.note("overlap of all communication", "overlap of data-parallel communication")
            self.form = msgspec.structs.replace(self.form, overlap="dp")

    def _flatten_grid(self, grid: tuple[int, int, int]) -> None:
        x, y, z = grid
        tp, dp = x * y, self.layout.dp * z
        zero = 3 if z > 1 else self.layout.zero
        nearest = f"tp{tp}" + f" x dp{dp}, zero=3" * (z > 1)
        self.replace(f"a grid of tensor-parallel ranks {x}x{y}x{z}", nearest, tp=tp, dp=dp, zero=zero)
        self._divide_batch()

    def _level_stages(self) -> None:
        layout = self.layout
        ranks, pp = layout.num_ranks, layout.pp
        tp = max(own.get("tp", 1) for own in layout.stage_sizes)
        each, rest = divmod(ranks, pp)
        while rest == 0 and each % tp:
            tp -= 1
        what = f"stages of {' and '.join(str(own) for own in layout.stage_sizes)}"
        if rest:
            self.replace(what, f"dp{ranks}, zero=3", stage_sizes=(), pp=1, tp=1, dp=ranks, zero=3, chunks=1)
        else:
            nearest = f"{pp} equal stages of dp{each // tp} x tp{tp}"
            self.replace(what, nearest, stage_sizes=(), dp=each // tp, tp=tp)
        self._divide_batch()

    def _fold(self, name: str, sizes: tuple[int, ...], *, divides_parameters: bool) -> None:
        """Give the ranks of an axis to dp. If the axis divided parameters, data-parallel ranks then share them."""
        layout = self.layout
        dp = layout.dp * math.prod(sizes)
        zero = 3 if divides_parameters else layout.zero
        changes: dict[str, Any] = {name: 1 if isinstance(getattr(layout, name), int) else (), "dp": dp, "zero": zero}
        if name == "pp":
            changes |= {"chunks": 1, "schedule": "1f1b", "in_flight": 0, "zero_ranks": 0}
            self.form = msgspec.structs.replace(self.form, blocks=(), inner="dp")
        elif name == "cp":
            changes["context"] = "gather"
        elif name == "tp":
            changes["sequence_parallel"] = False
        nearest = f"dp{dp}" + f", zero={zero}" * (zero != layout.zero)
        self.replace(f"{name}{'x'.join(map(str, sizes))}", nearest, **changes)
        self._divide_batch()

    def _divide_batch(self) -> None:
        """Set the number of micro-batches after dp has changed. Micro-batches keep their size if they can."""
        layout, batch = self.layout, self.form.global_batch
        own = max(1, batch // max(1, layout.data_ranks))
        if layout.data_ranks * layout.microbatches <= batch and own % layout.microbatches == 0:
            micro = own // layout.microbatches
        else:
            micro = 1
        count = microbatches_of(batch, layout.data_ranks, micro)
        changed = msgspec.structs.replace(layout, microbatches=count)
        self.form = msgspec.structs.replace(self.form, layout=changed)
