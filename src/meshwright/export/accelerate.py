"""Accelerate's YAML configuration, for version 1.15: written from a form, and read as a form."""

from typing import Any

import msgspec

from meshwright.cost.setup import Precision
from meshwright.errors import FileFormatError, LayoutError
from meshwright.export.exported import Exported, Imported, version_assumption
from meshwright.export.form import Form, microbatches_of
from meshwright.export.narrowing import Narrowing
from meshwright.export.settings import misspelled, table, whole_number, word
from meshwright.ir.layout import ZERO_STAGES, Layout
from meshwright.ir.transformer import Transformer

NAME, PACKAGE, VERSION, SOFTWARE = "accelerate", "accelerate", "1.15.0", "hugging-face"
FILE = "accelerate.yaml"

_FSDP = "fsdp_config"
_PARALLELISM = "parallelism_config"
_PREFIX = "parallelism_config_"
_KNOWN = ("distributed_type", "mixed_precision", "num_processes", _FSDP, _PARALLELISM)
_PRECISIONS: dict[str, Precision] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}


def express(form: Form) -> Narrowing:
    """The nearest form that accelerate can run: FSDP2 (also in groups), Transformers' tensor parallelism, and context
    parallelism by PyTorch."""
    narrow = Narrowing(form)
    narrow.common()
    narrow.without("pp")
    narrow.without_experts()
    narrow.without_sequence_parallel()
    narrow.without_offload()
    narrow.recomputes(("none", "full"))
    narrow.as_usual_order()
    narrow.without_overlap()
    layout = narrow.layout
    if layout.cp > 1 and layout.tp != 1 and layout.dp == 1:
        narrow.without("cp")
    split = narrow.layout.tp != 1 or narrow.layout.cp > 1
    if narrow.layout.dp > 1:
        narrow.zeros((2, 3) if split else (0, 2, 3), "beside tp or cp" if split and narrow.layout.zero == 0 else "")
    return narrow


def write(form: Form, per_node: int) -> Exported:
    """The configuration for the nearest form that accelerate can run."""
    narrow = express(form)
    own = narrow.form
    layout = own.layout
    nodes = -(-own.num_ranks // max(1, per_node))
    sharded = layout.zero > 0 or layout.cp > 1 or layout.tp != 1
    is_parallel = own.num_ranks > 1
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if layout.zero or layout.cp > 1 else "MULTI_GPU" if is_parallel else "NO",
        "mixed_precision": own.precision if own.precision in ("bf16", "fp16", "fp8") else "no",
        "num_machines": nodes,
        "num_processes": own.num_ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
    }
    if nodes > 1:
        config |= {"main_process_ip": "HOST", "main_process_port": 29500, "rdzv_backend": "static"}
    if config["distributed_type"] == "FSDP":
        config[_FSDP] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": layout.zero != 2,
            "fsdp_offload_params": False,
            "fsdp_activation_checkpointing": layout.recompute == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if sharded:
        shard = own.sharding_ranks
        config[_PARALLELISM] = {
            f"{_PREFIX}dp_replicate_size": layout.dp // shard,
            f"{_PREFIX}dp_shard_size": shard,
            f"{_PREFIX}tp_size": layout.tp,
            f"{_PREFIX}cp_size": layout.cp,
        }
        if layout.cp > 1:
            strategy = "alltoall" if layout.context == "ring" else "allgather"
            config[_PARALLELISM][f"{_PREFIX}cp_comm_strategy"] = strategy
    in_code = [f"DataLoader(..., batch_size={own.micro_batch})"]
    if layout.microbatches > 1:
        in_code.append(f"Accelerator(gradient_accumulation_steps={layout.microbatches})")
    if layout.recompute == "full" and config["distributed_type"] != "FSDP":
        in_code.append("model.gradient_checkpointing_enable()")
    if layout.tp != 1:
        in_code.append(f'from_pretrained(..., tp_size={layout.tp}, tp_plan="auto")')
    return Exported(
        target=NAME, form=own, files={FILE: yaml_text(config)},
        command=f"accelerate launch --config_file {FILE} train.py", gaps=tuple(narrow.gaps), in_code=tuple(in_code),
        assumptions=version_assumption(PACKAGE, VERSION),
    )  # fmt: skip


