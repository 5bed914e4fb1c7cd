"""Engines: scripts, manifests and commands from one description of nodes, and the variables of other launchers."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import config
from meshwright.cli import run as cli
from meshwright.engines import kubernetes, ray, slurm, torchrun
from meshwright.engines.job import Job
from meshwright.engines.kubernetes_schema import checked
from meshwright.errors import LaunchError
from meshwright.runtime import launchers
from meshwright.runtime.launchers import Meeting, first_node, meeting_of, slurm_address, tasks_per_node, translated


def job(tmp_path: Path, **nodes: Any) -> Job:
    raw = {
        "model": {"name": "mlp"}, "data": {"kind": "random"}, "train": {"directory": str(tmp_path / "My run")},
        "nodes": {"count": 2, "ranks_per_node": 4, **nodes},
    }  # fmt: skip
    return Job(run=config.make(raw, where="test"), file=Path("RUN.toml"), arguments=("--train.steps", "10"))


# --- variables of launchers ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_the_tasks_of_every_node_are_read_from_slurms_short_form(counts: list[int]) -> None:
    assert tasks_per_node(",".join(map(str, counts))) == counts
    parts: list[str] = []
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1].append(count)
        else:
            runs.append([count])
    parts = [f"{run[0]}(x{len(run)})" if len(run) > 1 else f"{run[0]}" for run in runs]
    assert tasks_per_node(",".join(parts)) == counts


def test_tasks_that_cannot_be_read_are_named() -> None:
    with pytest.raises(LaunchError, match=r"SLURM_STEP_TASKS_PER_NODE: '2\(y3\)' does not say"):
        tasks_per_node("2(y3)")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[1-2]", "n1"), ("n[08-11,14],m3", "n08"), ("m3,n[1-2]", "m3"), ("r[2-3]c[05,07]-x", "r2c05-x"),
     ("n[7]", "n7"), ("login,n[1-2]", "login")],
)  # fmt: skip
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    """Examples of `man scontrol`, "show hostnames"."""
    assert first_node(nodes) == first


def test_a_node_without_a_name_has_the_address_that_slurm_knows() -> None:
    assert slurm_address("localhost") == "localhost"
    assert slurm_address("no-such.invalid", lambda node: f"NodeName={node} NodeAddr=10.0.0.7 Port=1") == "10.0.0.7"
    with pytest.raises(LaunchError, match=r"'no-such\.invalid' has no address .*, and scontrol does not know it"):
        slurm_address("no-such.invalid", lambda node: "")


STEP = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_ID": "1",
}  # fmt: skip


def test_a_step_of_slurm_is_torchruns_world() -> None:
    env = translated(STEP)
    assert {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")} == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
    }  # fmt: skip
    assert launchers.KEEPS_STORE in env, "the first process of the first node, whatever its rank"
    others = [STEP | {"SLURM_LOCALID": "1"}, STEP | {"SLURM_NODEID": "1", "SLURM_PROCID": "0"}]
    for other in map(translated, others):
        assert launchers.KEEPS_STORE not in other
        assert other["MASTER_PORT"] == env["MASTER_PORT"]
        assert other["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert translated(STEP | {"SLURM_JOB_ID": "78"})["MASTER_PORT"] != env["MASTER_PORT"]


def test_an_address_of_the_user_wins_and_rank_0_keeps_the_store() -> None:
    env = translated(STEP | {"MASTER_ADDR": "h1", "MASTER_PORT": "5"})
    assert env == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_the_script_of_a_job_and_a_step_of_one_task_start_their_own_ranks() -> None:
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}
    for environment in (script, STEP | {"SLURM_STEP_NUM_TASKS": "1"}, {}):
        assert not launchers.is_rank(environment)
        assert translated(environment) == {}


def test_a_step_without_its_variables_is_refused_by_their_names() -> None:
    with pytest.raises(LaunchError, match="SLURM_STEP_NUM_TASKS is 4, but SLURM_LOCALID and SLURM_NODEID is not set"):
        translated({name: value for name, value in STEP.items() if name not in ("SLURM_LOCALID", "SLURM_NODEID")})


PET = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a.b", "PET_MASTER_PORT": "29400"}


def test_the_variables_of_kubeflow_say_where_launchers_meet() -> None:
    assert meeting_of(PET | {"PET_NPROC_PER_NODE": "4"}, 9.0) == Meeting(
        num_hosts=2, is_host=False, address="a.b", port=29400, name="meshwright", timeout_s=9.0, ranks_per_host=4
    )
    first = meeting_of(PET | {"PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"}, 9.0)
    assert first is not None
    assert (first.is_host, first.ranks_per_host) == (True, 0)
    assert meeting_of(PET | {"RANK": "0"}, 9.0) is None, "torchrun has read them"
    assert meeting_of({"PET_NNODES": "1"}, 9.0) is None
    with pytest.raises(LaunchError, match="PET_NNODES is 2, but PET_MASTER_ADDR is not set\n  -> let Kubeflow"):
        meeting_of({name: value for name, value in PET.items() if name != "PET_MASTER_ADDR"}, 9.0)
    with pytest.raises(LaunchError, match="PET_MASTER_PORT: 'x' is not a number"):
        meeting_of(PET | {"PET_MASTER_PORT": "x"}, 9.0)


# --- the number of ranks on one node ---------------------------------------------------------------------------------


def test_a_single_node_is_told_its_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its launcher meets no other, and would start a rank for each core."""
    options = ["--train.steps", "10", "--train.ranks"]
    for kind in ("trainjob", "jobset"):
        for count in (1, 2):
            manifest = msgspec.to_builtins(kubernetes.manifest(job(tmp_path, count=count, image="me/it", kind=kind)))
            spec = manifest["spec"]
            if kind == "jobset":
                (container,) = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
            else:
                container = spec["trainer"]
            assert container["command"][5:] == ([*options, "4"] if count == 1 else options[:2]), (kind, count)
    assert "RUN.toml --train.steps 10 --train.ranks 1\n" in slurm.script(job(tmp_path, count=1, ranks_per_node=1))
    for several in ({"count": 2, "ranks_per_node": 1}, {"count": 1}):
        assert "--train.ranks" not in slurm.script(job(tmp_path, **several)), "srun tells each rank"
    run = tmp_path / "RUN.toml"
    run.write_text('[model]\nname = "mlp"\n[data]\nkind = "random"\n')
    assert cli(["launch", str(run), "--nodes.ranks_per_node", "3", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("# 3 ranks on this machine\n")
    assert output.endswith("--nodes.ranks_per_node 3 --train.ranks 3\n")


# --- Kubernetes ------------------------------------------------------------------------------------------------------


def test_a_train_job(tmp_path: Path) -> None:
    manifest = msgspec.to_builtins(
        kubernetes.manifest(job(tmp_path, image="me/it:1", gpus_per_rank=1, cpus_per_rank=8))
    )
    assert manifest["spec"]["trainer"] == {
        "image": "me/it:1",
        "command": ["python", "-m", "meshwright.cli", "train", "RUN.toml", "--train.steps", "10"],
        "numNodes": 2,
        "numProcPerNode": 4,
        "resourcesPerNode": {"requests": {"cpu": "32"}, "limits": {"nvidia.com/gpu": "4"}},
    }
    assert manifest["metadata"]["name"] == "meshwright-my-run"
    assert manifest["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    with pytest.raises(LaunchError, match=r"nodes\.volume_claim: a TrainJob takes its volumes from its runtime"):
        kubernetes.manifest(job(tmp_path, image="me/it:1", volume_claim="data"))
    with pytest.raises(LaunchError, match=r"nodes\.image: no image is named"):
        kubernetes.manifest(job(tmp_path))


def test_a_job_set(tmp_path: Path) -> None:
    manifest = msgspec.to_builtins(
        kubernetes.manifest(job(tmp_path, image="me/it:1", kind="jobset", volume_claim="data", memory_bytes=2**30))
    )
    (ranks,) = manifest["spec"]["replicatedJobs"]
    spec = ranks["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (2, 2, "Indexed")
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 40, "25 s for the save, and 15 to end"
    assert pod["volumes"] == [{"name": "shared", "persistentVolumeClaim": {"claimName": "data"}}]
    variables = {each["name"]: each.get("value", each.get("valueFrom")) for each in pod["containers"][0]["env"]}
    assert variables["PET_MASTER_ADDR"] == "meshwright-my-run-ranks-0-0.meshwright-my-run"
    assert variables["PET_NODE_RANK"] == {
        "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    }
    assert spec["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [75]}}
    ]
    assert manifest["spec"]["failurePolicy"] == {
        "maxRestarts": 3,
        "rules": [{"name": "later", "action": "RestartJobSetAndIgnoreMaxRestarts",
                   "onJobFailureReasons": ["PodFailurePolicy"]}],
    }  # fmt: skip
    assert manifest["spec"]["network"] == {"enableDNSHostnames": True}
    first = meeting_of({name: str(value) for name, value in variables.items()} | {"PET_NODE_RANK": "0"}, 1.0)
    assert first is not None, "what the launcher in a pod reads"
    assert (first.num_hosts, first.ranks_per_host, first.port) == (2, 4, 29500)


@pytest.mark.parametrize(
    ("path", "value"),
    [(("kind",), "PyTorchJob"), (("spec", "trainer", "numNodes"), 0), (("spec", "trainer", "nodes"), 1),
     (("metadata", "name"), "Not a label"), (("apiVersion",), "trainer.kubeflow.org/v2")],
)  # fmt: skip
def test_another_manifest_is_refused(tmp_path: Path, path: tuple[str, ...], value: Any) -> None:
    manifest = msgspec.to_builtins(kubernetes.manifest(job(tmp_path, image="me/it:1")))
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(msgspec.ValidationError):
        checked(manifest)


# --- Slurm, with stand-ins for its commands --------------------------------------------------------------------------

FAKE = """#!/bin/bash
# A stand-in for {name}: it keeps to what its manual page says, as far as the test needs.
{body}
"""


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fake `sbatch`, `scontrol` and `srun` in a folder of their own, which stands first in PATH."""
    folder = tmp_path / "fake-slurm"
    folder.mkdir()
    bodies = {
        "sbatch": f'cp "${{@: -1}}" {folder}/submitted; echo "41;cluster"',
        "scontrol": f"""case "$1" in
show) line=$(head -n 1 {folder}/states); sed -i 1d {folder}/states; echo "JobId=41 $line";;
requeue) echo "$2" >> {folder}/requeued; exit 1;;
esac""",
        "srun": f'echo "$@" >> {folder}/started; exit $(cat {folder}/code)',
    }
    for name, body in bodies.items():
        (folder / name).write_text(FAKE.format(name=name, body=body))
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_job_is_submitted_and_watched_to_its_end(fake_slurm: Path, tmp_path: Path) -> None:
    lines = [
        "JobState=PENDING Reason=Resources ExitCode=0:0", "JobState=RUNNING Reason=None ExitCode=0:0",
        "JobState=RUNNING Reason=None ExitCode=0:0", "JobState=PENDING Reason=BeginTime ExitCode=0:0",
        "JobState=FAILED Reason=NonZeroExitCode ExitCode=2:0",
    ]  # fmt: skip
    (fake_slurm / "states").write_text("\n".join(lines) + "\n")
    messages: list[str] = []
    this = job(tmp_path, time_limit_s=90061, partition="gpu", options=["--qos=high"], setup=["module load cuda"])
    assert slurm.submit(this) == 41
    log, waits = this.directory / "slurm-41.log", list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        log.write_text("".join(f"line {number}\n" for number in range(len(waits))) + "half")

    assert slurm.watch(this, 41, messages.append, wait) == 2
    assert messages == [
        "job 41: PENDING (Resources)", "line 0", "job 41: RUNNING", "line 1", "line 2", "job 41: PENDING (BeginTime)",
        "line 3", "job 41: FAILED (NonZeroExitCode)",
    ]  # fmt: skip
    script = (fake_slurm / "submitted").read_text()
    assert script == slurm.script(this)
    for option in ("--time=1-01:01:01", "--signal=USR1@85", "--partition=gpu", "--qos=high", "--ntasks-per-node=4"):
        assert f"#SBATCH {option}\n" in script
    assert script.index("module load cuda") < script.index("srun ")


@pytest.mark.parametrize(("codes", "requeued"), [([0], 0), ([2], 0), ([75], 1), ([137] * 4, 2), ([75] * 5, 5)])
def test_the_script_queues_itself_again_when_that_helps(
    fake_slurm: Path, tmp_path: Path, codes: list[int], requeued: int
) -> None:
    """Code 2: a user's mistake; 75: told to end; 137: killed, which ends at the third time without a checkpoint."""
    this = job(tmp_path)
    slurm.submit(this)
    script = this.directory / "slurm.sh"
    for code in codes:
        (fake_slurm / "code").write_text(f"{code}")
        done = subprocess.run(["bash", str(script)], env=os.environ | {"SLURM_JOB_ID": "41"}, capture_output=True,
                              check=False)  # fmt: skip
        assert done.returncode == code
    asked = fake_slurm / "requeued"
    assert (asked.read_text().count("41\n") if asked.exists() else 0) == requeued
    done = subprocess.run(["bash", str(script)], env=os.environ | {"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "100"},
                          capture_output=True, check=False)  # fmt: skip
    assert (asked.read_text().count("41\n") if asked.exists() else 0) == requeued, "a total limit"


def test_without_slurm_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="--on slurm: sbatch is not installed here\n  -> run this where sbatch is"):
        slurm.submit(job(tmp_path))


# --- torchrun, Ray, and the command ----------------------------------------------------------------------------------


def test_torchruns_command_for_every_host(tmp_path: Path) -> None:
    text = torchrun.described(job(tmp_path, addresses=["h1", "h2"], port=1234))
    assert "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint h1:1234 " in text
    assert "meshwright launch RUN.toml --on torchrun --train.steps 10" in text
    assert torchrun.is_here("127.0.0.1")
    assert not torchrun.is_here("192.0.2.1")  # of documentation, RFC 5737
    with pytest.raises(LaunchError, match=r"nodes\.addresses: the name 'no-such.invalid' has no address here"):
        torchrun.is_here("no-such.invalid")
    with pytest.raises(LaunchError, match=r"nodes\.addresses: 0 addresses for 2 nodes"):
        torchrun.meeting(job(tmp_path))


def test_rays_bundles_and_actors(tmp_path: Path) -> None:
    text = ray.described(job(tmp_path, gpus_per_rank=1))
    assert "placement_group([{'CPU': 4, 'GPU': 4}, {'CPU': 4, 'GPU': 4}], strategy='STRICT_SPREAD')" in text
    assert "rank 5: an actor in bundle 1, with {'RANK': '5', 'WORLD_SIZE': '8', 'LOCAL_RANK': '1'" in text


@pytest.mark.parametrize(
    ("on", "words"),
    [("local", "# 4 ranks on this machine"), ("torchrun", "--rdzv-endpoint h1:29500"), ("slurm", "#SBATCH --nodes="),
     ("ray", "placement_group("), ("kubernetes", '"kind": "TrainJob"')],
)  # fmt: skip
def test_every_engine_says_what_it_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], on: str, words: str
) -> None:
    run, nodes = tmp_path / "RUN.toml", tmp_path / "nodes.toml"
    run.write_text('[model]\nname = "mlp"\n[data]\nkind = "random"\n')
    nodes.write_text(f'count = {1 if on == "local" else 2}\nranks_per_node = 4\naddresses = ["h1"]\nimage = "me/it"\n')
    arguments = ["launch", str(run), "--on", on, "--nodes", str(nodes), "--dry-run", "--train.directory", str(tmp_path)]
    assert cli(arguments) == 0
    assert words in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["RUN.toml", "nodes.toml"], "nothing is done"


def test_mistakes_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "RUN.toml"
    run.write_text('[model]\nname = "mlp"\n[data]\nkind = "random"\n')
    for arguments, words in (
        (["--on", "slurn"], "--on: 'slurn' is no engine\n  -> did you mean `slurm`?"),
        (["--on", "local", "--nodes.count", "2"], "nodes.count: 2 nodes, and this engine has one"),
        (["--on", "slurm", "--nodes.count", "2"], "nodes.ranks_per_node: it is not said how many ranks a node has"),
        (
            ["--nodes.counts", "2"],
            "--nodes.counts: there is no such key in RUN.toml",
        ),
    ):
        assert cli(["launch", str(run), *arguments, "--dry-run"]) == 2
        assert words in capsys.readouterr().err
