"""Read tables of measured training steps, with one row per run.

Rows with errors are left out, with the reason.
"""

import csv
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from meshwright.catalog import load_cluster, load_software
from meshwright.catalog.models import make_model
from meshwright.cost.memory import estimate_memory, verdict
from meshwright.cost.setup import Setup
from meshwright.cost.step import estimate_step
from meshwright.errors import ClusterError, FileFormatError, LayoutError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.pipeline import SCHEDULES, V_SHAPED

COLUMNS: dict[str, str] = {
    "case": "The name of the row in the result.",
    "source": "Where the measurement is from. Not read.",
    "cluster": "A name of `meshwright clusters`, DEVICE-BOX-FABRIC, or a .toml file.",
    "devices": "Devices of the run: dp x cp x tp x pp.",
    "family": "What models of the family share: one of `meshwright models --families`.",
    "layers": "Transformer layers.",
    "hidden": "Width of the model.",
    "ffn": "Width of the MLP. Blank: four times the hidden size.",
    "heads": "Attention heads.",
    "kv_heads": "Heads of keys and values. Blank or 0: as many as heads.",
    "vocab": "Vocabulary, as padded.",
    "seq": "Tokens of a sequence.",
    "tp": "Tensor-parallel size. Blank: 1.",
    "pp": "Pipeline stages. Blank: 1.",
    "dp": "Data-parallel size. Blank: what is left of the devices.",
    "cp": "Context-parallel size. Blank: 1.",
    "ep": "Expert-parallel size. Blank: 1.",
    "virtual_stages": "Model chunks of each pipeline rank. Blank: 1; with zb-v and dualpipe-v 2.",
    "micro_batch": "Sequences of a micro-batch on one replica. Blank: the planner picks the fastest that fits.",
    "global_batch": "Sequences of a step.",
    "schedule": f"One of {', '.join(SCHEDULES)}. Blank: 1f1b.",
    "recompute": "none, selective (the attention core; with zero 3 every other product too) or full. Blank: none.",
    "sequence_parallel": "0 or 1. Blank: 0.",
    "zero": "0, 1, 2 or 3 (fully sharded). Blank: 0.",
    "precision": "fp32, tf32, bf16, fp16 or fp8. Blank: bf16.",
    "flash": "1: attention is one fused kernel; 0: scores go through memory. Blank: 0.",
    "tied_embeddings": "1: embedding and vocabulary head share their matrix. Blank: as the family.",
    "step_time_s": "Measured seconds of a step. Blank where it ran out of memory, or only peak_memory_bytes is known.",
    "peak_memory_bytes": "Measured peak of a device. May be blank.",
    "status": "ok or oom. Blank: ok.",
}
"""Maps each required column of a table to a description of its values."""

OPTIONAL: dict[str, str] = {
    "head_size": "Width of a head, where it is not hidden / heads.",
    "gated": "1: the MLP has a gate (SwiGLU).",
    "experts": "Experts of a layer. Blank: 0, dense layers.",
    "experts_per_token": "Experts that a token visits.",
    "expert_every": "Every so many layers have experts. Blank: 1.",
    "expert_ffn": "Width of an expert. Blank: ffn.",
    "shared_experts": "Experts that every token visits. Blank: 0.",
    "compiled": "1: the model's own operations are fused (torch.compile). Blank: 0.",
    "inner": "Which of dp and pp has its ranks nearer to each other: dp or pp. Blank: dp.",
    "software": "A name of `meshwright clusters --software`, or a .toml file. Blank: as the table is read, or unknown.",
    "overlap": "What of communication runs beside compute: none, dp, or all (tp and pp too). Blank: none.",
}
"""Maps each optional column of a table to a description of its values."""


SPARSE = ("deepseek", "gshard")
"""Families whose models have different numbers of experts, so that a row must give the number."""

SPELLINGS = {
    "schedule": {
        "zb-1p": "zb-h1", "zb-2p": "zb-h2", "zbv": "zb-v", "dualpipev": "dualpipe-v",
        "1f1b-interleaved": "interleaved", "1f1b-i": "interleaved", "interleaved-1f1b": "interleaved",
    },
    "precision": {
        "float32": "fp32", "tfloat32": "tf32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float8": "fp8",
    },
}  # fmt: skip
"""Maps a column to other spellings of its values that are accepted. Upper and lower case are equal."""


