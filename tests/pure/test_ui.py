"""The explorer's server: who may ask, what it answers, and that names from files never become HTML."""

import html
import json
import os
import re
import shlex
import socket
import sys
import webbrowser
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette", reason="the extra `ui` is not installed")
from starlette.testclient import TestClient

from meshwright import prediction
from meshwright.cli import run as cli
from meshwright.cli import ui as command
from meshwright.errors import ClusterError, LaunchError, LayoutError, MeshwrightError
from meshwright.ir import files
from meshwright.ir.cluster import Cluster
from meshwright.ir.layout import Layout
from meshwright.ir.make_ledger import make_ledger
from meshwright.report.timeline import TICKS, ranks_timeline, stages_timeline
from meshwright.ui import run_list
from meshwright.ui.explorer import Explorer, Question, commands, read_question
from meshwright.ui.run_list import SHOWN, RunFolders
from meshwright.ui.server import application, listening
from tests.pure.test_ledger import BOX, MIB, plan_of, step
from tests.pure.test_report import balanced
from tests.pure.test_report_run import Page

TOKEN, PORT = "a-token", 8600
HOME = f"http://127.0.0.1:{PORT}"
ASKED = {"model": "llama3-8b", "cluster": "h100-dgx-ndr400x8", "devices": "16", "batch": "32"}
QUESTION = read_question(ASKED)
HOSTILE = "<img src=x onerror=alert(1)>"
EXPLORER = Explorer()


def write_run(folder: Path, microbatches: int = 2) -> None:
    """A folder as a run leaves it."""
    plan = msgspec.structs.replace(
        plan_of(Layout(pp=2, dp=2, microbatches=microbatches)), microbatches=microbatches, model=HOSTILE
    )
    predicted = step(plan, dict.fromkeys(range(4), (0.2, 0.01, 0.05)), "simulated", dict.fromkeys(range(4), 90 * MIB))
    measured = step(plan, dict.fromkeys(range(4), (0.25, 0.02, 0.06)), peaks=dict.fromkeys(range(4), 100 * MIB))
    spans = (msgspec.structs.replace(measured.spans[0], what=HOSTILE), *measured.spans[1:])
    measured = msgspec.structs.replace(measured, spans=spans)
    files.save(plan, folder / "plan.json")
    files.save(predicted, folder / "predicted.json")
    files.save(measured, folder / "trace.json")
    files.save(make_ledger(plan, predicted, [measured], BOX), folder / "ledger.json")
    (folder / "metrics.jsonl").write_text('{"step": 1, "step_s": 0.3, "loss": 5.0}\n')
    (folder / "run.toml").write_text(f"# {HOSTILE}\n")


def client_of(runs: Path, plans: tuple[Path, ...] = ()) -> TestClient:
    """A client without the token."""
    app = application(EXPLORER, RunFolders(runs), TOKEN, PORT, plans)
    return TestClient(app, base_url=HOME, follow_redirects=False)


@pytest.fixture
def stranger(tmp_path: Path) -> TestClient:
    return client_of(tmp_path)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, microbatches in (("first", 2), ("second", 4), (HOSTILE, 2)):
        write_run(tmp_path / "runs" / name, microbatches)
    return tmp_path / "runs"


@pytest.fixture
def client(runs: Path) -> TestClient:
    """A client that has opened the printed address."""
    known = client_of(runs)
    assert known.get(f"/?token={TOKEN}").status_code == 303
    return known


