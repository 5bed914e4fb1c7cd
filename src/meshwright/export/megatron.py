"""Arguments of Megatron-LM's ``pretrain_gpt.py``, for megatron-core 0.16: written from a form, and read as a form."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

from meshwright.cost.setup import Overlap, Precision
from meshwright.errors import FileFormatError, LayoutError
from meshwright.export.exported import Exported, Imported, launch, version_assumption
from meshwright.export.form import Form, data_ranks_of, microbatches_of
from meshwright.export.narrowing import Narrowing
from meshwright.export.settings import misspelled, word
from meshwright.ir.layout import ZERO_STAGES, Layout, Recompute
from meshwright.ir.transformer import Transformer

NAME, PACKAGE, VERSION, SOFTWARE = "megatron", "megatron-core", "0.16.1", "megatron-core"
FILE = "megatron.args"
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
"""Megatron-FSDP's strategies by ZeRO stage. Stage 1 is the distributed optimizer."""

Arguments = dict[str, str | None]
"""Maps an option to its value; None for a switch."""
_VALUES = (
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
    "expert-model-parallel-size", "num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank",
    "cp-comm-type", "data-parallel-sharding-strategy", "num-distributed-optimizer-instances", "recompute-granularity",
    "recompute-method", "recompute-num-layers", "micro-batch-size", "global-batch-size", "seq-length", "num-layers",
    "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "kv-channels", "vocab-size",
    "position-embedding-type", "num-experts", "moe-router-topk", "moe-ffn-hidden-size", "moe-layer-freq",
    "moe-shared-expert-intermediate-size", "hidden-dropout", "attention-dropout", "fp8-format",
    "make-vocab-size-divisible-by", "attention-backend", "pipeline-model-parallel-layout",
)  # fmt: skip
_SWITCHES = (
    "sequence-parallel", "use-distributed-optimizer", "use-megatron-fsdp", "overlap-grad-reduce",
    "overlap-param-gather", "tp-comm-overlap", "recompute-activations", "bf16", "fp16", "swiglu",
    "disable-bias-linear", "untie-embeddings-and-output-weights", "group-query-attention", "use-tp-pp-dp-mapping",
    "optimizer-cpu-offload", "use-precision-aware-optimizer", "no-gradient-accumulation-fusion", "use-torch-fsdp2",
)  # fmt: skip
_PARALLEL = re.compile(r"parallel|pipeline|recompute|overlap|shard|offload|fsdp|distributed-optimizer")


def express(form: Form) -> Narrowing:
    """The nearest form that Megatron can run: one-forward-one-backward pipelines, Megatron-FSDP without a pipeline."""
    narrow = Narrowing(form)
    narrow.common()
    narrow.schedules("1f1b", "interleaved")
    if form.layout.pp > 1:
        narrow.zeros((0, 1), "in a pipeline")
    narrow.recomputes(("none", "full") if narrow.layout.zero == 3 else ("none", "selective", "full"))
    if narrow.layout.offload != "none" and narrow.layout.zero != 1:
        narrow.without_offload()
    return narrow


def write(form: Form, per_node: int) -> Exported:
    """The arguments for the nearest form that Megatron can run."""
    narrow = express(form)
    arguments = {**(_model(narrow.form) if form.sizes is not None else {}), **_parallel(narrow.form)}
    lines = [f"--{key}" if value is None else f"--{key} {shlex.quote(value)}" for key, value in arguments.items()]
    in_code = (
        () if form.sizes is not None else ("the arguments of the model's sizes: --num-layers, --hidden-size, ...",)
    )
    return Exported(
        target=NAME, form=narrow.form, files={FILE: "\n".join(lines) + "\n"},
        command=launch(narrow.form.num_ranks, per_node, f"pretrain_gpt.py $(cat {FILE}) --data-path DATA"),
        gaps=tuple(narrow.gaps), in_code=in_code, assumptions=version_assumption(PACKAGE, VERSION),
    )  # fmt: skip


