"""Workflows with PyTorch models: captured, costed, profiled; run in stations, processes, emulated boxes, on Ray."""

from __future__ import annotations

import builtins
import queue
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from meshwright.api.machine import known_cluster
from meshwright.cli import run as cli
from meshwright.comm.sockets import introduce
from meshwright.emulation.network import why_not
from meshwright.errors import CaptureError, LaunchError, LostRankError, WorkflowError
from meshwright.ir.run_model import FactoryModel, MLPModel, ResNetModel
from meshwright.serving import reading, station
from meshwright.serving.choose import choose
from meshwright.serving.local import tier_rates
from meshwright.serving.models import InferenceModel, examples_of, items_of, module_of
from meshwright.serving.on_ray import run_on_ray
from meshwright.serving.profile import profile, with_profiles
from meshwright.serving.station import Station, StationJob, StationLog, played
from meshwright.serving.wire import Header, Inbox, Outbox
from meshwright.serving.workflow import Link, Operator, Source, Tier, Variant, Worker, Workflow

TOLERANCE, TOKEN = 1e-5, "the token of this job"


class Scores(nn.Module):
    """Scores of two inputs together."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, 3), nn.Linear(8, 3)

    def forward(self, features: Tensor, sound: Tensor) -> Tensor:
        return torch.softmax(self.first(features) + self.second(sound), -1)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.inner(values, values, values, need_weights=False)[0]
        return result


def pictures(rate: float = 100.0) -> Workflow:
    """Features of a picture at the edge, joined with a sound in the cloud."""
    residual = ResNetModel(depth=8, width=4, classes=6, image_channels=3)
    return Workflow(
        name="pictures", tiers=(Tier(name="edge"), Tier(name="cloud")),
        links=(Link(source="edge", target="cloud", usd_per_gib=0.1, bits_per_s=1e8),),
        workers=(
            Worker(name="near-1", tier="edge", device="core", usd_per_hour=0.1),
            Worker(name="near-2", tier="edge", device="core", usd_per_hour=0.1),
            Worker(name="far", tier="cloud", device="core", usd_per_hour=0.1),
        ),
        sources=(
            Source(name="camera", tier="edge", rate_per_s=rate, shape=(3, 16, 16)),
            Source(name="microphone", tier="edge", rate_per_s=rate, shape=(8,)),
        ),
        operators=(
            Operator(name="features", inputs=("camera",), variants=(
                Variant(name="residual", model=residual, seconds={"core": 0.012}, message_bytes=24.0),
            )),
            Operator(name="scores", inputs=("features", "microphone"), variants=(
                Variant(name="linear", seconds={"core": 0.002}, message_bytes=12.0, model=FactoryModel(
                    factory="tests.end_to_end.test_serving:Scores", arguments={"features": 6},
                )),
            )),
        ),
    )  # fmt: skip


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (lambda: Scores(6), [(6,), (8,)]),
        (lambda: module_of(pictures().operators[0], pictures().operators[0].variants[0]), [(3, 16, 16)]),
        (Attends, [(5, 16)]),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten()), [(3, 8, 8)]),
    ],
)
def test_a_captured_model_answers_as_the_model(make: Callable[[], nn.Module], shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    module = make().eval()
    captured = InferenceModel(module, [torch.zeros(1, *shape) for shape in shapes])
    for _ in range(2):
        inputs = [torch.randn(1, *shape) for shape in shapes]
        expected = module(*inputs)
        output = captured(*inputs)
        assert output.shape == expected.shape
        assert (output - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.detach().abs().max()))


def test_costs_are_those_of_the_cost_model_of_training() -> None:
    """A matrix product has the FLOPs of its sizes, and a faster device takes less time."""
    model = InferenceModel(nn.Linear(512, 256), [torch.zeros(1, 512)])
    products = [kernel for phase in model.program.phases for node in phase.nodes for kernel in node.kernels]
    assert max(kernel.flops for kernel in products) == 2 * 512 * 256
    here, fast = (known_cluster(name, torch.device("cpu")) for name in ("cpu-local", "a100-80gb-dgx-hdr200x8"))
    big = InferenceModel(nn.Linear(8192, 8192), [torch.zeros(1, 8192)])
    assert 0 < model.predicted_s(here) < big.predicted_s(here)
    assert big.predicted_s(fast) < big.predicted_s(here)


def test_a_model_without_one_tensor_is_refused() -> None:
    with pytest.raises(CaptureError, match="it returns a tuple"):
        InferenceModel(nn.LSTM(4, 4, batch_first=True), [torch.zeros(1, 3, 4)])


def test_profiles_are_written_into_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pictures.toml"
    reading.save(pictures(), path)
    assert cli(["serve", "profile", str(path), "--device", "laptop"]) == 0
    assert "residual" in capsys.readouterr().out
    loaded = reading.load(path)
    for operator in loaded.operators:
        for variant in operator.variants:
            assert set(variant.seconds) == {"core", "laptop"}
            assert variant.seconds["laptop"] > 0
    assert [operator.variants[0].message_bytes for operator in loaded.operators] == [24.0, 12.0]


def test_profiles_of_other_devices_are_predicted() -> None:
    profiles = profile(pictures(), cluster="a100-80gb-dgx-hdr200x8")
    assert [profile.measured_s for profile in profiles] == [0.0, 0.0]
    filled = with_profiles(pictures(), profiles, "a100")
    assert filled.operators[0].variants[0].seconds["a100"] == profiles[0].predicted_s > 0

    # a variant without a model is left out, also where it is the first
    features, scores = pictures().operators
    bare = msgspec.structs.replace(features.variants[0], name="bare", model=None)
    features = msgspec.structs.replace(features, variants=(bare, *features.variants))
    mixed = msgspec.structs.replace(pictures(), operators=(features, scores))
    assert profile(mixed, cluster="a100-80gb-dgx-hdr200x8") == profiles


def test_models_that_are_missing_or_refuse_their_inputs_are_named() -> None:
    with pytest.raises(WorkflowError, match="no variant has a model"):
        profile(reading.load("vqa"))
    wrong = MLPModel(sizes=(7, 3))
    broken = msgspec.structs.replace(pictures().operators[0].variants[0], model=wrong)
    operator = msgspec.structs.replace(pictures().operators[0], variants=(broken,))
    workflow = msgspec.structs.replace(pictures(), operators=(operator, pictures().operators[1]))
    with pytest.raises(WorkflowError, match=r"operators.features.residual: the model refuses its inputs \(1x3x16x16\)"):
        examples_of(workflow, {"features": "residual", "scores": "linear"})
    shapeless = msgspec.structs.replace(pictures().sources[0], shape=(), message_bytes=10.0)
    with pytest.raises(WorkflowError, match=r"sources.camera: it has no shape"):
        items_of(shapeless, 1)


# --- runs ------------------------------------------------------------------------------------------------------------


def in_threads(job: StationJob) -> list[StationLog]:
    """All stations of a job in this process."""
    stations = {name: Station(job, name, "127.0.0.1", TOKEN) for name in job.stations}
    addresses = {name: station.address for name, station in stations.items()}
    with ThreadPoolExecutor(len(stations)) as pool:
        begin_s = time.time() + 0.05
        return list(pool.map(lambda station: station.run(addresses, begin_s), stations.values()))


def test_stations_compute_what_the_models_compute() -> None:
    workflow = pictures()
    plan = choose(workflow)
    assert len(plan.choice("features").workers) == 2
    job = StationJob(workflow=workflow, plan=plan, items=11)
    logs = in_threads(job)
    modules = {operator.name: module_of(operator, operator.variants[0]).eval() for operator in workflow.operators}
    items = {source.name: items_of(source, 8, job.seed) for source in workflow.sources}
    with torch.inference_mode():
        expected = [
            float(
                modules["scores"](modules["features"](items["camera"][item % 8]), items["microphone"][item % 8]).sum()
            )
            for item in range(11)
        ]
    (sink,) = [log for log in logs if log.operator == "scores"]
    sums = {item: value for (item, *_), value in zip(sink.times, sink.sums, strict=True)}
    assert [sums[item] for item in range(11)] == pytest.approx(expected, abs=TOLERANCE)
    shares = {log.name: len(log.times) for log in logs if log.operator == "features"}
    assert sorted(shares.values()) == [5, 6]
    account = played(logs, workflow)
    assert len(account.latencies_s) == 11
    assert min(account.latencies_s) > 0
    assert set(account.busy_s) == set(plan.operator_of)


def test_stations_wait_for_items_that_are_not_due_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(station, "PATIENCE_S", 0.6)
    workflow = pictures(rate=1.0)
    logs = in_threads(StationJob(workflow=workflow, plan=choose(workflow), items=3, emulate=True))
    assert sum(len(log.times) for log in logs if log.operator == "scores") == 3


def test_messages_arrive_as_they_were_sent_and_others_are_refused() -> None:
    inbox = Inbox("127.0.0.1", TOKEN)
    outbox = Outbox(inbox.address, TOKEN)
    sent = [(Header(item, "camera", "float32", (2, item)), bytes(8 * item)) for item in range(3)]
    for header, payload in sent:
        outbox.send(header, payload)
    outbox.close()
    messages = [inbox.next(5.0) for _ in sent]
    assert [(header, bytes(payload)) for header, payload, _ in messages] == sent
    with socket.create_connection(inbox.address) as stranger:
        introduce(stranger, TOKEN)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(LostRankError, match="a message is damaged: it claims"):
            inbox.next(5.0)
    inbox.close()
    gone = Outbox(inbox.address, TOKEN)
    with pytest.raises(LostRankError, match="cannot be reached"):
        gone.close()


def test_a_station_takes_nothing_from_a_stranger(caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox("127.0.0.1", TOKEN)
    with socket.create_connection(inbox.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.")
        assert stranger.recv(1) == b"-"
    outbox = Outbox(inbox.address, "another")
    with pytest.raises(LostRankError, match="it refuses the connection: its job has another token"):
        outbox.close()
    with pytest.raises(queue.Empty):
        inbox.next(0.05)
    assert {record.getMessage() for record in caplog.records} == {
        "a connection from 127.0.0.1 is refused: it does not have the token of this job"
    }
    inbox.close()


def test_a_plan_runs_in_processes_beside_its_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workflow = msgspec.structs.replace(pictures(rate=40.0), workers=pictures().workers[1:])
    reading.save(workflow, tmp_path / "pictures.toml")
    links = [] if why_not() else ["--links"]
    arguments = ["serve", "run", "pictures.toml", "--items", "20", "--emulate", *links, "--page", "run.html"]
    assert cli(arguments) == 0
    output = capsys.readouterr().out
    assert "meas/pred" in output
    assert "Devices were emulated" in output
    page = (tmp_path / "run.html").read_text()
    assert page.count("<polyline") == 2
    assert "meshwright serve run pictures.toml --items 20 --emulate" in page


def test_a_plan_runs_on_a_local_ray_cluster() -> None:
    """The benchmark runs two tiers; here, one source and one worker are on the node that has the tier's label."""
    pytest.importorskip("ray")
    both = pictures(rate=40.0)
    workflow = msgspec.structs.replace(
        both, tiers=(Tier(name="edge", labels={"place": "street"}),), links=(),
        workers=both.workers[:1], sources=both.sources[:1], operators=both.operators[:1],
    )  # fmt: skip
    account = run_on_ray(StationJob(workflow=workflow, plan=choose(workflow), items=12, emulate=True))
    assert len(account.latencies_s) == 12
    assert min(account.latencies_s) >= 0.012


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_ray(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(LaunchError, match=r"Ray is not installed(.|\n)*pip install 'meshwright\[ray\]'"):
        run_on_ray(StationJob(workflow=pictures(), plan=choose(pictures()), items=2))


def test_what_cannot_be_emulated_or_combined_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert tier_rates(pictures()) == [1e8, 1e11]
    late = msgspec.structs.replace(pictures().links[0], latency_s=0.01)
    with pytest.raises(WorkflowError, match=r"a latency of 0.01 s cannot be emulated"):
        tier_rates(msgspec.structs.replace(pictures(), links=(late,)))
    assert cli(["serve", "run", "vqa", "--links", "--ray"]) == 2
    assert "links are emulated in local processes only" in capsys.readouterr().err
    assert cli(["serve", "run", "vqa", "--address", "x:1"]) == 2
    assert "an address without --ray" in capsys.readouterr().err
