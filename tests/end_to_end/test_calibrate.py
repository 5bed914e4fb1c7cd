"""Calibration with tiny sizes: the file is a cluster that loads, and it is made again when it no longer holds."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import msgspec
import pytest
import torch

import meshwright as mw
from meshwright import api, cli
from meshwright.api import machine
from meshwright.api.machine import check_size, known_cluster
from meshwright.api.measured_gpus import HOST_SPREAD, LEAST_SPREAD, gpu_cluster, gpu_name
from meshwright.api.plans import choose
from meshwright.catalog import with_software
from meshwright.cost.collective import Group, Network
from meshwright.cost.kernels import Rates
from meshwright.cost.optimizer import ADAMW
from meshwright.cost.program import step_work
from meshwright.errors import ClusterError, FileFormatError, LaunchError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster, CollectiveTiming
from meshwright.ir.interval import interval, step_deviation
from meshwright.ir.kernel import Product
from meshwright.ir.kind import COMPUTE, KINDS, OPERANDS
from meshwright.lower.plans import PlanLowering
from meshwright.models import MLP, classification_loss
from meshwright.runtime import between, calibrate, calibrate_gpus, launch, memory
from meshwright.runtime import device as devices
from meshwright.runtime.between import MeasuredSizes, Places
from meshwright.runtime.calibrate import Effort
from meshwright.runtime.machine import machine_name
from meshwright.runtime.measured import Measured, made_cluster, stale
from meshwright.runtime.probes import Probe
from meshwright.schedules.collectives.choice import candidates, chosen

ROUNDING = 1e-12
"""Relative difference that interpolating between measured sizes may leave at a measured size."""
TINY = Effort(
    laps=2,
    sides=(8, 16),
    flat_sides=(32, 64),
    elements=(2**14, 2**15),
    scale=0.1,
    between=MeasuredSizes(bytes=(64, 4096), repeats=2),
)


def measure_tiny() -> Cluster | None:
    return calibrate.measure(TINY, lambda what: None)


def known() -> Cluster | None:
    return mw.Cluster.load("cpu-local")


@pytest.fixture(scope="module")
def local_cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    path = tmp_path_factory.mktemp("calibrate") / "deep" / "machine.toml"
    cluster = api.calibrate(path, measured_by=measure_tiny)
    loaded = mw.Cluster.load(path)
    assert loaded == cluster
    return loaded


def test_of_sweeps_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 9.0, 2.0])

    def sweep(*_: object) -> list[CollectiveTiming]:
        row = CollectiveTiming(
            operation="send", algorithm="channel", level="box", ranks=2, bytes=64, time_s=next(times)
        )
        return [row, msgspec.structs.replace(row, bytes=128, time_s=5.0)]

    monkeypatch.setattr(between, "_sweep", sweep)
    monkeypatch.setattr(between.dist, "get_rank", lambda: 0)
    rows = between.between(MeasuredSizes(bytes=(64, 128), sweeps=3), Places(1, 1), lambda what: None)
    assert {row.bytes: row.time_s for row in rows} == {64: 2.0, 128: 5.0}


def test_every_kind_of_operator_is_measured(local_cluster: Cluster) -> None:
    assert set(local_cluster.device.efficiency) == set(KINDS)
    for curve in local_cluster.device.efficiency.values():
        sizes = [size for size, _ in curve]
        assert sizes == sorted(set(sizes))
        assert all(0 < fraction <= 1 for _, fraction in curve)


def test_peaks_are_the_best_of_what_was_measured(local_cluster: Cluster) -> None:
    best = {
        compute: max(
            fraction for kind, curve in local_cluster.device.efficiency.items() if (kind in COMPUTE) is compute
            for _, fraction in curve
        )
        for compute in (True, False)
    }  # fmt: skip
    assert best == {True: pytest.approx(1.0, rel=1e-3), False: pytest.approx(1.0, rel=1e-3)}
    assert {"float32", "float64"} <= set(local_cluster.device.peak_flops_per_s)


def test_the_machine_is_described(local_cluster: Cluster) -> None:
    cores = launch.num_cores()
    assert local_cluster.num_devices == cores
    assert local_cluster.device.memory_bytes * cores <= memory.memory_bytes()
    assert local_cluster.calibration is not None
    assert local_cluster.calibration.machine == machine_name()
    assert local_cluster.calibration.torch == str(torch.__version__)


@pytest.mark.skipif(launch.num_cores() < 2, reason="one core has no neighbour")
def test_what_joins_cores_is_measured(local_cluster: Cluster) -> None:
    (box,) = local_cluster.levels
    assert 0 < box.alpha_s < 1
    measured = {(row.operation, row.bytes) for row in local_cluster.collectives}
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        assert {(operation, 64), (operation, 4096)} <= measured
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        here = [
            row for row in local_cluster.collectives if (row.operation, row.ranks) == (operation, calibrate.num_ranks())
        ]
        names = set(candidates(operation, calibrate.num_ranks()))
        assert {row.algorithm for row in here} == names
    network = Network(local_cluster)
    text = network.algorithms(Group(calibrate.num_ranks()))
    for row in local_cluster.collectives:
        if row.operation == "all_reduce" and row.ranks == calibrate.num_ranks():
            predicted = network.collective_s("all_reduce", row.bytes, Group(row.ranks))
            assert row.time_s >= predicted * (1 - ROUNDING)
            if row.algorithm == chosen(text, "all_reduce", row.bytes):
                assert row.time_s == pytest.approx(predicted, rel=ROUNDING), "what is predicted is what runs"
    rows = {row.time_s for row in local_cluster.collectives if row.operation == "all_reduce" and row.bytes == 64}
    ranks = calibrate.num_ranks()
    assert any(row == pytest.approx(network.collective_s("all_reduce", 64, Group(ranks)), rel=ROUNDING) for row in rows)
    together = [condition for condition in local_cluster.device.conditions if condition.ranks > 1]
    assert [condition.ranks for condition in together] == [ranks]
    assert set(together[0].efficiency) == set(KINDS)


def test_a_step_can_be_predicted_from_it(local_cluster: Cluster) -> None:
    batch = {"inputs": torch.zeros(8, 16), "label": torch.zeros(8, dtype=torch.int64)}
    graph = mw.capture(MLP((16, 32, 10)), classification_loss, batch)
    plan = mw.plan(graph, local_cluster, layout=mw.Layout())
    work = step_work(PlanLowering(graph)(plan), plan, local_cluster)
    assert all(piece.seconds > 0 for piece in work.stages[0].pieces["F"])  # type: ignore[union-attr]


# --- busy, stale -----------------------------------------------------------------------------------------------------


def measured(spread: float) -> Measured:
    return Measured(
        seconds={"matmul": [(1e6, 1e-5)], "pointwise": [(1e6, 1e-4)]},
        kernel_s=1e-6, peaks={"float32": 1e11}, taken_s=1.0, passed_s=1.0 + spread,
    )  # fmt: skip


def test_sweeps_are_averaged_and_their_differences_are_the_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of a product by sweep: the machine is twice as slow in the last two."""
    times = iter([1e-3, 9e-3, 1e-3, 1e-3, 1e-3, 5e-4, 2e-3, 2e-3, 2e-3, 2e-3, 9e-3, 2e-3])
    monkeypatch.setattr(
        calibrate, "timed", lambda call, clock: (0.0 if call is calibrate._nothing else next(times), 1.0)
    )
    probe = Probe("matmul", 3e6, lambda: None)
    sweeps = calibrate.Sweeps([("float32", probe)], laps=3)
    for _ in range(4):
        sweeps.add()
    measured = sweeps.measured()
    assert measured.seconds == {"matmul": [(3e6, 1.5e-3)]}
    assert measured.peaks == {"float32": pytest.approx(2e9)}
    assert measured.drift == pytest.approx(statistics.stdev([1, 1, 2, 2]) / 1.5)


