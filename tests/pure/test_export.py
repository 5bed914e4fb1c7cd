"""Configurations of other trainers: what is written, what is read back, what cannot be expressed, and bad input."""

from __future__ import annotations

import ast
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.catalog import load_cluster
from meshwright.catalog.models import load_model
from meshwright.cost.setup import Setup
from meshwright.errors import FileFormatError, LayoutError, MeshwrightError
from meshwright.export import megatron, targets, torchtitan
from meshwright.export.advice import advise, changes
from meshwright.export.by_sizes import export_sizes
from meshwright.export.exported import Exported, launch
from meshwright.export.form import Form
from meshwright.ir.layout import Layout
from meshwright.ir.pipeline import ScheduleName

LLAMA = load_model("llama3-8b")
TARGETS = tuple(targets.TARGETS)


def setup(**fields: Any) -> Setup:
    return Setup(**{"model": LLAMA, "global_batch": 64, "micro_batch": 1, **fields})


def exported(name: str, **fields: Any) -> Exported:
    return targets.write(name, Form.of_setup(setup(**fields)), 8)


def text_of(export: Exported) -> str:
    (text,) = export.files.values()
    return text


def read(name: str, export: Exported) -> Form:
    (file,) = export.files
    model = None if name in ("torchtitan", "megatron") else LLAMA
    return targets.read(text_of(export), file, export.form.num_ranks, model, name).form


def whats(export: Exported) -> list[str]:
    return [gap.what for gap in export.gaps]