def recorded(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[tuple[Any, ...]]:
    """The arguments of every call of ``place.name``, which does what it did."""
    calls: list[tuple[Any, ...]] = []
    function = getattr(place, name)

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        return function(*arguments, **named)

    monkeypatch.setattr(place, name, call)
    return calls


def text_of(client: TestClient, address: str, **query: str) -> str:
    answer = client.get(address, params=query or None)
    assert answer.status_code == 200, answer.text
    return answer.text


# Who may ask


@pytest.mark.parametrize("address", ["/", "/?token=wrong", "/?token=", "/?start=", "/runs", "/static/style.css", "/no"])
def test_without_the_token_nothing_is_answered(stranger: TestClient, address: str) -> None:
    answer = stranger.get(address)
    assert answer.status_code == 403
    assert "the token is missing or wrong\n  -> open the address that `meshwright ui` has printed" in answer.text
    assert "set-cookie" not in answer.headers


def test_the_token_in_the_address_becomes_a_cookie_of_this_site_alone(stranger: TestClient) -> None:
    answer = stranger.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith(f"meshwright-{PORT}=")
    assert "samesite=strict" in cookie
    assert "httponly" in cookie
    assert stranger.get("/").status_code == 200


def test_programs_send_the_token_as_a_header(stranger: TestClient) -> None:
    assert stranger.get("/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert stranger.get("/runs", headers={"Authorization": "Bearer other"}).status_code == 403


def test_the_address_that_a_browser_is_started_with_works_once(tmp_path: Path) -> None:
    app = application(EXPLORER, RunFolders(tmp_path), TOKEN, PORT)
    first, second = (TestClient(app, base_url=HOME, follow_redirects=False) for _ in range(2))
    address = f"/?start={app.start}"
    assert first.get(address).status_code == 303
    assert first.get("/").status_code == 200
    assert second.get(address).status_code == 403


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({"Host": "evil.example"}, "this is not the address of the explorer"),
        ({"Host": f"evil.example:{PORT}"}, "this is not the address of the explorer"),
        ({"Origin": "https://evil.example"}, "another site's page asks"),
        ({"Origin": "null"}, "another site's page asks"),
        ({"Origin": f"http://127.0.0.1:{PORT + 1}"}, "another site's page asks"),
        ({"Sec-Fetch-Site": "cross-site"}, "another site's page asks"),
        ({"Sec-Fetch-Site": "same-site"}, "another site's page asks"),
    ],
)
def test_pages_of_other_sites_and_ports_are_refused_even_with_the_cookie(
    client: TestClient, headers: dict[str, str], problem: str
) -> None:
    answer = client.get("/runs", headers=headers)
    assert answer.status_code == 403
    assert problem in answer.text
    assert "access-control-allow-origin" not in answer.headers