def test_laps_go_from_large_to_small_and_ranks_meet_once_a_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(calibrate, "meet", lambda: called.append("meet"))
    sizes = {"dispatch": 0.0, "pointwise": 1e3, "matmul": 1e6, "norm": 1e6}
    probes = [("float32", Probe(kind, size, lambda kind=kind: called.append(kind))) for kind, size in sizes.items()]  # type: ignore[misc]
    calibrate.Sweeps(probes, laps=3).add(meets=True)
    assert called == ["meet", "norm", "matmul", "pointwise", "dispatch"] * 3
    called.clear()
    calibrate.Sweeps(probes, laps=1).add()
    assert called == ["norm", "matmul", "pointwise", "dispatch"]


def test_the_time_of_the_clock_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "timed", lambda call, clock: (1e-6 if call is calibrate._nothing else 3e-6, 1.0))
    sweeps = calibrate.Sweeps([("", Probe("dispatch", 0.0, lambda: None))], laps=2)
    sweeps.add()
    sweeps.add()
    assert sweeps.measured().kernel_s == pytest.approx(2e-6)


def test_the_update_that_gpus_measure_is_the_priced_one() -> None:
    assert ADAMW.fused_moved == calibrate_gpus.UPDATE_MOVES


def test_bytes_of_products_are_those_of_float32() -> None:
    probes = [
        (dtype, Probe("matmul", 3e6, lambda: None, other)) for dtype, other in (("float32", 4.0), ("bfloat16", 2.0))
    ]
    sweeps = calibrate.Sweeps(probes, laps=1)
    sweeps.add()
    sweeps.add()
    assert sweeps.measured().others == {("matmul", 3e6): 4.0}