# --- round trips -----------------------------------------------------------------------------------------------------


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Setups of Llama 3 8B, most of which no target but Megatron can express as they are."""
    size = st.sampled_from([1, 2, 4])
    dp, tp, pp, cp = (draw(size) for _ in range(4))
    micro = draw(st.sampled_from([1, 2]))
    schedules: list[ScheduleName] = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] if pp > 1 else ["1f1b"]
    schedule = draw(st.sampled_from(schedules))
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    return Setup(
        model=LLAMA, dp=dp, tp=tp, pp=pp, cp=cp, micro_batch=micro, global_batch=64 * dp * micro, schedule=schedule,
        chunks=chunks, zero=draw(st.integers(0, 3)) if dp > 1 else 0, sequence_parallel=tp > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        precision=draw(st.sampled_from(["fp32", "bf16"])),
        overlap=draw(st.sampled_from(["none", "dp"])),
    )  # fmt: skip


@given(setups())
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", TARGETS)
def test_what_was_exported_is_read_back(name: str, wanted: Setup) -> None:
    export = targets.write(name, Form.of_setup(wanted), 8)
    form = read(name, export)
    if name == "accelerate":  # its file has no batch, and recomputation only beside FSDP
        own = export.form.layout
        recompute = form.layout.recompute if "fsdp_config" in text_of(export) else own.recompute
        layout = msgspec.structs.replace(form.layout, microbatches=own.microbatches, recompute=recompute)
        form = msgspec.structs.replace(form, layout=layout, global_batch=export.form.global_batch)
    fields = ("layout", "global_batch", "precision")
    assert [getattr(form, field) for field in fields] == [getattr(export.form, field) for field in fields]


@given(setups())
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", TARGETS)
def test_the_nearest_form_has_the_same_ranks_and_batch_and_can_be_exported_as_it_is(name: str, wanted: Setup) -> None:
    export = targets.write(name, Form.of_setup(wanted), 8)
    assert (export.form.num_ranks, export.form.global_batch) == (wanted.world_size, wanted.global_batch)
    assert export.form.micro_batch >= 1
    again = targets.write(name, export.form, 8)
    assert again.form == export.form
    assert [gap for gap in again.gaps if "Ulysses" not in gap.nearest] == []


def test_megatrons_arguments_hold_the_whole_model() -> None:
    form = read("megatron", exported("megatron", tp=2, dp=2))
    assert form.sizes == msgspec.structs.replace(LLAMA, name="megatron model", source="", head_size=0)
    moe = load_model("mixtral-8x7b")
    export = targets.write("megatron", Form.of_setup(Setup(model=moe, dp=8, ep=8, global_batch=8)), 8)
    again = targets.read(text_of(export), "megatron.args", 8, None).form
    assert again.sizes is not None
    assert (again.sizes.experts, again.sizes.experts_per_token, again.layout.ep) == (8, 2, 8)
    assert again.sizes.parameters == moe.parameters


# --- what is written -------------------------------------------------------------------------------------------------


def test_torchtitans_file_sets_every_degree() -> None:
    text = text_of(exported("torchtitan", dp=2, tp=4, pp=2, zero=3, recompute="full", sequence_parallel=True))
    ast.parse(text)
    for line in (
        "config = llama3_8b()", "config.parallelism.data_parallel_shard_degree = 2",
        "config.parallelism.data_parallel_replicate_degree = 1", "config.parallelism.tensor_parallel_degree = 4",
        "config.parallelism.pipeline_parallel_degree = 2", 'config.parallelism.pipeline_parallel_schedule = "1F1B"',
        "config.training.local_batch_size = 32", "config.training.disable_cuda_graphs = True",
        "config.activation_checkpoint = FullAC.Config()",
    ):  # fmt: skip
        assert f"    {line}\n" in text


def test_deepspeeds_file_has_the_three_sizes_of_a_batch() -> None:
    config = json.loads(text_of(exported("deepspeed", dp=4, zero=2, micro_batch=2, overlap="dp")))
    assert config == {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8,
        "gradient_clipping": 0.0, "zero_optimization": {"stage": 2, "overlap_comm": True},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }  # fmt: skip


def test_a_command_starts_all_ranks() -> None:
    assert launch(16, 8, "train.py").startswith("torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d")
    assert launch(4, 8, "train.py") == "torchrun --nnodes 1 --nproc-per-node 4 --standalone train.py"
    assert "--nnodes 2 --nproc-per-node 6 " in launch(12, 8, "train.py")


# --- what cannot be expressed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "gap", "nearest"),
    [
        ("torchtitan", {"dp": 2, "zero": 1}, "zero=1", {"zero": 2}),
        ("torchtitan", {"pp": 4, "schedule": "zb-h1"}, "schedule zb-h1", {"schedule": "1f1b"}),
        ("megatron", {"pp": 2, "schedule": "zb-v", "chunks": 2}, "schedule zb-v", {"schedule": "interleaved"}),
        ("megatron", {"dp": 2, "pp": 2, "zero": 3}, "zero=3 in a pipeline", {"zero": 1}),
        ("deepspeed", {"tp": 2, "dp": 2, "zero": 3}, "zero=3 with AutoTP", {"zero": 2}),
        ("deepspeed", {"tp": 2, "sequence_parallel": True}, "sequence parallel", {"sequence_parallel": False}),
        ("accelerate", {"pp": 4, "dp": 2}, "pp4", {"pp": 1, "dp": 8, "zero": 3}),
        ("accelerate", {"dp": 2, "codec": "qsgd(4)"}, "codec qsgd(4)", {"codec": ""}),
    ],
)  # fmt: skip
def test_a_gap_is_named_and_closed_by_the_nearest(
    name: str, fields: dict[str, Any], gap: str, nearest: dict[str, Any]
) -> None:
    export = exported(name, **fields)
    assert gap in whats(export)
    assert {key: getattr(export.form.layout, key) for key in nearest} == nearest


@pytest.mark.parametrize(
    ("layout", "gap"),
    [
        (Layout(dp=2, cp=2, context="ring"), "ring attention"),
        (Layout(dp=2, tp=(2, 2, 2)), "a grid of tensor-parallel ranks 2x2x2"),
        (Layout(spatial=(2, 2)), "spatial2x2"),
        (Layout(mixed=(4,)), "mixed4"),
        (Layout(dp=2, zero=-1), "a ZeRO stage for each parameter"),
        (Layout(pp=2, stage_sizes=({"dp": 2}, {"tp": 2})), "stages of {'dp': 2} and {'tp': 2}"),
        (Layout(dp=2, pp=2, microbatches=2, zero=1, stage_zero=(1, 0)), "ZeRO stages 1/0"),
        (Layout(dp=2, replicas=2, consistency="local(16)"), "2 replicas under local(16)"),
        (Layout(tp=2, pin={"head": "none@tp"}), "pins of head"),
        (Layout(dp=2, zero=3, offload="optimizer"), "optimizer state on the host"),
        (Layout(workspace_bytes=100), "a limit on workspace"),
    ],
)
def test_what_only_we_have_is_named(layout: Layout, gap: str) -> None:
    form = Form(model="m", layout=layout, global_batch=16)
    narrowing = torchtitan.express(form)
    assert gap in [each.what for each in narrowing.gaps]
    assert narrowing.layout.num_ranks == max(form.num_ranks, form.layout.num_ranks * layout.replicas)
    assert narrowing.form.global_batch % (narrowing.layout.data_ranks * narrowing.layout.microbatches) == 0
    assert torchtitan.express(narrowing.form).gaps == []


def test_splits_by_other_factors_are_named() -> None:
    form = Form(model="m", layout=Layout(tp=2), global_batch=4, splits=("embed", "norm"))
    assert whats(targets.write("deepspeed", form, 8)) == ["splits of single modules (embed, norm)"]


def test_unequal_stages_are_megatrons_own() -> None:
    form = Form(model="m", layout=Layout(pp=3), global_batch=4, blocks=(3, 5, 0))
    export = targets.write("megatron", form, 8)
    assert "--pipeline-model-parallel-layout 'Et*3|t*5|L'\n" in text_of(export)
    assert whats(targets.write("deepspeed", form, 8)) == ["stages of 3 and 5 and 0 blocks"]


def test_both_forms_are_predicted_with_one_software() -> None:
    machine = load_cluster("h100-dgx-ndr400x8", 8)
    export = export_sizes("accelerate", LLAMA, machine, global_batch=64, layout="pp=2,tp=4,sequence_parallel=true")
    assert export.planned is not None
    assert export.predicted is not None
    assert export.planned.step_s != export.predicted.step_s
    assert export.own_software == "hugging-face"
    same = export_sizes("megatron", LLAMA, machine, global_batch=64, layout="tp=4,zero=1")
    assert same.planned == same.predicted
    assert not same.gaps


# --- advice ----------------------------------------------------------------------------------------------------------

SLOW_TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
global_batch_size = 32
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 1
tensor_parallel_degree = 4
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
[activation_checkpoint]
mode = "full"
"""