_MEANINGS = COLUMNS | OPTIONAL


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a table: its setup, its cluster and its measurements. ``named`` is the text in the column of the
    cluster: a name or a file. ``measured_s`` is None if no time was measured or the run ran out of memory.
    ``measured_peak_bytes`` is None if no peak was measured."""

    name: str
    setup: Setup
    cluster: Cluster
    measured_s: float | None
    measured_peak_bytes: float | None
    out_of_memory: bool
    named: str = ""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A row that was left out, with the reason."""

    case: str
    line: int
    reason: str


def read_cases(path: str | os.PathLike[str], software: str = "") -> tuple[list[Case], list[LeftOut]]:
    """Read a table (see ``COLUMNS``). Return the usable rows, and the rows that were left out. ``software`` is the
    profile of rows that name no profile.

    Raises:
        FileFormatError: the file cannot be read, is empty, or lacks columns.
    """
    where = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise FileFormatError(f"cannot read the file: {problem}", where=where, remedy="check the path") from None
    reader = csv.DictReader(text.splitlines())
    header = [name.strip() for name in reader.fieldnames or []]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        akin = [hint for name in missing for hint in [files.did_you_mean(name, header)] if hint]
        raise FileFormatError(
            f"no column {', '.join(missing)}",
            where=where,
            remedy=f"add {'it' if len(missing) == 1 else 'them'}; a cell may be blank. {' '.join(akin[:1])}".strip(),
        )
    reader.fieldnames = header
    if software:
        load_software(software)  # raises an error once, not for every row
    cases, left_out, cluster_of = [], [], functools.cache(_cluster)
    for line, row in enumerate(reader, start=2):
        name = (row.get("case") or "").strip() or f"line {line}"
        try:
            cells = {key: (row.get(key) or "").strip() for key in header}
            cells["software"] = cells.get("software") or software
            cases.append(_case(name, cells, cluster_of))
        except MeshwrightError as error:
            place = f"{error.where}: " if error.where else ""
            left_out.append(LeftOut(case=name, line=line, reason=f"{place}{error.problem}; {error.remedy}"))
    return cases, left_out


def pick_micro_batch(make: Callable[[int], Setup], largest: int, cluster: Cluster) -> Setup:
    """The setup with the fastest micro-batch size that fits in the devices' memory. If no size fits, the setup with
    size 1. ``make`` returns the setup for a given micro-batch size. Candidate sizes are the powers of two that divide
    ``largest``."""
    weighed: list[tuple[tuple[bool, float], Setup]] = []
    size = 1
    while largest % size == 0:
        setup = make(size)
        fits = verdict(estimate_memory(setup, cluster), cluster) != "does not fit"
        weighed.append(((not fits, estimate_step(setup, cluster).step_s if fits else float(size)), setup))
        if not fits:
            break  # larger micro-batches need more memory
        size *= 2
    return min(weighed, key=lambda pair: pair[0])[1]


def _cluster(name: str, devices: int, software: str) -> Cluster:
    """The named cluster with ``devices`` devices and this software. If the cluster is open-ended and needs several
    boxes, the number of devices is rounded up to whole boxes."""
    box = load_cluster(name, software=software or None)
    unit = box.num_devices
    return box.resized(math.ceil(devices / unit) * unit if box.open_ended and devices > unit else devices)


