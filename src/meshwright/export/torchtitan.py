"""A configuration of torchtitan 0.3, which is a Python function: written from a form, and read as a form.

Reading takes such a file (without running it), or the TOML file of versions before 0.3.
"""

import ast
from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.catalog.models import load_model
from meshwright.errors import FileFormatError, LayoutError
from meshwright.export.exported import Exported, Imported, launch, version_assumption
from meshwright.export.form import Form, microbatches_of
from meshwright.export.narrowing import Narrowing
from meshwright.export.settings import misspelled, table, whole_number, word
from meshwright.ir.layout import ZERO_STAGES, Layout, Recompute
from meshwright.ir.pipeline import ScheduleName
from meshwright.ir.transformer import Transformer

NAME, PACKAGE, VERSION, SOFTWARE = "torchtitan", "torchtitan", "0.3.0", "torchtitan-2025"
MODULE = "torchtitan_config"
FILE = f"{MODULE}.py"

MODELS = {
    "llama3-8b": ("llama3", "llama3_8b"),
    "llama3-70b": ("llama3", "llama3_70b"),
    "llama3-405b": ("llama3", "llama3_405b"),
}
"""Maps a model of the catalog to torchtitan's module and configuration function."""
FLAVORS = {"8B": "llama3-8b", "70B": "llama3-70b", "405B": "llama3-405b"}
"""Maps the flavors of the TOML files to models of the catalog."""
SCHEDULES: dict[ScheduleName, str] = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}  # fmt: skip
RECOMPUTE: dict[str, Recompute] = {
    "FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "selective", "full": "full",
    "selective": "selective", "none": "none", "memory_budget": "selective",
}  # fmt: skip

_READ = {
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree",
        "enable_sequence_parallel", "pipeline_parallel_degree", "pipeline_parallel_schedule",
        "pipeline_parallel_microbatch_size", "context_parallel_degree", "context_parallel_rotate_method",
        "expert_parallel_degree", "fsdp_reshard_after_forward", "pipeline_parallel_layers_per_stage",
    },
    "training": {"local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param", "dtype",
                 "enable_cpu_offload", "disable_cuda_graphs"},
}  # fmt: skip
_TABLES = (*_READ, "activation_checkpoint", "model", "compile")


def express(form: Form) -> Narrowing:
    """The nearest form that torchtitan can run."""
    narrow = Narrowing(form)
    narrow.common()
    narrow.schedules(*SCHEDULES)
    narrow.equal_blocks()
    narrow.without_ring()
    narrow.without_offload()
    layout = narrow.layout
    if layout.dp > 1 or layout.zero:
        known = (2, 3) if layout.ep > 1 else (0, 2, 3)
        narrow.zeros(known, "with experts" if layout.ep > 1 and layout.zero == 0 else "")
    # torchtitan's selective recomputation keeps every second product, as the predictor takes it with ZeRO 3 only.
    narrow.recomputes(("none", "selective", "full") if narrow.layout.zero == 3 else ("none", "full"), "of attention")
    narrow.as_usual_order()
    narrow.without_overlap()
    if form.precision in ("fp16", "fp8"):
        narrow.note(f"precision {form.precision}", "bf16")
        narrow.form = msgspec.structs.replace(narrow.form, precision="bf16")
    return narrow


def base_of(form: Form, base: str) -> tuple[str, str]:
    """The module and function of the configuration that the exported one changes. ``base`` is ``MODULE:FUNCTION``;
    empty: that of the form's model.

    Raises:
        LayoutError: torchtitan has no such model, or ``base`` has another form.
    """
    if not base:
        if form.model in MODELS:
            return MODELS[form.model]
        raise LayoutError(
            f"torchtitan {VERSION} has no configuration of {form.model}", where="--base",
            remedy=f"name yours, as in --base llama3:llama3_8b; known models are {', '.join(MODELS)}",
        )  # fmt: skip
    module, colon, function = base.partition(":")
    if not colon or not function.isidentifier():
        raise LayoutError(f"{base!r} is not MODULE:FUNCTION", where="--base", remedy="write llama3:llama3_8b")
    return module, function