@pytest.mark.parametrize("kind", OPERANDS)
@pytest.mark.parametrize("flops", [5e7, 4e8])
@pytest.mark.parametrize("num_bytes", [1e6, 6e6])
def test_operands_are_told_apart_from_multiplying(kind: str, flops: float, num_bytes: float) -> None:
    """Oracle: a machine whose times are ``kernel_s + flops / rate + bytes / bandwidth``; the prediction of sizes that
    were not measured follows it."""
    kernel_s, rate, bandwidth = 5e-6, 8e10, 4e9

    def seconds(flops: float, num_bytes: float) -> float:
        return kernel_s + flops / rate + num_bytes / bandwidth

    square, flat = [(4e7, 4e5), (6e8, 4e6)], [(4e6, 5e5), (7e7, 4e6)]
    operands = OPERANDS[kind]
    measured = Measured(
        seconds={
            "pointwise": [(1e6, 1e6 / 2e10)],
            kind: [(flops, seconds(flops, size)) for flops, size in square],
            operands: [(size, seconds(flops, size)) for flops, size in flat],
        },
        others={(kind, flops): size for flops, size in square} | {(operands, size): flops for flops, size in flat},
        kernel_s=kernel_s, peaks={"float32": 8e10}, taken_s=1.0, passed_s=1.0,
    )  # fmt: skip
    rates = Rates(made_cluster(measured, None, None, [], ranks=1, cores=1).device)
    assert rates.seconds(kind, "float32", flops, num_bytes) == pytest.approx(seconds(flops, num_bytes), rel=0.1)


def test_on_a_busy_machine_threads_are_left_out_and_the_spread_is_told() -> None:
    for spread, conditions in ((0.02, [(2, 1), (1, 2)]), (0.8, [(1, 2)])):
        cluster = made_cluster(measured(spread), measured(0), measured(0), [], ranks=2, cores=2)
        assert [(condition.threads, condition.ranks) for condition in cluster.device.conditions] == conditions
        assert cluster.calibration is not None
        assert cluster.calibration.spread == pytest.approx(spread)
        assert api.is_busy(cluster.calibration) == (spread > 0.5)


def test_more_threads_are_fractions_of_the_peak_of_all() -> None:
    cluster = made_cluster(measured(0), measured(0), None, [], ranks=1, cores=2)
    alone, two = cluster.device, cluster.device.under(threads=2)
    rate = alone.peak("float32") * alone.efficiency_at("matmul", 1e6)
    assert two.peak("float32") * two.efficiency_at("matmul", 1e6) == pytest.approx(rate, rel=1e-3)


def test_a_single_core_has_no_level() -> None:
    cluster = made_cluster(measured(0), None, None, [], ranks=1, cores=1)
    assert (cluster.num_devices, cluster.levels, cluster.device.conditions) == (1, (), ())


@pytest.mark.parametrize(
    ("changes", "days", "reason"),
    [
        ({}, 0.0, ""),
        ({}, 29.9, ""),
        ({}, 31.5, "it is 32 days old"),
        ({}, -2.0, "it was measured 2 days later than now, by this machine's clock"),
        ({}, -0.01, ""),
        ({"machine": "a lathe"}, 0.0, "it was measured on another machine, a lathe"),
        ({"torch": "1.0"}, 0.0, "it was measured with torch 1.0"),
    ],
)
def test_what_no_longer_holds_is_stale(changes: dict[str, str], days: float, reason: str) -> None:
    every = {kind: [(1e6, 1e-4)] for kind in KINDS}
    others = {(kind, 1e6): 1e3 for kind in KINDS}
    cluster = made_cluster(
        msgspec.structs.replace(measured(0), seconds=every, others=others), None, None, [], ranks=1, cores=1
    )
    assert cluster.calibration is not None
    changed_cluster = msgspec.structs.replace(
        cluster, calibration=msgspec.structs.replace(cluster.calibration, **changes)
    )
    assert stale(changed_cluster, cluster.calibration.time_s + days * 86400) == reason