def test_advice_is_faster_in_the_trainers_own_terms() -> None:
    advice = advise(SLOW_TOML, "train.toml", load_cluster("h100-dgx-ndr400x8", 8))
    assert (advice.setup.tp, advice.setup.pp, advice.setup.recompute, advice.software) == (
        4,
        2,
        "full",
        "torchtitan-2025",
    )
    assert advice.setup.model.sequence == 4096
    assert advice.best is not None
    assert advice.best.prediction.step_s < advice.prediction.step_s
    assert advice.best.setup.global_batch == advice.setup.global_batch
    assert not advice.best.export.gaps
    assert {change.what for change in advice.best.changes.differences} >= {"tp", "pp"}
    again = targets.read(text_of(advice.best.export), "torchtitan_config.py", 8, None)
    assert again.form.setup() == advice.best.setup


def test_changes_leave_out_what_no_pipeline_has() -> None:
    old, new = setup(dp=8, zero=1), setup(dp=4, tp=2, zero=1, schedule="gpipe")
    assert [(each.what, each.old, each.new) for each in changes(old, new).differences] == [
        ("dp", "8", "4"), ("tp", "1", "2"), ("micro-batches", "8", "16"),
    ]  # fmt: skip


# --- bad input -------------------------------------------------------------------------------------------------------


MEGATRON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 --vocab-size 100"
)
TITAN = "[parallelism]\n"