def write(form: Form, per_node: int, base: str = "") -> Exported:
    """The configuration for the nearest form that torchtitan can run."""
    narrow = express(form)
    own = narrow.form
    layout = own.layout
    module, function = base_of(form, base)
    path = f"torchtitan.models.{module}.config_registry" if "." not in module else module
    pipelined = layout.pp > 1
    local = own.micro_batch * (layout.microbatches if pipelined else 1)
    settings: dict[str, Any] = {
        "training.local_batch_size": local,
        "training.global_batch_size": own.global_batch,
        "training.mixed_precision_param": "float32" if own.precision in ("fp32", "tf32") else "bfloat16",
        "parallelism.data_parallel_replicate_degree": layout.dp // own.sharding_ranks,
        "parallelism.data_parallel_shard_degree": own.sharding_ranks,
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.enable_sequence_parallel": layout.sequence_parallel,
        "parallelism.pipeline_parallel_degree": layout.pp,
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.expert_parallel_degree": layout.ep,
        "compile.enable": own.compiled,
    }
    if form.sizes is not None:
        settings["training.seq_len"] = form.sizes.sequence
    if layout.zero:
        settings["parallelism.fsdp_reshard_after_forward"] = "always" if layout.zero == 3 else "never"
    if pipelined:
        settings["parallelism.pipeline_parallel_schedule"] = SCHEDULES[layout.schedule]
        settings["parallelism.pipeline_parallel_microbatch_size"] = own.micro_batch
        if layout.chunks > 1 and form.sizes is not None:
            count = -(-(form.sizes.layers + 2) // (layout.pp * layout.chunks))
            settings["parallelism.pipeline_parallel_layers_per_stage"] = count
    if pipelined or layout.ep > 1:
        settings["training.disable_cuda_graphs"] = True
    lines = [f"    config.{key} = {value!r}".replace("'", '"') for key, value in settings.items()]
    kind = {"full": "FullAC", "selective": "SelectiveAC"}.get(layout.recompute, "")
    imports = [f"from torchtitan.distributed.activation_checkpoint import {kind}"] if kind else []
    imports.append(f"from {path} import {function}")
    recompute = f"{kind}.Config()" if kind else "None"
    text = "\n".join([
        f'"""{form.model} as Meshwright planned it, for torchtitan {VERSION}."""', "", *imports, "", "",
        "def exported():", f'    """The configuration {function} with another layout."""', f"    config = {function}()",
        *lines, f"    config.activation_checkpoint = {recompute}", "    return config", "",
    ])  # fmt: skip
    return Exported(
        target=NAME, form=own, files={FILE: text},
        command=launch(own.num_ranks, per_node, f"-m torchtitan.train --module {MODULE} --config exported"),
        gaps=tuple(narrow.gaps), in_code=("the folder of the file is in PYTHONPATH",),
        assumptions=version_assumption(PACKAGE, VERSION),
    )  # fmt: skip


# --- read ------------------------------------------------------------------------------------------------------------

Tables = dict[str, dict[str, Any]]


def read(text: str, where: str, num_ranks: int, model: Transformer | None) -> Imported:
    """The form that a configuration describes. ``num_ranks``: the number of ranks, which it does not say. ``model``
    replaces its model.

    Raises:
        FileFormatError: it cannot be parsed, or a value has another type.
        LayoutError: the sizes do not fit each other, or the model is unknown.
    """
    assumptions = [f"{num_ranks} ranks"]
    tables, name, unread = _of_toml(text, where) if where.endswith(".toml") else _of_python(text, where)
    training, parallel = table(tables, "training", where), table(tables, "parallelism", where)
    sequence = whole_number(training, "seq_len", 0, f"{where}: training")
    if model is None and not name:
        raise LayoutError("its model is not in the catalog", where=where, remedy="name a similar model with --model")
    sizes = model or load_model(name, sequence=sequence)
    if not sequence:
        assumptions.append(f"sequences of {sizes.sequence} tokens")

    def degree(key: str, default: int = 1, least: int = 1) -> int:
        other = () if default >= least else (default,)
        return whole_number(parallel, key, default, f"{where}: parallelism", least, other)

    tp, pp, cp, ep = (degree(f"{axis}_parallel_degree") for axis in ("tensor", "pipeline", "context", "expert"))
    replicate, shard = degree("data_parallel_replicate_degree"), degree("data_parallel_shard_degree", -1)
    dp_ranks = num_ranks // max(1, replicate * tp * pp * cp)
    shard = dp_ranks if shard == -1 else shard
    dp = replicate * shard
    if dp < 1 or dp * tp * pp * cp != num_ranks:
        raise LayoutError(
            f"dp={replicate} x {shard}, tp={tp}, pp={pp}, cp={cp} take {dp * tp * pp * cp} ranks of {num_ranks}",
            where=f"{where}: parallelism", remedy="correct a degree, or give another number of --ranks",
        )  # fmt: skip
    kinds = ("default", "always", "never")
    reshards = word(parallel, "fsdp_reshard_after_forward", "default", f"{where}: parallelism", kinds)
    zero = 0 if shard == 1 else 2 if reshards == "never" else 3
    if shard > 1 and reshards == "default" and pp > 1:
        zero = 2
    local = whole_number(training, "local_batch_size", 8, f"{where}: training")
    if "local_batch_size" not in training:
        assumptions.append("a local batch of 8 sequences, torchtitan's default")
    batch = whole_number(training, "global_batch_size", -1, f"{where}: training", other=(-1,))
    batch = local * dp if batch == -1 else batch
    micro = degree("pipeline_parallel_microbatch_size") if pp > 1 else local
    names = {text: schedule for schedule, text in SCHEDULES.items()}
    schedule: ScheduleName = "1f1b"
    if pp > 1:
        schedule = names[word(parallel, "pipeline_parallel_schedule", "1F1B", f"{where}: parallelism", names)]
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=ZERO_STAGES[zero] if dp > 1 else 0,
        zero_ranks=shard if zero and 1 < shard < dp else 0, schedule=schedule,
        chunks=_chunks(schedule, parallel, sizes, pp, where), microbatches=microbatches_of(batch, dp, micro),
        sequence_parallel=bool(parallel.get("enable_sequence_parallel", True)) and tp > 1,
        recompute=_recompute(tables, assumptions, where),
        context="ring" if cp > 1 and parallel.get("context_parallel_rotate_method") == "alltoall" else "gather",
    )  # fmt: skip
    dtypes = ("float32", "bfloat16")
    stored = word(training, "dtype", "float32", f"{where}: training", dtypes)
    low = "bfloat16" in (stored, word(training, "mixed_precision_param", "bfloat16", f"{where}: training", dtypes))
    form = Form(
        model=sizes.name, layout=layout, global_batch=batch, sizes=sizes, precision="bf16" if low else "fp32",
        compiled=bool(table(tables, "compile", where).get("enable", training.get("compile", False))),
    )  # fmt: skip
    unread += [f"parallelism.{key}" for key in parallel if key not in _READ["parallelism"]]
    unread += misspelled(training, _READ["training"], "training.") + misspelled(tables, _TABLES)
    unread += ["training.enable_cpu_offload"] if training.get("enable_cpu_offload") else []
    return Imported(source=NAME, form=form, assumptions=tuple(assumptions), unread=tuple(unread))


