"""What a user may get wrong when asking for a prediction: each by the text of its error, at the command line."""

import csv
import json
from pathlib import Path

import pytest

from meshwright.cli import run as cli
from tests.pure.test_validate import ROW, table

DGX = "a100-80gb-dgx-hdr200x8"
PREDICT = ["predict", "gpt3-175b", "--cluster", DGX, "--global-batch", "64"]
PLAN = ["plan", "llama2-7b", "--cluster", DGX]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # unknown names, with the nearest
        (
            ["predict", "gpt3-175", "--cluster", DGX, "--global-batch", "8"],
            "unknown model 'gpt3-175'\n  -> did you mean `gpt3-175b`",
        ),
        (
            ["plan", "llama3-7b", "--cluster", DGX],
            "llama3-7b: neither a file nor a model\n  -> did you mean `llama3-70b` or `llama3-8b` or `llama2-7b`?",
        ),
        (["models", "resnet-50"], "unknown model 'resnet-50'\n  -> did you mean `resnet50`"),
        (
            ["predict", "llama2-7b", "--cluster", "a100-80gb-dgx-hrd200x8", "--global-batch", "8"],
            "unknown cluster 'a100-80gb-dgx-hrd200x8': 'hrd200x8' is not a fabric",
        ),
        (
            ["predict", "llama2-7b", "--cluster", "a10-dgx", "--global-batch", "8"],
            "unknown cluster 'a10-dgx': it starts with no device of the catalog",
        ),
        ([*PREDICT, "--schedule", "1fb1"], "schedule: unknown schedule '1fb1'\n  -> did you mean `1f1b`?"),
        ([*PREDICT, "--recompute", "ful"], "recompute: unknown recompute 'ful'\n  -> did you mean `full`?"),
        ([*PREDICT, "--precision", "bf61"], "precision: unknown precision 'bf61'\n  -> did you mean `bf16`?"),
        (["recompute", "alexnett"], "there is no worked example 'alexnett'\n  -> did you mean `alexnet` or"),
        # layouts that do not divide
        ([*PREDICT, "--dp", "3"], "global_batch: global_batch = 64 is not divisible by dp x micro_batch = 3"),
        ([*PREDICT, "--pp", "97"], "pp: 97 stages of 1 chunks need 97 layers, the model has 96"),
        ([*PREDICT, "--cp", "3"], "sequence: sequence = 2048 is not divisible by cp = 3"),
        ([*PREDICT, "--ep", "2", "--dp", "2"], "experts: experts = 0 is not divisible by ep = 2"),
        ([*PREDICT, "--chunks", "2"], "chunks: schedule 1f1b has one chunk a rank, not 2"),
        (
            [*PREDICT, "--devices", "64", "--dp", "3", "--tp", "8", "--global-batch", "48"],
            "devices: the layout has 24 ranks, not 64",
        ),
        (
            [*PLAN, "--ranks", "24", "--batch", "7"],
            "model llama2-7b: no layout of 24 devices divides 32 heads, 32 layers and a batch of 7",
        ),
        # sizes that no machine has, or that would take hours
        (
            [*PLAN, "--ranks", "1000000000000"],
            (
                f"cluster {DGX}: 1000000000000 devices are more than 1,000,000, the most that are planned for\n"
                "  -> ask for fewer devices or ranks"
            ),
        ),
        ([*PREDICT, "--dp", "1000000000000", "--global-batch", "1000000000000"], "1000000000000 devices are more than"),
        (
            ["schedule", "1f1b", "--stages", "64", "--microbatches", "100000"],
            (
                "schedule 1f1b: 64 ranks, 100000 micro-batches and 1 chunks are 12,800,000 forwards and backwards, "
                "more than 1,000,000\n  -> give fewer micro-batches"
            ),
        ),
        (
            ["schedule", "interleaved", "--stages", "8", "--microbatches", "64", "--chunks", "1000000000"],
            "are 1,024,000,000,000 forwards and backwards",
        ),
        (
            ["collectives", "all_reduce", "--ranks", "1000000", "--picture", "ring"],
            "--ranks: 1000000 ranks\n  -> draw 1 to 256",
        ),
        # heads
        ([*PREDICT, "--tp", "5"], "heads: heads = 96 is not divisible by tp = 5"),
        # impossible clusters
        (
            ["predict", "llama2-7b", "--cluster", "a100-80gb-dgx", "--devices", "16", "--global-batch", "16"],
            "cluster a100-80gb-dgx: it cannot have 16 devices",
        ),
        (
            ["predict", "llama2-7b", "--cluster", DGX, "--devices", "12", "--global-batch", "12"],
            f"cluster {DGX}: 12 devices do not fill whole units of level 'box', which hold 8",
        ),
        (
            ["predict", "llama2-7b", "--cluster", "a100-80gb-dgx-hdr300", "--global-batch", "8"],
            "a link of hdr has 100 or 200 Gb/s, not 300",
        ),
        (
            ["predict", "llama2-7b", "--cluster", "generic-cpu-dgx", "--global-batch", "8"],
            "a dgx joins devices by mesh or nvlink, and generic-cpu has",
        ),
        # negative and unit-less numbers
        ([*PREDICT, "--tp", "-8"], "--tp: '-8' is no size"),
        ([*PREDICT, "--memory", "-1"], "Invalid value for '--memory': Input should be greater than or equal to 0"),
        ([*PREDICT, "--memory", "80GB"], "Invalid value for '--memory': Input should be a valid number"),
        (
            [*PREDICT, "--memory", "80"],
            "memory_bytes: 80 is not between 1e+06 and 1e+16\n  -> give bytes: 80 GB are 80e9",
        ),
        ([*PLAN, "--price", "-2"], "Invalid value for '--price': Input should be greater than or equal to 0"),
        ([*PLAN, "--vary", "devices=-8..64"], "--vary: -8 is less than 1"),
        ([*PLAN, "--vary", "devices=64..8"], "--vary: 64..8 runs backwards"),
        ([*PLAN, "--vary", "speed=2"], "--vary: 'speed=2' varies nothing"),
        ([*PLAN, "--scaling", "week"], "--scaling: unknown scaling 'week'"),
        # tables and configs
        (["validate", "none.csv"], "none.csv: cannot read the file: No such file or directory"),
        (["models", "nowhere/config.json"], "nowhere/config.json: cannot read the file: No such file or directory"),
    ],
)  # fmt: skip
def test_it_is_told_in_a_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "\n  -> " in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba2"}, "config.json: model_type: unknown model_type 'mamba2'"),
        ({"architectures": ["LlamaForCausalLM"]}, "config.json: model_type: unknown model_type None"),
        (
            {"model_type": "gpt2", "n_layer": -2, "n_embd": 768, "n_head": 12, "n_positions": 1024},
            "layers: -2 is less than 1",
        ),
        (
            {"model_type": "gpt2", "n_layer": "12", "n_embd": 768, "n_head": 12, "n_positions": 1024},
            "config.json: n_layer: n_layer is '12'",
        ),
        (
            {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 7, "n_positions": 1024},
            "heads: hidden size 768 is not divisible by 7 heads",
        ),
        (
            {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_positions": 1024},
            "config.json: n_head: n_head is missing",
        ),
    ],
)  # fmt: skip
def test_a_config_of_an_unknown_architecture_or_impossible_sizes(
    config: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert cli(["predict", str(path), "--cluster", DGX, "--global-batch", "8"]) == 2
    assert message in capsys.readouterr().err


def test_a_cluster_file_with_a_number_in_another_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nnum_devices = 1\n[device]\nname = "x"\nkind = "gpu"\nmemory_bytes = 80\n'
        "memory_bandwidth_bytes_per_s = 2e12\n[device.peak_flops_per_s]\nbfloat16 = 312e12\n"
    )
    assert cli(["predict", "llama2-7b", "--cluster", str(path), "--global-batch", "8"]) == 2
    error = capsys.readouterr().err
    assert "device.memory_bytes: 80 is not between 1e+06 and 1e+16" in error
    assert "give bytes: 80 GB are 80e9" in error