def test_nothing_can_be_changed(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert client.request(method, "/runs").status_code == 405


def test_every_answer_forbids_scripts_frames_and_requests_elsewhere(client: TestClient, stranger: TestClient) -> None:
    for answer in (client.get("/"), client.get("/runs"), client.get("/static/timeline.js"), stranger.get("/")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


# What it answers


def test_pages_are_whole_and_name_nothing_elsewhere(client: TestClient) -> None:
    for address in ("/", "/runs", "/run?name=first", "/compare?old=run:first&new=run:second"):
        page = text_of(client, address)
        balanced(re.sub(r"<(rect|circle|line|polyline|path)[^>]*/>", "", page))
        assert not re.search(r"https?://|@import|url\(", page)
        attributes = Page(page).attributes
        assert not [name for _, name, _ in attributes if name == "style" or name.startswith("on")]
        named = [value for _, name, value in attributes if name in ("src", "href", "action", "data-source")]
        assert all(each.startswith(("/", "#")) for each in named)
        for each in named:
            if each.startswith("/static/"):
                assert client.get(each).status_code == 200


def test_an_answer_shows_the_best_layout_the_front_and_the_commands(client: TestClient) -> None:
    page = html.unescape(text_of(client, "/explore/answer", **ASKED))
    result = prediction.find_layouts("llama3-8b", ASKED["cluster"], devices=16, global_batch=32)
    best = result.options[0]
    assert f"{best.step_s:.4g} s" in page
    assert all(option.text in page for option in result.front)
    assert page.count('class="dot d0"') + page.count('class="dot chosen"') >= 2
    assert page.count('class="dot chosen"') == 1
    for part in ("Where the time goes", "What the memory holds", "One step over time", "Take it along"):
        assert part in page
    assert "meshwright plan llama3-8b --cluster h100-dgx-ndr400x8 --ranks 16 --batch 32" in page


def test_a_search_is_made_once_for_all_of_its_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = recorded(monkeypatch, prediction, "find_layouts")
    explorer = Explorer()
    answer = explorer.answer(QUESTION)
    for layout in answer.report.front[:3]:
        shown = explorer.answer(msgspec.structs.replace(QUESTION, layout=layout.words))
        assert shown.report.words == layout.words
        assert shown.chosen.step_s == pytest.approx(layout.step_s)
    explorer.timeline(QUESTION)
    assert len(searches) == 1


def test_what_if_questions_change_the_answer_as_they_should() -> None:
    usual = EXPLORER.answer(QUESTION).chosen
    slower = EXPLORER.answer(msgspec.structs.replace(QUESTION, between=0.1)).chosen
    assert slower.step_s > usual.step_s
    whole = EXPLORER.answer(msgspec.structs.replace(QUESTION, recompute="full"))
    assert {option.setup.recompute for option in (*whole.result.options, *whole.result.front)} == {"full"}
    doubled = EXPLORER.answer(msgspec.structs.replace(QUESTION, seq=4096)).chosen
    assert doubled.setup.model.sequence == 4096


def test_links_of_other_speeds_change_their_level_alone() -> None:
    cluster = prediction.load_cluster("h100-dgx-ndr400x8", 16)
    faster = prediction.with_links(cluster, between=4.0)
    assert [level.beta_s_per_byte for level in faster.levels] == [
        cluster.levels[0].beta_s_per_byte, *(level.beta_s_per_byte / 4 for level in cluster.levels[1:])
    ]  # fmt: skip
    assert [level.alpha_s for level in faster.levels] == [level.alpha_s for level in cluster.levels]
    assert faster.name == "h100-dgx-ndr400x8 with links between boxes x4"
    assert prediction.with_links(cluster) is cluster
    box = prediction.load_cluster("h100-dgx-ndr400x8", 8)
    one_box = msgspec.structs.replace(box, levels=box.levels[:1])
    with pytest.raises(ClusterError, match="it has no links between boxes"):
        prediction.with_links(one_box, between=2.0)
    for factor in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(ClusterError, match="links inside boxes that are"):
            prediction.with_links(cluster, inside=factor)


def test_words_of_a_layout_are_read_as_they_were_written() -> None:
    result = EXPLORER.answer(QUESTION).result
    setups = [option.setup for option in (*result.options, *result.front)]
    assert any(setup.grid for setup in setups)
    device = prediction.load_cluster(QUESTION.cluster, QUESTION.devices).device
    for setup in setups:
        words = prediction.layout_words(setup)
        assert prediction.setup_of(words, setup.model, setup.global_batch, setup.world_size, device) == setup


def test_devices_without_bfloat16_are_answered_in_float16() -> None:
    question = msgspec.structs.replace(QUESTION, model="llama2-7b", cluster="v100-dgx2h-edr100x8", devices=32)
    for layout in ("", "tp=8", "tp=8,precision=fp16"):
        asked = msgspec.structs.replace(question, layout=layout)
        answer = EXPLORER.answer(asked)
        assert answer.chosen.setup.precision == "fp16"
        assert ("precision", "fp16") in [row[:2] for row in answer.report.layout]
        assert "--precision fp16" in commands(asked, answer.chosen)[2][1]
    with pytest.raises(LayoutError, match="precision 'bf16', which v100 does not compute in"):
        EXPLORER.answer(msgspec.structs.replace(question, layout="tp=8,precision=bf16"))


def test_the_exported_commands_make_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    result = EXPLORER.answer(QUESTION).result
    for option in (result.options[0], next(each for each in result.options if each.setup.grid)):
        line = commands(QUESTION, option)[2][1]
        assert cli([*shlex.split(line)[1:], "--json"]) in (0, 1)
        document = json.loads(capsys.readouterr().out)
        assert document["setup"] == json.loads(msgspec.json.encode(option.setup))
        assert document["estimate"]["step_s"] == pytest.approx(option.estimate.step_s)
    line = commands(msgspec.structs.replace(QUESTION, recompute="full"), result.options[0])[0][1]
    assert cli([*shlex.split(line)[1:], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {option["setup"].get("recompute", "none") for option in document["front"]} == {"full"}


def test_files_are_saved_and_read_again(client: TestClient, tmp_path: Path) -> None:
    answer = client.get("/explore/cluster.toml", params=ASKED | {"between": "2"})
    assert answer.headers["content-disposition"] == 'attachment; filename="cluster.toml"'
    (tmp_path / "cluster.toml").write_bytes(answer.content)
    assert Cluster.load(tmp_path / "cluster.toml").name == "h100-dgx-ndr400x8 with links between boxes x2"
    assert json.loads(text_of(client, "/explore/layout.json", **ASKED))["setup"]["global_batch"] == 32
    assert "default-src 'none'" in text_of(client, "/explore/report.html", **ASKED)
    assert json.loads(text_of(client, "/run/plan.json", name="first"))["microbatches"] == 2
    assert "The ledger" in text_of(client, "/run/report.html", name="first")


def test_a_timeline_has_every_span_and_every_rank() -> None:
    reply = EXPLORER.answer(QUESTION)
    option = next(each for each in reply.result.options if each.setup.pp > 1 and each.setup.dp > 1)
    setup = option.setup
    words = prediction.layout_words(setup)
    timeline = EXPLORER.timeline(msgspec.structs.replace(QUESTION, layout=words))
    trace = prediction.rehearsed_trace(setup, reply.cluster)
    assert trace is not None
    assert sum(len(lane.starts) for lane in timeline.lanes) == len(trace.spans)
    lane = timeline.lanes[0]
    first = [span for span in trace.spans if span.rank == 0]
    for span, start, length, name in zip(first, lane.starts, lane.lengths, lane.names, strict=True):
        assert timeline.names[name] == span.what
        assert start / TICKS * timeline.duration_s == pytest.approx(span.start_s, abs=1e-6 * timeline.duration_s)
        assert length / TICKS * timeline.duration_s == pytest.approx(span.duration_s, abs=1e-6 * timeline.duration_s)
    stages, every = timeline.views
    assert len(stages.rows) == setup.pp
    assert [row.rank for row in every.rows] == list(range(16))
    order = [("tp", setup.tp), ("cp", setup.cp), (setup.inner, getattr(setup, setup.inner))]
    order.append(("dp", setup.dp) if setup.inner == "pp" else ("pp", setup.pp))
    for row in every.rows:
        rest, coordinate = row.rank, {}
        for axis, size in order:
            rest, coordinate[axis] = divmod(rest, size)
        assert row.lanes == stages.rows[coordinate["pp"]].lanes


def test_timelines_of_runs_lay_predicted_over_measured(client: TestClient) -> None:
    timeline = json.loads(text_of(client, "/run/timeline.json", name="first"))
    assert [view["name"] for view in timeline["views"]] == ["all 4 ranks", "only predicted", "only measured"]
    labels = [row["label"] for row in timeline["views"][0]["rows"]]
    assert labels[:3] == ["rank 0 predicted", "rank 0 measured", "rank 1 predicted"]
    assert HOSTILE in timeline["names"]


def test_without_spans_a_timeline_is_empty() -> None:
    nothing = msgspec.structs.replace(step(plan_of(Layout(dp=2)), {0: (0.1, 0.0, 0.0)}), spans=(), memory=())
    assert ranks_timeline({"measured": nothing}).views[0].rows == []
    assert stages_timeline(nothing).lanes == []


# Runs and plans


def test_runs_are_listed_with_what_was_predicted_for_them(client: TestClient) -> None:
    page = text_of(client, "/runs")
    assert "3 runs, newest first" in page
    assert page.count("dp2 x pp2") == 3
    assert HOSTILE not in page
    assert html.escape(HOSTILE) in page
    assert "1 run with" in text_of(client, "/runs", q="sec")
    assert "No run has that in its name" in text_of(client, "/runs", q="nothing")


def test_names_and_texts_of_run_files_are_never_html(client: TestClient) -> None:
    for address, query in (("/run", {"name": HOSTILE}), ("/compare", {"old": f"run:{HOSTILE}", "new": HOSTILE})):
        page = text_of(client, address, **query)
        assert HOSTILE not in page
        assert html.escape(HOSTILE) in page


def test_a_damaged_run_is_told_and_the_list_stays(client: TestClient, runs: Path) -> None:
    (runs / "first" / "ledger.json").write_text("{")
    assert "not valid JSON" in text_of(client, "/runs")
    answer = client.get("/run", params={"name": "first"})
    assert answer.status_code == 400
    assert "not valid JSON" in answer.text
    (runs / "second" / "plan.json").unlink()
    assert "there is no plan.json" in client.get("/run", params={"name": "second"}).text


@pytest.mark.parametrize("name", ["", "..", "../runs/first", "/etc", "first/../second", "nothing", "a\0b"])
def test_only_runs_of_the_list_are_read(client: TestClient, name: str) -> None:
    for address in ("/run", "/run/timeline.json", "/run/plan.json"):
        answer = client.get(address, params={"name": name})
        assert answer.status_code == 400
        assert "there is no such run" in answer.text


def test_a_folder_whose_name_is_no_text_is_shown(client: TestClient, runs: Path) -> None:
    strange = os.fsdecode(b"strange-\xff-\xfe")
    write_run(runs / strange)
    page = text_of(client, "/runs")
    assert "strange-\ufffd-\ufffd" in page
    assert client.get("/run?name=strange-%FF-%FE").status_code == 200


def test_of_many_runs_only_those_on_the_page_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10_000):
        folder = tmp_path / f"run-{number:05d}"
        folder.mkdir()
        (folder / "run.toml").touch()
    read = recorded(monkeypatch, run_list.files, "load")
    (tmp_path / "run-00007" / "ledger.json").write_text("{")
    os.utime(tmp_path / "run-00007" / "run.toml", (2e9, 2e9))
    folders = RunFolders(tmp_path)
    page = folders.page()
    assert (len(page.rows), page.total, page.pages) == (SHOWN, 10_000, 200)
    assert page.rows[0].problem.startswith("not valid JSON")
    assert {path for path, _ in read if path.exists()} == {tmp_path / "run-00007" / "ledger.json"}
    assert len(read) <= SHOWN
    assert [row.name for row in folders.page("00042").rows] == ["run-00042"]
    assert len(folders.page(number=200).rows) == SHOWN
    assert folders.page(number=999).page == 200


def test_the_folder_may_be_a_run_itself_or_missing(runs: Path) -> None:
    assert [(row.name, row.link) for row in RunFolders(runs / "first").page().rows] == [("first", ".")]
    assert RunFolders(runs / "missing").page().rows == ()


def test_plans_are_compared_line_by_line(runs: Path) -> None:
    client = client_of(runs, (runs / "second" / "plan.json",))
    client.get(f"/?token={TOKEN}")
    page = text_of(client, "/compare", old="run:first", new=str(runs / "second" / "plan.json"))
    assert "2 micro-batches" in page
    assert "4 micro-batches" in page
    assert "The plans are the same" in text_of(client, "/compare", old="run:first", new="run:first")
    assert "there is no such plan" in text_of(client, "/compare", old="/etc/passwd", new="run:first")
    assert "a layout by sizes is no plan" in text_of(client, "/compare", old="layout:model=gpt2", new="run:first")


def test_layouts_are_compared_line_by_line(client: TestClient) -> None:
    query = "&".join(f"{key}={value}" for key, value in ASKED.items())
    page = text_of(client, "/compare", old=f"layout:{query}", new=f"layout:{query}&recompute=full")
    assert re.search(r"<th scope=\"row\">recompute</th><td class=\"old\">-</td><td class=\"new\">full</td>", page)
    assert "memory: activations" in page
    assert "the question" in text_of(client, "/compare", old=f"layout:{query}&no=1", new=f"layout:{query}")


# What cannot be answered


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"model": "llama3-8"}, "unknown model 'llama3-8'"),
        ({"model": "/etc/passwd"}, "unknown model"),
        ({"cluster": "/tmp/x.toml"}, "unknown cluster"),
        ({"cluster": "../x"}, "unknown cluster"),
        ({"cluster": "h100-nothing"}, "h100-nothing"),
        ({"software": "x.toml"}, "unknown software"),
        ({"devices": "0"}, "Expected `int` >= 1"),
        ({"devices": "1e9"}, "Expected `int`"),
        ({"devices": "17"}, "do not fill whole units"),
        ({"between": "0"}, "links between boxes that are 0 times as fast"),
        ({"recompute": "some"}, "Invalid enum value"),
        ({"layout": "tp=7"}, "not divisible"),
        ({"layout": "warp=7"}, "is not a word of a layout"),
        ({"layout": "tp=x"}, "is not a whole number"),
        ({"layout": "tp=8,dp=1"}, "has 8 ranks, not 16"),
        ({"surprise": "1"}, "unknown field `surprise`"),
        ({"layout": HOSTILE}, "is not a word of a layout"),
    ],
)
def test_what_cannot_be_answered_is_told_with_a_remedy(
    client: TestClient, changed: dict[str, str], problem: str
) -> None:
    answer = client.get("/explore/answer", params=ASKED | changed)
    assert answer.status_code == 400
    assert problem in html.unescape(answer.text)
    assert 'role="alert"' in answer.text
    assert HOSTILE not in answer.text
    with pytest.raises(MeshwrightError) as caught:
        EXPLORER.answer(read_question(ASKED | changed))
    assert caught.value.remedy