def _chunks(schedule: ScheduleName, parallel: dict[str, Any], sizes: Transformer, pp: int, where: str) -> int:
    if schedule in ("zb-v", "dualpipe-v"):
        return 2
    if schedule != "interleaved":
        return 1
    each = whole_number(parallel, "pipeline_parallel_layers_per_stage", 0, f"{where}: parallelism")
    return max(2, -(-(sizes.layers + 2) // each) // pp) if each else 2


def _recompute(tables: Tables, assumptions: list[str], where: str) -> Recompute:
    settings = table(tables, "activation_checkpoint", where)
    if settings.get("mode") is None:
        assumptions.append("selective recomputation, torchtitan's default")
        return "selective"
    return RECOMPUTE[word(settings, "mode", "", f"{where}: activation_checkpoint", RECOMPUTE)]


def _of_toml(text: str, where: str) -> tuple[Tables, str, list[str]]:
    """The tables of a TOML file, the name of its model in the catalog (empty: it is not there), and no unread
    settings."""
    try:
        tables = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise FileFormatError(f"not valid TOML: {error}", where=where, remedy="correct the file") from None
    if "parallelism" not in tables and "training" not in tables:
        raise FileFormatError(
            "it has neither [parallelism] nor [training]", where=where, remedy="give a configuration of torchtitan"
        )
    model = table(tables, "model", where)
    flavor = str(model.get("flavor", ""))
    return tables, FLAVORS.get(flavor, "") if str(model.get("name", "")).startswith("llama3") else "", []


def _of_python(text: str, where: str) -> tuple[Tables, str, list[str]]:
    """The settings of the last function of a file, the name of the model whose configuration it changes, and the
    settings that are not read. The file is parsed, not run: settings are read if they are literals."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise FileFormatError(f"not valid Python: {error}", where=where, remedy="correct the file") from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if not functions:
        raise FileFormatError("it has no function", where=where, remedy="give a file with a configuration function")
    models = {function: name for name, (_, function) in MODELS.items()}
    tables: Tables = {}
    model, unread = "", []
    for node in ast.walk(functions[-1]):
        if isinstance(node, ast.Call):
            called = _dotted(node.func)
            model = models.get(called, model)
            if called == "model_registry" and node.args and isinstance(node.args[0], ast.Constant):
                model = FLAVORS.get(str(node.args[0].value), model)
        for name, key, value in _settings(node):
            try:
                tables.setdefault(name, {})[key] = _kind(value) if name == _RECOMPUTE else ast.literal_eval(value)
            except (ValueError, TypeError):
                if name in _TABLES:
                    unread.append(f"{name}.{key} = {ast.unparse(value)}, which is not a literal")
    return tables, model, unread


_CONFIGS = {"TrainingConfig": "training", "ParallelismConfig": "parallelism", "CompileConfig": "compile"}
_RECOMPUTE = "activation_checkpoint"


def _settings(node: ast.AST) -> Iterator[tuple[str, str, ast.expr]]:
    """Yield the settings in a node of the syntax tree, as table, key and value: ``config.TABLE.KEY = value``, or
    ``ParallelismConfig(...)``."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        path = _dotted(node.targets[0]).split(".")[1:]
        if path == [_RECOMPUTE]:
            yield _RECOMPUTE, "mode", node.value
        elif len(path) == 2:
            yield path[0], path[1], node.value
    elif isinstance(node, ast.Call):
        name = _CONFIGS.get(_dotted(node.func))
        for keyword in node.keywords:
            if name and keyword.arg:
                yield name, keyword.arg, keyword.value
            elif keyword.arg == _RECOMPUTE:
                yield _RECOMPUTE, "mode", keyword.value


def _kind(node: ast.expr) -> str:
    """The kind of recomputation: the class of ``FullAC.Config()``, or its argument ``mode``; ``none`` for None.

    Raises:
        ValueError: the value is neither a call nor a literal.
    """
    mode = node
    if isinstance(node, ast.Call):
        modes = [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
        if not modes:
            return _dotted(node.func).partition(".")[0]
        mode = modes[0]
    value = ast.literal_eval(mode)
    return "none" if value is None else str(value)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