def _case(name: str, row: dict[str, str], cluster_of: Callable[[str, int, str], Cluster]) -> Case:
    status = row["status"].lower() or "ok"
    if status not in ("ok", "oom"):
        raise FileFormatError(f"{status!r} is neither ok nor oom", where="status", remedy="give one of them")
    devices = _whole(row, "devices")
    if not row["cluster"]:
        raise ClusterError("no cluster is named", where="cluster", remedy="give a name of `meshwright clusters`")
    cluster = cluster_of(row["cluster"], devices, row["software"])
    sizes: dict[str, Any] = {
        "name": name,
        **{key: _whole(row, key) for key in ("layers", "hidden", "heads")},
        "kv_heads": _whole(row, "kv_heads", 0, least=0),
        "vocabulary": _whole(row, "vocab", least=0),
        "sequence": _whole(row, "seq"),
    }
    words = ("gated", "compiled", "overlap", "inner", "software")
    sizes |= {key: _whole(row, key) for key in ("ffn", *OPTIONAL) if row.get(key) and key not in words}
    sizes |= {
        key: _flag(row, column) for key, column in (("tied", "tied_embeddings"), ("gated", "gated")) if row.get(column)
    }
    model = make_model(row["family"].lower(), **sizes)
    if row["family"].lower() in SPARSE and not model.experts:
        raise FileFormatError(
            f"a model of the family {row['family']} has experts, and the row does not say how many",
            where="experts",
            remedy="add the columns experts and experts_per_token",
        )
    axes = {axis: _whole(row, axis, 1) for axis in ("tp", "pp", "cp")}
    rest = devices // math.prod(axes.values())
    dp = _whole(row, "dp", max(1, rest))
    if dp * math.prod(axes.values()) != devices:
        product = " x ".join(f"{axis}={size}" for axis, size in ({"dp": dp} | axes).items())
        raise LayoutError(f"{product} are not {devices} devices", where="devices", remedy="correct one of them")
    global_batch = _whole(row, "global_batch")

    def make(micro_batch: int) -> Setup:
        usual = {"schedule": "1f1b", "recompute": "none", "precision": "bf16", "overlap": "none", "inner": "dp"}
        words = {key: _word(row, key, default) for key, default in usual.items()}
        chunks = _whole(row, "virtual_stages", 2 if words["schedule"] in V_SHAPED else 1)
        fields: dict[str, Any] = {
            **axes, **words, "ep": _whole(row, "ep", 1), "chunks": chunks,
            "sequence_parallel": _flag(row, "sequence_parallel"), "zero": _whole(row, "zero", 0, least=0),
            "flash": _flag(row, "flash"), "compiled": _flag(row, "compiled"),
        }  # fmt: skip
        return Setup(model=model, dp=dp, micro_batch=micro_batch, global_batch=global_batch, **fields)

    if row["micro_batch"]:
        setup = make(_whole(row, "micro_batch"))
    else:
        make(1)  # raises an error if a size does not divide
        setup = pick_micro_batch(make, global_batch // dp, cluster)
    measured_s = _seconds(row, "step_time_s")
    if status == "ok" and measured_s is None and not row["peak_memory_bytes"]:
        raise FileFormatError("there is no time", where="step_time_s", remedy="give seconds, or status oom")
    return Case(
        name=name,
        setup=setup,
        cluster=cluster,
        measured_s=measured_s if status == "ok" else None,
        measured_peak_bytes=_seconds(row, "peak_memory_bytes"),
        out_of_memory=status == "oom",
        named=row["cluster"],
    )


def _whole(row: dict[str, str], key: str, default: int | None = None, *, least: int = 1) -> int:
    text = row.get(key, "")
    if not text and default is not None:
        return default
    value = _number(text)
    if not value.is_integer() or value < least:
        raise FileFormatError(
            f"{text!r} is not a whole number of {least} or more" if text else "it is blank",
            where=key,
            remedy=_MEANINGS[key],
        )
    return int(value)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _word(row: dict[str, str], key: str, default: str) -> str:
    text = row.get(key, "").lower() or default
    return SPELLINGS.get(key, {}).get(text, text)


def _flag(row: dict[str, str], key: str) -> bool:
    text = row.get(key, "").lower()
    if text not in ("", "0", "1", "false", "true", "no", "yes"):
        raise FileFormatError(f"{text!r} is neither 0 nor 1", where=key, remedy=_MEANINGS[key])
    return text in ("1", "true", "yes")


def _seconds(row: dict[str, str], key: str) -> float | None:
    text = row[key]
    if not text:
        return None
    value = _number(text)
    if not (0 < value < math.inf):
        raise FileFormatError(f"{text!r} is not a number above 0", where=key, remedy="give it without a unit")
    return value