def test_a_table_without_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(tmp_path / "t.csv", {}, columns=[name for name in ROW if name != "seq"])
    assert cli(["validate", str(path)]) == 2
    assert "no column seq\n  -> add it; a cell may be blank." in capsys.readouterr().err
    path.write_text(",".join("sequence" if name == "seq" else name for name in ROW) + "\n")
    assert cli(["validate", str(path)]) == 2
    assert "no column seq" in capsys.readouterr().err


def test_validate_goes_on_and_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    bad = [
        {"case": "unit", "step_time_s": "1.5s"}, {"case": "negative", "micro_batch": "-1"},
        {"case": "heads", "tp": "8", "dp": "1", "pp": "1", "heads": "12", "kv_heads": "12", "hidden": "1536"},
        {"case": "cluster", "cluster": "b100-dgx"},
    ]  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows([ROW, *({**ROW, **cells} for cells in bad), {**ROW, "case": "last"}])
    assert cli(["validate", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [row["case"] for row in json.loads(out)["rows"]] == ["one", "last"]
    lines = err.splitlines()
    assert [line.split(" ")[2] for line in lines] == ["unit", "negative", "heads", "cluster"]
    assert "step_time_s: '1.5s' is not a number above 0; give it without a unit" in lines[0]
    assert "micro_batch: '-1' is not a whole number of 1 or more" in lines[1]
    assert "heads: heads = 12 is not divisible by tp = 8" in lines[2]
    assert "unknown cluster 'b100-dgx'" in lines[3]