@pytest.mark.parametrize(
    ("text", "file", "problem"),
    [
        ("--micro-batch-size $MBS --num-layers 2", "run.sh", "--micro-batch-size is the shell variable $MBS"),
        ("--micro-batch-size 1 --micro-batch-size 2", "run.sh", "--micro-batch-size is 1 and 2"),
        ("--micro-batch-size 'x", "run.sh", "it cannot be read"),
        ("--tensor-model-parallel-size two --hidden-size 8", "run.sh", "is missing"),
        ("echo --foo", "run.sh", "its trainer is not known"),
        ("[parallelism\n", "a.toml", "not valid TOML"),
        ("[a]\nb = 1", "a.toml", "it has neither [parallelism] nor [training]"),
        ("def f(:", "a.py", "not valid Python"),
        ("x = 1", "a.py", "it has no function"),
        ("{", "a.json", "not valid JSON"),
        ("[1]", "a.json", "it is not a JSON object"),
        ('{"zero_optimization": {"stage": 5}}', "a.json", "stage 5"),
        ('{"zero_optimization": 3}', "a.json", "3 is not a table"),
        ('{"train_batch_size": -4}', "a.json", "-4 is not a whole number"),
        ('{"train_batch_size": 7, "gradient_accumulation_steps": 2}', "a.json", "train_batch_size=7"),
        ('{"pipeline": {"stages": 0}}', "a.json", "pipeline: stages: 0 is not a whole number"),
        ('{"pipeline": {"stages": "two"}}', "a.json", "pipeline: stages: 'two' is not a whole number"),
        ('{"sequence_parallel_size": 0}', "a.json", "sequence_parallel_size: 0 is not a whole number"),
        ("distributed_type: FSDP\nmixed_precision: bf61", "a.yaml", "mixed_precision: 'bf61' is not known"),
        (f"{MEGATRON} --hidden-dropout abc", "run.sh", "--hidden-dropout: 'abc' is not a number"),
        (f"{MEGATRON} --recompute-granularity ful", "run.sh", "recompute-granularity: 'ful' is not known"),
        (f"{MEGATRON} --num-distributed-optimizer-instances 3", "run.sh", "3 optimizer instances do not divide dp=8"),
        (f"{TITAN}pipeline_parallel_degree = 2\npipeline_parallel_schedule = ['a']", "a.toml", "['a'] is not known"),
        (f"{TITAN}fsdp_reshard_after_forward = 'alway'", "a.toml", "'alway' is not known"),
        (f"{TITAN}tensor_parallel_degree = -1", "a.toml", "-1 is not a whole number"),
        (f"training = 3\n{TITAN}", "a.toml", "3 is not a table"),
        (f"{TITAN}[activation_checkpoint]\nmode = 'ful'", "a.toml", "mode: 'ful' is not known"),
        ("distributed_type: TPU", "a.yaml", "distributed_type is 'TPU'"),
        ("a: [", "a.yaml", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_by_name(text: str, file: str, problem: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        targets.read(text, file, 8, LLAMA if not file.endswith(".sh") else None)
    assert problem in f"{caught.value}"
    assert file in f"{caught.value}"
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "file", "unread"),
    [
        (f"{MEGATRON} --tensor-model-paralel-size 2", "run.sh",
         "--tensor-model-paralel-size, which looks like --tensor-model-parallel-size"),
        ('{"zero_optimisation": {"stage": 3}}', "a.json", "zero_optimisation, which looks like zero_optimization"),
        ("distributed_type: NO\nmixed_precison: bf16", "a.yaml", "mixed_precison, which looks like mixed_precision"),
        (f"{TITAN}[traning]\nseq_len = 8", "a.toml", "traning, which looks like training"),
        (f"{TITAN}[training]\nglobal_batchsize = 8", "a.toml",
         "training.global_batchsize, which looks like training.global_batch_size"),
        ("def f():\n  config.parallelism.tensor_parallel_degree = -n\n  config.metrics.freq = n", "a.py",
         "parallelism.tensor_parallel_degree = -n, which is not a literal"),
        ("def f():\n  config.activation_checkpoint = kind", "a.py",
         "activation_checkpoint.mode = kind, which is not a literal"),
    ],
)  # fmt: skip
def test_settings_that_are_not_read_are_named(text: str, file: str, unread: str) -> None:
    assert targets.read(text, file, 8, None if file == "run.sh" else LLAMA).unread == (unread,)


def test_values_that_a_trainer_finds_by_itself_are_assumed() -> None:
    imported = targets.read('{"pipeline": {"stages": "auto"}}', "a.json", 8, LLAMA)
    assert (imported.form.layout.pp, imported.assumptions) == (
        1, ("8 ranks", 'one pipeline stage, because pipeline.stages is "auto"')
    )  # fmt: skip
    experts = f"{MEGATRON} --num-experts 4 --moe-layer-freq '([0]*1+[1]*1)'"
    assert "experts in every layer" in targets.read(experts, "run.sh", 8, None).assumptions[0]


def test_yaml_reads_a_bare_no_as_false() -> None:
    assert targets.read("distributed_type: NO\nmixed_precision: no", "a.yaml", 1, LLAMA).form.precision == "fp32"


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [("FullAC.Config()", "full"), ("ActivationCheckpointConfig(mode='full')", "full"), ("None", "none")],
)
def test_recomputation_of_a_python_file_is_its_class_or_its_mode(kind: str, recompute: str) -> None:
    text = f"def f():\n  config = llama3_8b()\n  config.activation_checkpoint = {kind}"
    assert targets.read(text, "a.py", 8, None).form.layout.recompute == recompute


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ("dp=x", "--layout: dp=x is not a whole number"),
        ("flash=maybe", "--layout: flash=maybe is not true or false\n  -> write it as in flash=true"),
        ("dp=2,dp=4", "--layout: dp is given twice"), ("schedule=foo", "--layout: schedule: unknown schedule 'foo'"),
        ("tp=2x2x1", "--layout: tp=2x2x1 is a grid"),
        ("dp", "--layout: 'dp' is not a word of a layout\n  -> words are dp"),
    ],
)  # fmt: skip
def test_a_wrong_layout_of_the_command_line_is_refused(layout: str, problem: str) -> None:
    with pytest.raises(LayoutError) as caught:
        export_sizes("megatron", LLAMA, load_cluster("h100-dgx-ndr400x8", 8), global_batch=8, layout=layout)
    assert problem in f"{caught.value}"