def test_a_schedule_that_is_too_long_to_be_shown_is_told(client: TestClient) -> None:
    asked = ASKED | {"batch": "262144", "layout": "pp=16,tp=1"}
    answer = client.get("/explore/timeline.json", params=asked)
    assert answer.status_code == 400
    assert "too many actions to be shown" in answer.text


def test_files_that_the_command_line_names_are_offered(tmp_path: Path) -> None:
    machine = tmp_path / "mine.toml"
    files.save(prediction.load_cluster("h100-dgx-ndr400x8", 16), machine)
    explorer = Explorer((), (str(machine),))
    assert explorer.first.cluster == str(machine)
    question = msgspec.structs.replace(QUESTION, cluster=str(machine))
    assert explorer.answer(question).cluster.num_devices == 16
    with pytest.raises(ClusterError, match="unknown cluster"):
        EXPLORER.answer(question)


# The command


def test_a_taken_port_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match="the port cannot be used"):
            listening(port)
        assert cli(["ui", "--port", str(port), "--no-browser"]) == 2
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port}: the port cannot be used: Address already in use\n  -> give another --port" in error


def test_the_command_prints_the_address_and_needs_no_browser(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    served: list[socket.socket] = []

    def run(self: object, sockets: list[socket.socket]) -> None:
        served.extend(sockets)
        sockets[0].close()

    monkeypatch.setattr("uvicorn.Server.run", run)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert cli(["ui", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert re.match(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}\n", output)
    assert "no browser can be opened here" in output
    assert len(served) == 1
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", lambda url: True)
    opened = recorded(monkeypatch, webbrowser, "open")
    assert cli(["ui", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "no browser" not in output
    ((shown,),) = opened
    assert "?start=" in shown
    assert shown.partition("start=")[2] not in output
    assert cli(["ui", "--plan", str(tmp_path / "no.json")]) == 2
    assert "no.json: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_extra_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("meshwright.ui.server", "meshwright.ui.gate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert cli(["ui", "--no-browser"]) == 2
    error = capsys.readouterr().err
    assert f"meshwright ui: {package} is not installed\n  -> pip install 'meshwright[ui]'" in error


def test_the_command_has_a_screen_only_where_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not command._has_screen()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert command._has_screen()


def test_a_question_without_values_is_the_usual_one() -> None:
    assert read_question({"layout": "", "software": ""}) == Question()
    with pytest.raises(LayoutError):
        read_question({"devices": "many"})
