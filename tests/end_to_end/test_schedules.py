"""Pipeline schedules from the command line, and beside those of torch.distributed.pipelining."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as peer

from meshwright.cli import run as cli
from meshwright.ir import files
from meshwright.ir.pipeline import Pipeline
from meshwright.ir.schedule import Schedule
from meshwright.schedules.check import check
from meshwright.schedules.passes import add_communication, add_reduction
from meshwright.schedules.pipeline import build

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------------------------------------------- command line


def test_schedule_does_not_wait_for_torch() -> None:
    program = (
        "import sys; from meshwright.cli import run; "
        "code = run(['schedule', '1f1b', '--stages', '2', '--microbatches', '2']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "chunks", "bubble", "alive"),
    [
        ("gpipe", 1, "0.375", "8"),
        ("1f1b", 1, "0.375", "4"),
        ("interleaved", 2, "0.1875", "5.5"),
        ("zb-h2", 1, "0.125", "7"),
        ("zb-v", 2, "0.0625", "4"),
        ("dualpipe-v", 2, "0.0625", "4.5"),
    ],
)
def test_schedule_prints_picture_bubble_and_live_micro_batches(
    name: str, chunks: int, bubble: str, alive: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["schedule", name, "--stages", "4", "--microbatches", "8", "--chunks", str(chunks)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{name}: 4 ranks, {4 * chunks} stages, 8 micro-batches\n\n")
    assert (GOLDEN / f"schedule_{name}.txt").read_text(encoding="utf-8") in text
    assert text.endswith(
        f"bubble: {bubble} of the time that a rank computes; at most {alive} micro-batches alive on a rank\n"
    )


def test_schedule_prints_bytes_sent_for_a_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["schedule", "1f1b", "--stages", "4", "--microbatches", "8"]
    assert cli(arguments) == 0
    assert [line.split()[4:] for line in capsys.readouterr().out.splitlines()[-6:-2]] == [
        ["1", "tensor"], ["2", "tensors"], ["2", "tensors"], ["1", "tensor"],
    ]  # fmt: skip
    for size, sent in (("16MiB", [["16", "MiB"], ["32", "MiB"]]), ("1.5 kB", [["1.465", "KiB"], ["2.93", "KiB"]])):
        assert cli([*arguments, "--bytes", size]) == 0
        assert [line.split()[4:] for line in capsys.readouterr().out.splitlines()[-6:-4]] == sent
    assert cli([*arguments, "--bytes", "16MiB", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["sent_bytes_per_microbatch"] == [2**24, 2**25, 2**25, 2**24]
    assert printed["report"]["bubble"] == 0.375
    assert cli([*arguments, "--bytes", "many"]) == 2
    assert capsys.readouterr().err == (
        "meshwright: --bytes: 'many' is not a size\n  -> write a number and a unit, as in 16MiB\n"
    )


def test_of_a_large_schedule_the_first_ranks_and_slots_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["schedule", "1f1b", "--stages", "70", "--microbatches", "200"]
    assert cli(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "drawn: 64 of 70 ranks, 500 of 807 slots" in lines
    assert lines[-2:] == [
        "bubble: 0.345 of the time that a rank computes; at most 70 micro-batches alive on a rank",
        "the first ranks and slots are shown: --whole draws all of it, --text and --json print it",
    ]
    assert {line.partition("  ")[0] for line in lines if line.startswith("rank ")} >= {"rank 0", "rank 63"}
    assert not any(line.startswith("rank 64") for line in lines)
    assert cli([*arguments, "--whole"]) == 0
    whole = capsys.readouterr().out.splitlines()
    assert "slot     " + lines[2].removeprefix("slot     ") == whole[2]
    cells = [" ".join(line[9:] for line in part if line.startswith("rank 0 ")).split() for part in (lines, whole)]
    assert cells[0][:200] == cells[1][:200]
    assert cells[0][-1].startswith("B"), "an action that goes on is drawn up to the last slot"
    assert whole[-1] == lines[-2]
    assert any(line.startswith("rank 69") for line in whole)


@pytest.mark.parametrize("written", ["text", "json"])
def test_a_file_that_was_printed_is_read_again(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["schedule", "interleaved", "--stages", "2", "--microbatches", "4", "--chunks", "2"]
    schedule = add_reduction(add_communication(build("interleaved", 2, 4, 2)))
    if written == "text":
        assert cli([*arguments, "--text"]) == 0
        Path("interleaved.csv").write_text(capsys.readouterr().out)
        file = "interleaved.csv"
    else:
        files.save(schedule, file := "interleaved.json")
    assert cli(["schedule", "--file", file, "--text"]) == 0
    assert capsys.readouterr().out == schedule.to_text(",")
    assert cli(arguments) == 0
    drawn = capsys.readouterr().out
    assert cli(["schedule", "--file", file]) == 0
    assert capsys.readouterr().out == drawn


def test_a_file_that_deadlocks_is_refused_with_its_cycle(capsys: pytest.CaptureFixture[str]) -> None:
    Path("crossed.csv").write_text(
        "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n"
    )
    assert cli(["schedule", "--file", "crossed.csv"]) == 2
    problem = (GOLDEN / "schedule_deadlock.txt").read_text(encoding="utf-8")
    assert capsys.readouterr().err == f"meshwright: crossed.csv: {problem}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["1f1b", "--stages", "2"],
            "--microbatches: is missing\n  -> write NAME --stages P --microbatches M, or --file",
        ),
        ([], "NAME: is missing\n"),
        (["1f2b", "--stages", "2", "--microbatches", "2"], "schedule: there is no schedule '1f2b'\n  -> did you mean"),
        (
            ["interleaved", "--stages", "4", "--microbatches", "3", "--chunks", "2"],
            "schedule interleaved: num_microbatches is 3, too few for 4 ranks\n  -> use 4, or any multiple of 4;",
        ),
        (["1f1b", "--file", "a.csv"], "--file: a file says itself which stages and micro-batches it has\n"),
        (["--file", "a.csv", "--chunks", "2"], "--file: a file says itself which stages and micro-batches it has\n"),
        (["--file", "a.csv"], "a.csv: cannot read the file: No such file or directory\n  -> check the path\n"),
        (["--file", "bad.csv"], "bad.csv: rank 0, position 1: `1X0` is not an action\n"),
        (["--file", "binary.csv"], "binary.csv: cannot read the file: it is not text\n"),
        (["--file", "empty.csv"], "empty.csv: schedule: stage 0 is on no rank\n"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.csv").write_text("0F0,1X0\n")
    Path("binary.csv").write_bytes(b"\xff\xfe0F0")
    Path("empty.csv").write_text("\n")
    assert cli(["schedule", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"meshwright: {message}")


# --------------------------------------------------------------------------------------- torch.distributed.pipelining

CASES = [
    ("gpipe", 3, 5, 1), ("1f1b", 4, 6, 1), ("interleaved", 2, 4, 3), ("interleaved", 4, 10, 2), ("zb-h1", 3, 7, 1),
    ("zb-h2", 3, 7, 1), ("zb-v", 3, 7, 2), ("dualpipe-v", 4, 9, 2),
]  # fmt: skip
named = pytest.mark.parametrize("arguments", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}-{case[3]}")


def as_peer(schedule: Schedule) -> dict[int, list[Any]]:
    return {
        rank: [peer._Action.from_str(str(action)) for action in actions] for rank, actions in enumerate(schedule.ranks)
    }


@named
def test_pytorch_reads_and_runs_what_we_write(arguments: tuple[str, int, int, int]) -> None:
    name, num_ranks, num_microbatches, num_chunks = arguments
    homes = Pipeline(num_ranks, name, num_chunks)
    schedule = add_communication(build(*arguments))
    actions = as_peer(schedule)
    assert [[str(action) for action in row] for row in actions.values()] == [
        [str(action) for action in row] for row in schedule.ranks
    ]
    assert peer._validate_schedule(actions, num_ranks, schedule.num_stages, num_microbatches) == {
        stage: homes.rank_of(stage) for stage in range(schedule.num_stages)
    }
    done = peer._simulate_comms_compute(actions, homes.rank_of, schedule.num_stages)
    assert {rank: [action for action in row if action is not None] for rank, row in done.items()} == actions


@named
def test_we_read_and_check_what_pytorch_makes(arguments: tuple[str, int, int, int]) -> None:
    name, num_ranks, _, num_chunks = arguments
    schedule, homes = build(*arguments), Pipeline(num_ranks, name, num_chunks)
    actions = peer._add_send_recv(as_peer(schedule), homes.rank_of, schedule.num_stages)
    text = "".join(",".join(map(str, actions[rank])) + "\n" for rank in range(num_ranks))
    report = check(Schedule.from_text(text, name="theirs"))
    assert report.live_microbatches == check(schedule).live_microbatches


@named
def test_gradients_are_reduced_where_pytorch_does(arguments: tuple[str, int, int, int]) -> None:
    schedule = build(*arguments)
    reduced = [peer._add_reduce_grad(row, arguments[2]) for row in as_peer(schedule).values()]
    texts = [[str(action) for action in row] for row in reduced]
    # Since 2.15, PyTorch also says where a rank waits for a reduction.
    assert [[action for action in row if "WAIT_REDUCE_GRAD" not in action] for row in texts] == [
        [str(action) for action in row] for row in add_reduction(schedule).ranks
    ]


@pytest.mark.parametrize("p", [1, 2, 4])
def test_orders_are_those_of_pytorch(p: int) -> None:
    for m in range(1, 13):
        assert theirs(peer.ScheduleGPipe, p, m) == ours("gpipe", p, m)
        if m >= p:  # with fewer theirs names micro-batches that are not there; so it does on the last rank (torch 2.13)
            assert theirs(peer.Schedule1F1B, p, m)[:-1] == ours("1f1b", p, m)[:-1]
        if m >= p and m % (m // p) == 0:
            assert theirs(peer.ScheduleInterleaved1F1B, p, m, 2) == ours("interleaved", p, m, 2)
            assert theirs(peer.ScheduleInterleaved1F1B, p, m, 3) == ours("interleaved", p, m, 3)
            assert theirs(peer.ScheduleInterleavedZeroBubble, p, m, 1) == ours("zb-h1", p, m)
        if m >= 2 * p - 1:
            assert theirs(peer.ScheduleZBVZeroBubble, p, m, 2) == ours("zb-v", p, m, 2)
        if m >= 2 * p:
            assert theirs(peer.ScheduleDualPipeV, p, m, 2) == ours("dualpipe-v", p, m, 2)


def theirs(kind: Any, p: int, m: int, v: int = 0) -> list[list[str]]:
    """What a class of torch.distributed.pipelining computes, asked without stages and process group."""
    state = SimpleNamespace(
        pp_group_size=p, _num_stages=p, num_stages=2 * p, _n_microbatches=m, n_local_stages=v,
        microbatches_per_round=m // max(1, m // p),
    )  # fmt: skip
    if v:
        rows = [kind._calculate_single_rank_operations(state, rank) for rank in range(p)]
    else:
        rows = [row for _, row in sorted(kind._get_pipeline_order(state).items())]
    flat = [[each for action in row if action is not None for each in action.sub_actions or (action,)] for row in rows]
    return [[str(action) for action in row if action.is_compute_op] for row in flat]


def ours(name: str, p: int, m: int, v: int = 1) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in build(name, p, m, v).ranks]
