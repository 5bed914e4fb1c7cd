"""DeepSpeed's JSON configuration, for version 0.19: written from a form, and read as a form."""

from typing import Any

import msgspec

from meshwright.errors import FileFormatError, LayoutError
from meshwright.export.exported import Exported, Imported, launch, version_assumption
from meshwright.export.form import Form, data_ranks_of, microbatches_of
from meshwright.export.narrowing import Narrowing
from meshwright.export.settings import misspelled, table, whole_number
from meshwright.ir.layout import ZERO_STAGES, Layout
from meshwright.ir.transformer import Transformer

NAME, PACKAGE, VERSION, SOFTWARE = "deepspeed", "deepspeed", "0.19.8", "deepspeed"
FILE = "ds_config.json"

_KNOWN = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization",
    "bf16", "fp16", "tensor_parallel", "pipeline", "sequence_parallel_size", "data_parallel_size",
    "activation_checkpointing",
}  # fmt: skip
_PARALLEL = {"moe", "hybrid_engine", "compile", "curriculum_learning", "communication_data_type", "autotuning"}


def express(form: Form) -> Narrowing:
    """The nearest form that DeepSpeed can run: 1F1B pipelines, AutoTP, Ulysses for long sequences, and ZeRO."""
    narrow = Narrowing(form)
    narrow.common()
    narrow.schedules("1f1b")
    narrow.equal_blocks()
    if narrow.layout.context == "ring":
        narrow.without_ring()
    if narrow.layout.cp > 1:
        if narrow.layout.pp > 1 or narrow.layout.tp != 1:
            narrow.without("cp")
        else:
            narrow.note(
                f"context parallel cp{narrow.layout.cp}", "Ulysses: all-to-alls of heads; predicted as context parallel"
            )
    narrow.without_sequence_parallel()
    if narrow.layout.pp > 1:
        if narrow.layout.tp != 1:
            narrow.without("tp")
        narrow.zeros((0, 1), "in a pipeline")
    elif narrow.layout.tp != 1:
        narrow.zeros((0, 1, 2), "with AutoTP")
    narrow.without_sharing_groups()
    narrow.recomputes(("none", "full"))
    if narrow.layout.zero == 0:
        narrow.without_offload()
    narrow.as_usual_order()
    narrow.without_overlap()
    return narrow


def write(form: Form, per_node: int) -> Exported:
    """The configuration for the nearest form that DeepSpeed can run."""
    narrow = express(form)
    own = narrow.form
    layout = own.layout
    config: dict[str, Any] = {
        "train_batch_size": own.global_batch,
        "train_micro_batch_size_per_gpu": own.micro_batch,
        "gradient_accumulation_steps": layout.microbatches,
        "gradient_clipping": 0.0,  # DeepSpeed clips to a norm of 1 otherwise
        "zero_optimization": {"stage": layout.zero, "overlap_comm": own.overlap != "none"},
    }
    if layout.zero:  # otherwise DeepSpeed refuses optimizers that are not among its own few
        config["zero_allow_untested_optimizer"] = True
    if layout.offload == "optimizer":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if own.precision in ("bf16", "fp16"):
        config[own.precision] = {"enabled": True}
    in_code = ["deepspeed.initialize(model=..., config=...)"]
    if layout.tp != 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.pp > 1:
        config["pipeline"] = {"stages": layout.pp, "partition": "uniform"}
        in_code.append(f"PipelineModule(layers, num_stages={layout.pp})")
    if layout.cp > 1:
        config |= {"sequence_parallel_size": layout.cp, "data_parallel_size": layout.dp}
        in_code.append(f"UlyssesSPAttentionHF.register_with_transformers(..., sequence_parallel_size={layout.cp})")
    if layout.ep > 1:
        in_code.append(f"layers of deepspeed.moe.layer.MoE(..., ep_size={layout.ep})")
    if layout.recompute == "full":
        config["activation_checkpointing"] = {"partition_activations": False}
        in_code.append("model.gradient_checkpointing_enable(), or deepspeed.checkpointing.checkpoint in each block")
    if own.precision == "fp8":
        in_code.append("layers of Transformer Engine for fp8")
    text = msgspec.json.format(msgspec.json.encode(config)).decode() + "\n"
    return Exported(
        target=NAME, form=own, files={FILE: text},
        command=launch(own.num_ranks, per_node, f"train.py --deepspeed --deepspeed_config {FILE}"),
        gaps=tuple(narrow.gaps), in_code=tuple(in_code), assumptions=version_assumption(PACKAGE, VERSION),
    )  # fmt: skip