def test_sizes_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(LayoutError, match="6 ranks do not divide into tp=4"):
        targets.read('{"tensor_parallel": {"autotp_size": 4}}', "a.json", 6, LLAMA)
    with pytest.raises(LayoutError, match="take 8 ranks of 4"):
        targets.read(SLOW_TOML, "a.toml", 4, None)
    with pytest.raises(LayoutError, match="a batch of 6 does not divide over 4"):
        torchtitan.express(Form(model="m", layout=Layout(spatial=(4,)), global_batch=6))


def test_unknown_names_are_refused() -> None:
    form = Form.of_setup(setup())
    with pytest.raises(LayoutError) as caught:
        targets.write("torchtitn", form, 8)
    assert "did you mean `torchtitan`?" in caught.value.remedy
    with pytest.raises(LayoutError, match="has no configuration of m"):
        targets.write("torchtitan", msgspec.structs.replace(form, model="m"), 8)
    with pytest.raises(LayoutError, match="is not MODULE:FUNCTION"):
        targets.write("torchtitan", form, 8, "llama3")
    with pytest.raises(LayoutError, match="deepspeed has no base"):
        targets.write("deepspeed", form, 8, "llama3:llama3_8b")
    machine = load_cluster("h100-dgx-ndr400x8", 8)
    with pytest.raises(LayoutError) as caught:
        export_sizes("megatron", LLAMA, machine, global_batch=8, layout="schedul=1f1b")
    assert "did you mean `schedule`" in caught.value.remedy
    with pytest.raises(LayoutError, match="fsdp2 is code for a module"):
        export_sizes("fsdp2", LLAMA, machine, global_batch=8)


def test_a_vocabulary_that_is_in_the_tokenizer_is_asked_for() -> None:
    arguments = MEGATRON.removesuffix(" --vocab-size 100")
    with pytest.raises(FileFormatError, match="the size of the vocabulary is in the tokenizer"):
        megatron.read(arguments, "run.sh", 1, None)
    imported = megatron.read(f"{arguments} --vocab-size 100 --foo-parallel 3 \\\n --bf16 # --fp16\n", "run.sh", 1, None)
    assert (imported.unread, imported.form.precision) == (("--foo-parallel",), "bf16")