def yaml_text(config: dict[str, Any], indent: str = "") -> str:
    """Nested tables of texts, numbers and booleans as YAML. JSON's way to write these values is YAML's too."""
    lines = []
    for key, value in config.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{yaml_text(value, indent + '  ')}")
        else:
            plain = isinstance(value, str) and value.replace("_", "").isalpha() and value not in ("no", "NO")
            lines.append(f"{indent}{key}: {value if plain else msgspec.json.encode(value).decode()}\n")
    return "".join(lines)


# --- read ------------------------------------------------------------------------------------------------------------


def read(text: str, where: str, num_ranks: int, model: Transformer | None) -> Imported:
    """The form that a configuration of accelerate describes. ``num_ranks`` replaces its number of processes, if it is
    not 0. The file has no batch: it is one sample on each data-parallel rank.

    Raises:
        FileFormatError: the text is not YAML, or a value has another type; or PyYAML is missing.
        LayoutError: the sizes do not fit each other.
    """
    config = _decoded(text, where)
    assumptions = ["a batch of one sample on each data-parallel rank"]
    ranks = num_ranks or whole_number(config, "num_processes", 1, where)
    section = table(config, _PARALLELISM, where)
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
    replicate, shard, tp, cp = (
        whole_number(section, f"{_PREFIX}{name}", 1, f"{where}: {_PARALLELISM}") for name in names
    )
    fsdp = table(config, _FSDP, where)
    kind = config.get("distributed_type")
    if kind not in ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO"):
        raise FileFormatError(
            f"distributed_type is {kind!r}", where=where,
            remedy="give FSDP or MULTI_GPU here, and a DeepSpeed configuration by itself",
        )  # fmt: skip
    reshards = fsdp.get("fsdp_reshard_after_forward", True)
    strategy = fsdp.get("fsdp_sharding_strategy")
    if replicate * shard * tp * cp == 1:
        shard = ranks if kind == "FSDP" else 1
        replicate = ranks // shard
    dp = replicate * shard
    if dp * tp * cp != ranks:
        raise LayoutError(
            f"its sizes are for {dp * tp * cp} ranks, and there are {ranks}", where=f"{where}: {_PARALLELISM}",
            remedy="correct a size, num_processes, or --ranks",
        )  # fmt: skip
    by_half = reshards in (False, "false", "SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") or strategy in (2, "SHARD_GRAD_OP")
    zero = 0 if kind != "FSDP" or dp == 1 else 2 if by_half else 3
    rotated = section.get(f"{_PREFIX}cp_comm_strategy", "allgather") == "alltoall"
    layout = Layout(
        dp=dp, tp=tp, cp=cp, zero=ZERO_STAGES[zero], zero_ranks=shard if zero and 1 < shard < dp else 0,
        recompute="full" if fsdp.get("fsdp_activation_checkpointing") else "none",
        context="ring" if rotated and cp > 1 else "gather", microbatches=microbatches_of(dp, dp, 1),
    )  # fmt: skip
    form = Form(
        model=model.name if model else "model", layout=layout, global_batch=dp, sizes=model,
        precision=_PRECISIONS[word(config, "mixed_precision", "no", where, _PRECISIONS)],
    )  # fmt: skip
    unread = [f"{_FSDP}.{key}" for key, value in fsdp.items() if key == "fsdp_offload_params" and value]
    unread += misspelled(config, _KNOWN)
    unread += [key for key in ("deepspeed_config", "megatron_lm_config", "fp8_config") if config.get(key)]
    return Imported(source=NAME, form=form, assumptions=tuple(assumptions), unread=tuple(unread))


def _decoded(text: str, where: str) -> dict[str, Any]:
    try:
        config = msgspec.yaml.decode(text)
    except ImportError:
        raise FileFormatError(
            "YAML cannot be read without PyYAML", where=where, remedy="pip install 'meshwright[export]'"
        ) from None
    except msgspec.DecodeError as error:
        raise FileFormatError(f"not valid YAML: {error}", where=where, remedy="correct the file") from None
    if not isinstance(config, dict):
        raise FileFormatError("it is not a table of YAML", where=where, remedy="write `key: value`")
    bare = {"distributed_type": "NO", "mixed_precision": "no"}  # YAML reads both words as false, if they are not quoted
    return config | {key: text for key, text in bare.items() if config.get(key) is False}