# --- read ------------------------------------------------------------------------------------------------------------


def read(text: str, where: str, num_ranks: int, model: Transformer | None) -> Imported:
    """The form that a DeepSpeed configuration describes. ``num_ranks``: the number of ranks, which the file does not
    say. ``model``: the sizes of the model, which the file does not say either.

    Raises:
        FileFormatError: the text is not JSON, or a value has another type.
        LayoutError: the sizes do not fit each other.
    """
    config = _decoded(text, where)
    zero_table = table(config, "zero_optimization", where)
    stage = whole_number(zero_table, "stage", 0, f"{where}: zero_optimization", least=0)
    if stage > 3:
        raise FileFormatError(f"stage {stage}", where=f"{where}: zero_optimization", remedy="give 0, 1, 2 or 3")
    tensor = table(config, "tensor_parallel", where)
    tp = whole_number(tensor, "autotp_size", 1, f"{where}: tensor_parallel", least=0) or 1
    assumptions = [f"{num_ranks} ranks"]
    pipeline = table(config, "pipeline", where)
    if pipeline.get("stages") == "auto":
        assumptions.append('one pipeline stage, because pipeline.stages is "auto"')
        pipeline = {**pipeline, "stages": 1}
    pp = whole_number(pipeline, "stages", 1, f"{where}: pipeline")
    cp = whole_number(config, "sequence_parallel_size", 1, where)
    dp = data_ranks_of(num_ranks, where, tp=tp, pp=pp, cp=cp)
    steps, batch = _batch(config, dp, where, assumptions)
    recompute = "activation_checkpointing" in config
    if recompute:
        assumptions.append("every block is recomputed, because the file has activation_checkpointing")
    offload = table(zero_table, "offload_optimizer", f"{where}: zero_optimization").get("device", "none")
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, zero=ZERO_STAGES[stage] if dp > 1 else 0, microbatches=steps,
        recompute="full" if recompute else "none", offload="optimizer" if offload in ("cpu", "nvme") else "none",
    )  # fmt: skip
    enabled = [key for key in ("bf16", "fp16") if table(config, key, where).get("enabled") in (True, "auto")]
    form = Form(
        model=model.name if model else "model", layout=layout, global_batch=batch, sizes=model,
        precision="bf16" if "bf16" in enabled else "fp16" if enabled else "fp32",
        overlap="dp" if zero_table.get("overlap_comm") else "none",
    )  # fmt: skip
    unread = [key for key in config if key in _PARALLEL]
    unread += misspelled(config, _KNOWN)
    unread += [
        f"zero_optimization.{key}" for key in zero_table if key.startswith(("offload_param", "mics", "zero_hpz"))
    ]
    return Imported(source=NAME, form=form, assumptions=tuple(assumptions), unread=tuple(unread))


def _batch(config: dict[str, Any], dp: int, where: str, assumptions: list[str]) -> tuple[int, int]:
    """The number of micro-batches, and the samples of a step. Of these and the samples of a micro-batch, DeepSpeed
    derives the third from two, and takes 1 for values that are missing."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, steps, batch = (0 if config.get(name) == "auto" else whole_number(config, name, 0, where) for name in names)
    if any(config.get(name) == "auto" for name in names):
        assumptions.append('1 for each size of the batch that is "auto"')
    if batch and not micro:
        steps = steps or 1
        micro = batch // (dp * steps)
    elif batch and not steps:
        steps = batch // (dp * micro)
    micro, steps = micro or 1, steps or 1
    batch = batch or micro * steps * dp
    if micro * steps * dp != batch:
        raise LayoutError(
            f"train_batch_size={batch}, but {micro} x {steps} micro-batches x dp={dp} = {micro * steps * dp}",
            where=where, remedy="correct one of them, or give another number of --ranks",
        )  # fmt: skip
    return microbatches_of(batch, dp, micro), batch


def _decoded(text: str, where: str) -> dict[str, Any]:
    """The JSON object of a text; raises a FileFormatError if the text is something else."""
    try:
        config = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise FileFormatError(f"not valid JSON: {error}", where=where, remedy="correct the file") from None
    if not isinstance(config, dict):
        raise FileFormatError("it is not a JSON object", where=where, remedy="write {...}")
    return config