def test_a_calibration_of_an_older_version_is_stale() -> None:
    cluster = made_cluster(measured(0), None, None, [], ranks=1, cores=1)
    assert cluster.calibration is not None
    assert "norm" in stale(cluster, cluster.calibration.time_s)
    assert "measured by another version" in stale(cluster, cluster.calibration.time_s)


def test_a_cluster_that_was_not_measured_is_stale() -> None:
    assert stale(mw.Cluster.load("cpu-local"), time.time()) == "it was not measured"


# --- the cache -------------------------------------------------------------------------------------------------------


def measure_nothing() -> Cluster | None:
    raise AssertionError("it was measured again")


def test_the_cache_is_used_until_it_is_stale(
    local_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caplog.set_level("INFO", "meshwright")
    path = tmp_path / "meshwright" / "this-machine.toml"
    assert api.calibration_file() == path
    assert api.calibrated() is None
    path.parent.mkdir()
    files.save(local_cluster, path)
    ours = with_software(local_cluster, "meshwright")
    assert api.calibrated() == ours
    assert api.calibrate(again=False, measured_by=measure_nothing) == ours
    assert local_cluster.calibration is not None
    old = msgspec.structs.replace(local_cluster.calibration, torch="1.0")
    files.save(msgspec.structs.replace(local_cluster, calibration=old), path)
    assert api.calibrated() is None
    assert "is stale: it was measured with torch 1.0" in caplog.text


def test_a_damaged_cache_is_said_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "meshwright").mkdir()
    api.calibration_file().write_text("version = 1\n")
    assert api.calibrated() is None
    assert "cannot be used" in caplog.text


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="the cluster file cannot be written"):
        api.calibrate(tmp_path / "file" / "machine.toml", measured_by=known)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "box"', 'nom = "box"', "unknown field `nom`"),
        ("alpha_s = ", "alpha_us = ", "alpha_us"),
        ("memory_bandwidth_bytes_per_s = ", "memory_bandwidth_bytes_per_s = 0.0 # ", "give bytes per second"),
        ("num_devices = ", "num_devices = 77 # ", "num_devices is 77, but the levels hold"),
    ],
)
@pytest.mark.skipif(launch.num_cores() < 2, reason="one core has no level")
def test_a_file_with_a_wrong_key_unit_or_product_is_refused(
    local_cluster: Cluster, tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "machine.toml"
    files.save(local_cluster, path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises((ClusterError, FileFormatError), match=message):
        mw.Cluster.load(path)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_what_it_found(
    local_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "meshwright").mkdir()
    assert local_cluster.calibration is not None
    busy = msgspec.structs.replace(local_cluster.calibration, spread=0.5)
    files.save(msgspec.structs.replace(local_cluster, calibration=busy), api.calibration_file())
    assert cli.run(["calibrate", "--if-stale"]) == 0
    shown = capsys.readouterr().out
    assert machine_name() in shown
    assert "layer" not in shown
    assert "warning: this machine is busy: calls took 50% longer by the clock" in shown
    assert f"written to {api.calibration_file()}" in shown
    assert cli.run(["calibrate", "--if-stale", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"]["spread"] == 0.5


def test_what_was_not_measured_is_not_said_to_be() -> None:
    """One rank of a machine with several cores sends no message."""
    seconds = {"matmul": [(1e6, 1e-3)], "pointwise": [(1e6, 1e-3)]}
    alone = Measured(seconds=seconds, peaks={"float32": 1e9}, taken_s=1.0, passed_s=1.0)
    cluster = made_cluster(alone, None, None, [], ranks=1, cores=4)
    assert cluster.constants == "device measured, box default"
    assert cluster.levels[0].source.startswith("not measured: ")
    sent = CollectiveTiming(operation="send", algorithm="", level="box", ranks=2, bytes=8, time_s=1e-5)
    assert made_cluster(alone, None, None, [sent], ranks=2, cores=4).constants == "device measured, box measured"
    grown = known_cluster(cluster, torch.device("cpu"))
    assert grown.constants == cluster.constants


@pytest.mark.parametrize(
    ("words", "constants"),
    [
        ("clusters cpu-local", "box: 2 together, 30 us a message, 2.74 GB/s: default  ("),
        ("clusters h100-dgx", "device: catalog  ("),
        (
            "predict llama3-8b --cluster h100-dgx-ndr400x8 --devices 16 --zero 3 --global-batch 16",
            "(device catalog, pod catalog, box catalog)",
        ),
        ("plan llama3-8b --cluster h100-dgx --batch 8", "constants of the cluster: device catalog, box catalog"),
        ("plan alexnet --cluster v100-dgx1", "constants of the cluster: device catalog, box catalog"),
        ("plan mlp --dp 2 --cluster cpu-local", "constants of the cluster: device default, box default"),
    ],
)
def test_commands_say_where_constants_are_from(words: str, constants: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words.split()) == 0
    assert constants in " ".join(capsys.readouterr().out.split("\n"))


class Properties:
    """What CUDA reports of a device."""

    name, total_memory, multi_processor_count = "NVIDIA H100 80GB HBM3", 84_900_000_000, 132


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine has two H100, which were not measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: Properties.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


CUDA = torch.device("cuda")


def launched(monkeypatch: pytest.MonkeyPatch, ranks: int, here: int) -> None:
    """Set the environment of a launcher that has started ``ranks`` ranks, ``here`` of them on this machine."""
    for name, value in {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": here}.items():
        monkeypatch.setenv(name, f"{value}")


@pytest.mark.usefixtures("two_gpus")
def test_without_a_cluster_the_cuda_device_at_hand_is_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "meshwright")
    here = known_cluster(None, CUDA)
    assert (here.name, here.device.name, here.device.memory_bytes) == ("h100-dgx", "h100", Properties.total_memory)
    assert (
        "cuda was not measured: predictions rest on the catalog, and are wide (`meshwright calibrate`)" in caplog.text
    )


@pytest.mark.usefixtures("two_gpus")
def test_intervals_without_a_calibration_are_wider_than_those_of_a_good_one() -> None:
    spread = known_cluster(None, CUDA).software.spread
    measured = msgspec.structs.replace(spread, step=LEAST_SPREAD, host=HOST_SPREAD)
    wide, narrow = (interval(1.0, step_deviation(each, 0.0, 0.1)) for each in (spread, measured))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("ranks", "here", "name", "fan_outs", "links"),
    [
        (16, 8, "h100-dgx-ndr400x8", [8, 2], 8),
        (8, 8, "h100-dgx", [8], 1),
        (8, 2, "h100-box2-ndr400x2", [2, 4], 2),
        (4, 1, "h100-box1-ndr400x1", [1, 4], 1),
    ],
)
def test_ranks_on_several_machines_are_boxes_with_the_usual_fabric(
    ranks: int, here: int, name: str, fan_outs: list[int], links: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, ranks, here)
    cluster = known_cluster(None, CUDA, ranks)
    check_size(cluster, ranks)
    assert (cluster.name, [level.fan_out for level in cluster.levels]) == (name, fan_outs)
    assert (cluster.levels[-1].links, cluster.device.memory_bytes) == (links, Properties.total_memory)
    named = mw.Cluster.load(name).resized(ranks)
    assert [level.beta_s_per_byte for level in named.levels] == [level.beta_s_per_byte for level in cluster.levels]


@pytest.mark.usefixtures("two_gpus")
def test_a_step_is_planned_for_two_machines_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 16, 8)
    batch = {"inputs": torch.zeros(16, 6), "label": torch.zeros(16, dtype=torch.int64)}
    graph = mw.capture(MLP((6, 16, 4)), classification_loss, batch)
    plan = choose(mw.Layout(dp=16), graph, 16, None, CUDA, ADAMW, clips=False)
    assert (plan.mesh.world_size, plan.cluster) == (16, "h100-dgx-ndr400x8")


@pytest.mark.usefixtures("two_gpus")
def test_boxes_that_are_not_full_and_boxes_without_a_usual_fabric_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 12, 8)
    with pytest.raises(ClusterError, match="12 ranks do not fill whole boxes, which have 8 ranks as this machine has"):
        known_cluster(None, CUDA, 12)
    monkeypatch.setattr(Properties, "name", "NVIDIA A100-PCIE-40GB")
    monkeypatch.setattr(Properties, "total_memory", 42_298_834_944)
    monkeypatch.setattr(Properties, "multi_processor_count", 108)
    with pytest.raises(ClusterError, match="no usual fabric between boxes of a100-40gb on PCIe") as caught:
        known_cluster(None, CUDA, 16)
    assert "name the fabric, as in cluster='a100-40gb-pcie8-eth25'" in caught.value.remedy
    assert mw.Cluster.load("a100-40gb-pcie8-eth25").levels[1].links == 1


@pytest.mark.usefixtures("two_gpus")
def test_calibrated_gpus_are_the_boxes_of_a_larger_run() -> None:
    """The speed of the GPUs and the links in a box are measured; the fabric between boxes comes from the catalog."""
    measurements = calibrate_gpus.measure(FEW, lambda what: None, "cpu")
    assert measurements is not None
    h100 = devices.Properties(Properties.name, Properties.total_memory, Properties.multi_processor_count, 2)
    cluster = gpu_cluster(msgspec.structs.replace(measurements, properties=h100))
    assert cluster.calibration is not None
    yesterday = msgspec.structs.replace(cluster.calibration, time_s=round(time.time()) - 86400)
    api.save_cluster(msgspec.structs.replace(cluster, calibration=yesterday), api.calibration_file("cuda"))
    measured = known_cluster(None, CUDA, 2)
    assert measured.device.origin == "measured"
    several = known_cluster(None, CUDA, 6)
    assert several.device == measured.device
    assert [level.fan_out for level in several.levels] == [2, 3]
    assert several.constants == "device measured, pod catalog, box catalog"
    assert several.levels[1].beta_s_per_byte == mw.Cluster.load("h100-dgx-ndr400x8").levels[1].beta_s_per_byte


# --- GPUs, whose code runs on a CPU here ------------------------------------------------------------------------------

FEW = calibrate_gpus.GpuEffort(
    products=(Product(64, 64, 64), Product(32, 64, 16)), elements=(2**14,), lengths=(16, 32), heads=2, width=16,
    copied_bytes=2**12,
)  # fmt: skip


def test_measurements_of_a_gpu_make_a_cluster_that_loads(tmp_path: Path) -> None:
    measurements = calibrate_gpus.measure(FEW, lambda what: None, "cpu")
    assert measurements is not None
    h100 = devices.Properties("NVIDIA H100 80GB HBM3", 84_943_715_697, 132, 1)
    cluster = gpu_cluster(msgspec.structs.replace(measurements, properties=h100))
    api.save_cluster(cluster, tmp_path / "gpus.toml")
    assert mw.Cluster.load(tmp_path / "gpus.toml") == cluster
    assert (cluster.num_devices, cluster.device.kind, cluster.device.origin) == (1, "gpu", "measured")
    assert cluster.device.peak_flops_per_s["bfloat16"] == 989e12, "a slower device does not lower the data sheet's peak"
    assert cluster.device.kernels is not None
    assert cluster.device.kernels.launch_s == measurements.launch_s
    measured = {"attention", "attention_backward", "pointwise", "norm", "update"}
    assert measured <= set(cluster.device.efficiency)
    assert cluster.software.spread.step >= LEAST_SPREAD
    assert not stale_reason(cluster, "NVIDIA H100 80GB HBM3")
    assert "another machine" in stale_reason(cluster, "NVIDIA H200")


def stale_reason(cluster: Cluster, reported: str) -> str:
    return stale(cluster, time.time() + 60, machine=gpu_name(reported))


def test_a_gpu_that_the_catalog_lacks_has_its_best_rates_as_peaks() -> None:
    measurements = calibrate_gpus.measure(FEW, lambda what: None, "cpu")
    assert measurements is not None
    cluster = gpu_cluster(msgspec.structs.replace(measurements, properties=devices.Properties("A B1", 2**34, 40, 2)))
    best = max(2.0 * row.product.m * row.product.n * row.product.k / row.seconds for row in measurements.products)
    assert max(cluster.device.peak_flops_per_s.values()) == pytest.approx(best)
    assert (cluster.num_devices, cluster.device.memory_bytes) == (1, 2**34)


def test_there_is_no_gpu_to_calibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    old = devices.CudaSupport((12, 8), (11, 4))
    monkeypatch.setattr(machine, "cuda_support", lambda: old)
    for device in ("cuda", ""):
        with pytest.raises(LaunchError, match=r"the NVIDIA driver supports CUDA 11\.4") as error:
            api.calibrate(device=device)
        assert error.value.where == "device"
        assert error.value.remedy.startswith("update the driver, or install a build of PyTorch for CUDA 11; or ")
    with pytest.raises(LaunchError) as error:
        api.calibrate(device="tpu")
    assert str(error.value) == "device: there is no device 'tpu' here\n  -> use cpu"