def _parallel(form: Form) -> Arguments:
    layout = form.layout
    arguments: Arguments = {
        "tensor-model-parallel-size": str(layout.tp),
        "pipeline-model-parallel-size": str(layout.pp),
        "context-parallel-size": str(layout.cp),
        "micro-batch-size": str(form.micro_batch),
        "global-batch-size": str(form.global_batch),
    }
    if layout.ep > 1:
        arguments["expert-model-parallel-size"] = str(layout.ep)
    if layout.sequence_parallel:
        arguments["sequence-parallel"] = None
    if layout.cp > 1:
        arguments["cp-comm-type"] = "p2p" if layout.context == "ring" else "all_gather"
    if layout.chunks > 1:
        arguments["num-virtual-stages-per-pipeline-rank"] = str(layout.chunks)
    if form.blocks:
        arguments["pipeline-model-parallel-layout"] = _stages(form.blocks)
    if form.inner == "pp":
        arguments["use-tp-pp-dp-mapping"] = None
    if layout.zero:
        arguments["use-distributed-optimizer"] = None
    if layout.zero in SHARDING:
        arguments |= {
            "use-megatron-fsdp": None, "data-parallel-sharding-strategy": SHARDING[layout.zero],
            "no-gradient-accumulation-fusion": None, "ckpt-format": "fsdp_dtensor",
        }  # fmt: skip
    if layout.zero_ranks and layout.zero_ranks < layout.dp:
        arguments["num-distributed-optimizer-instances"] = str(layout.dp // layout.zero_ranks)
    if layout.offload == "optimizer":
        arguments |= {"optimizer-cpu-offload": None, "use-precision-aware-optimizer": None}
    if layout.recompute == "full":
        arguments |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": "1"}
    elif layout.recompute == "selective":
        arguments["recompute-granularity"] = "selective"
    if form.overlap != "none":
        arguments["overlap-grad-reduce"] = None
        if layout.zero:
            arguments["overlap-param-gather"] = None
    if form.overlap == "all" and layout.sequence_parallel:
        arguments["tp-comm-overlap"] = None
    if form.precision in ("bf16", "fp16"):
        arguments[form.precision] = None
    elif form.precision == "fp8":
        arguments |= {"bf16": None, "fp8-format": "hybrid"}
    return arguments


def _stages(blocks: tuple[int, ...]) -> str:
    """The layout of unequal stages: ``E`` is the embedding, ``t`` a block, ``L`` the loss: ``Et*3|t*5L``."""
    stages = [f"t*{count}" if count else "" for count in blocks]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
    return "|".join(stages)


def _model(form: Form) -> Arguments:
    sizes = form.sizes
    assert sizes is not None, "only called with sizes"
    dropout = "0.1" if sizes.dropout else "0.0"
    arguments: Arguments = {
        "num-layers": str(sizes.layers),
        "hidden-size": str(sizes.hidden),
        "ffn-hidden-size": str(sizes.ffn),
        "num-attention-heads": str(sizes.heads),
        "kv-channels": str(sizes.head_width),
        "seq-length": str(sizes.sequence),
        "max-position-embeddings": str(sizes.sequence),
        "position-embedding-type": "rope" if sizes.rotary else "learned_absolute",
        "tokenizer-type": "NullTokenizer",
        "vocab-size": str(sizes.vocabulary),
        "hidden-dropout": dropout,
        "attention-dropout": dropout,
    }
    if sizes.kv_heads and sizes.kv_heads != sizes.heads:
        arguments |= {"group-query-attention": None, "num-query-groups": str(sizes.kv_heads)}
    if sizes.gated:
        arguments["swiglu"] = None
    if not sizes.bias:
        arguments |= {"disable-bias-linear": None, "normalization": "RMSNorm"}
    if not sizes.tied:
        arguments["untie-embeddings-and-output-weights"] = None
    if sizes.experts:
        arguments |= {"num-experts": str(sizes.experts), "moe-router-topk": str(sizes.experts_per_token)}
        arguments["moe-ffn-hidden-size"] = str(sizes.expert_ffn or sizes.ffn)
        if sizes.expert_every > 1:
            arguments["moe-layer-freq"] = str(sizes.expert_every)
        if sizes.shared_experts:
            width = sizes.shared_experts * (sizes.expert_ffn or sizes.ffn)
            arguments["moe-shared-expert-intermediate-size"] = str(width)
    arguments["attention-backend"] = "flash" if form.flash else "unfused"
    return arguments


# --- read ------------------------------------------------------------------------------------------------------------


def read(text: str, where: str, num_ranks: int, model: Transformer | None) -> Imported:
    """The form that Megatron's arguments describe. ``text`` is a file of arguments, or a shell script that has them.
    ``num_ranks``: the number of ranks, which the arguments do not say. ``model`` replaces the model's arguments.

    Raises:
        FileFormatError: an argument is missing, stands twice with different values, or is a shell variable.
        LayoutError: the sizes do not fit each other.
    """
    arguments, unread = _given(text, where)

    def number(key: str, default: int | None = None) -> int:
        value = arguments.get(key)
        if value is None:
            if default is None:
                raise FileFormatError(f"--{key} is missing", where=where, remedy=f"add --{key} NUMBER")
            return default
        if not value.isdecimal() or not int(value):
            raise FileFormatError(
                f"{value!r} is not a whole number from 1 on", where=f"{where}: --{key}", remedy="correct it"
            )
        return int(value)

    assumptions: list[str] = []
    sizes = model if model is not None else _sizes(arguments, number, where, assumptions)
    tp, pp, cp = (number(f"{key}-parallel-size", 1) for key in ("tensor-model", "pipeline-model", "context"))
    dp = data_ranks_of(num_ranks, where, tp=tp, pp=pp, cp=cp)
    zero = _zero(arguments, where) if dp > 1 else 0
    instances = number("num-distributed-optimizer-instances", 1)
    if dp % instances:
        raise LayoutError(
            f"{instances} optimizer instances do not divide dp={dp}",
            where=f"{where}: --num-distributed-optimizer-instances", remedy=f"give a divisor of {dp}",
        )  # fmt: skip
    micro = number("micro-batch-size")
    batch = number("global-batch-size", micro * dp)
    if batch % (dp * micro):
        problem = f"a global batch of {batch} does not divide over dp={dp} x micro-batches of {micro}"
        raise LayoutError(problem, where=f"{where}: --global-batch-size", remedy=f"give a multiple of {dp * micro}")
    per_stage = sizes.layers // pp
    chunks = number("num-virtual-stages-per-pipeline-rank", 1)
    if "num-layers-per-virtual-pipeline-stage" in arguments and per_stage:
        chunks = max(1, per_stage // number("num-layers-per-virtual-pipeline-stage"))
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=number("expert-model-parallel-size", 1), zero=ZERO_STAGES[zero],
        zero_ranks=dp // instances if instances > 1 else 0, chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b", recompute=_recompute(arguments, where),
        sequence_parallel="sequence-parallel" in arguments and tp > 1,
        microbatches=microbatches_of(batch, dp, micro),
        context="gather" if cp == 1 or arguments.get("cp-comm-type", "p2p") != "p2p" else "ring",
        offload="optimizer" if "optimizer-cpu-offload" in arguments else "none",
    )  # fmt: skip
    overlap: Overlap = (
        "all" if "tp-comm-overlap" in arguments else "dp" if "overlap-grad-reduce" in arguments else "none"
    )
    names: dict[str, Precision] = {"fp8-format": "fp8", "bf16": "bf16", "fp16": "fp16"}
    precision: Precision = next((name for key, name in names.items() if key in arguments), "fp32")
    form = Form(
        model=sizes.name, layout=layout, global_batch=batch, sizes=sizes, overlap=overlap, precision=precision,
        flash=arguments.get("attention-backend", "flash") != "unfused",
        inner="pp" if "use-tp-pp-dp-mapping" in arguments and pp > 1 and cp == 1 else "dp",
    )  # fmt: skip
    if "global-batch-size" not in arguments:
        assumptions.append(f"{num_ranks} ranks")
    return Imported(source=NAME, form=form, assumptions=tuple(assumptions), unread=tuple(unread))


def _given(text: str, where: str) -> tuple[Arguments, list[str]]:
    """The known arguments of a file or script, and the names of unknown ones that concern the parallel layout."""
    arguments: Arguments = {}
    unread: dict[str, None] = {}
    known = (*_VALUES, *_SWITCHES)
    for key, value in _options(text, where):
        if key not in known:
            near = misspelled([key], known, "--") or [f"--{key}"]
            if len(near[0]) > len(f"--{key}") or _PARALLEL.search(key):
                unread[near[0]] = None
            continue
        kept = value if key in _VALUES else None
        if key in _VALUES and (kept is None or "$" in kept):
            problem = "has no value" if kept is None else f"is the shell variable {kept}"
            raise FileFormatError(f"--{key} {problem}", where=where, remedy="write the value itself")
        if arguments.get(key, kept) != kept:
            raise FileFormatError(f"--{key} is {arguments[key]} and {kept}", where=where, remedy="give it once")
        arguments[key] = kept
    if not arguments:
        raise FileFormatError("it has no argument of Megatron", where=where, remedy="give arguments of pretrain_gpt.py")
    return arguments, list(unread)


def _options(text: str, where: str) -> Iterator[tuple[str, str | None]]:
    """Yield the options of a text, each with the word after it, if that is no option."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    try:
        words = [word.strip("()") for word in shlex.split("\n".join(lines), comments=True)]
    except ValueError as error:
        raise FileFormatError(f"it cannot be read: {error}", where=where, remedy="close the quotes") from None
    for index, option in enumerate(words):
        if not option.startswith("--"):
            continue
        key, equals, value = option[2:].partition("=")
        after = words[index + 1] if index + 1 < len(words) else "--"
        yield key, value if equals else None if after.startswith("--") else after


def _sizes(arguments: Arguments, number: Any, where: str, assumptions: list[str]) -> Transformer:
    width, heads = number("hidden-size"), number("num-attention-heads")
    gated = "swiglu" in arguments
    if "vocab-size" not in arguments:
        raise FileFormatError(
            "the size of the vocabulary is in the tokenizer", where=where,
            remedy="add --vocab-size NUMBER, or name the model with --model",
        )  # fmt: skip
    rotary = arguments.get("position-embedding-type", "learned_absolute") != "learned_absolute"
    experts = number("num-experts", 0) if "num-experts" in arguments else 0
    expert_ffn = number("moe-ffn-hidden-size", 0) if "moe-ffn-hidden-size" in arguments else 0
    shared = number("moe-shared-expert-intermediate-size") if "moe-shared-expert-intermediate-size" in arguments else 0
    ffn = number("ffn-hidden-size", 4 * width)
    head = number("kv-channels", max(1, width // heads))
    expert_every = arguments.get("moe-layer-freq") or "1"
    if not expert_every.isdecimal() or not int(expert_every):
        assumptions.append(f"experts in every layer, because --moe-layer-freq is not a number: {expert_every}")
        expert_every = "1"
    dropout = arguments.get("hidden-dropout") or "0.1"
    try:
        drops = float(dropout) > 0
    except ValueError:
        raise FileFormatError(
            f"{dropout!r} is not a number", where=f"{where}: --hidden-dropout", remedy="write a number from 0 to 1"
        ) from None
    return Transformer(
        name="megatron model", layers=number("num-layers"), hidden=width, heads=heads, ffn=ffn,
        vocabulary=number("vocab-size"), sequence=number("seq-length"), gated=gated,
        kv_heads=number("num-query-groups", heads) if "group-query-attention" in arguments else 0,
        head_size=head if head * heads != width else 0, bias="disable-bias-linear" not in arguments, rotary=rotary,
        dropout=drops, tied="untie-embeddings-and-output-weights" not in arguments,
        experts=experts, experts_per_token=number("moe-router-topk", 2) if experts else 0,
        expert_ffn=expert_ffn if expert_ffn != ffn else 0, expert_every=int(expert_every),
        shared_experts=shared // (expert_ffn or ffn) if experts else 0,
    )  # fmt: skip


def _zero(arguments: Arguments, where: str) -> int:
    if "use-torch-fsdp2" in arguments:
        return 3
    if "use-megatron-fsdp" in arguments:
        stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        return stages[word(arguments, "data-parallel-sharding-strategy", "no_shard", where, stages)]
    return int("use-distributed-optimizer" in arguments)


def _recompute(arguments: Arguments, where: str) -> Recompute:
    if "recompute-activations" in arguments:
        return "selective"
    kinds: dict[str, Recompute] = {"full": "full", "selective": "selective", "": "none"}
    return kinds[word(arguments, "recompute-granularity", "", where, ("full", "selective"))]
