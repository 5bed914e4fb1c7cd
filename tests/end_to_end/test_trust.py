"""What is refused: code and paths of run files and manifests, strangers at sockets, stores for all the network."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousParameters

from meshwright import api, config
from meshwright.cli import run as cli
from meshwright.comm import sockets
from meshwright.comm.sockets import admit, introduce
from meshwright.engines.job import Job
from meshwright.errors import FileFormatError, LaunchError, LostRankError
from meshwright.ir import files
from meshwright.runtime import launch, manifest, trust
from meshwright.runtime.launchers import KEEPS_STORE
from meshwright.runtime.manifest import DamagedCheckpointError, Manifest
from meshwright.runtime.meeting_point import kept_store
from meshwright.runtime.rendezvous import Rendezvous

LIMIT = timedelta(seconds=20)
RUN = (
    '[model]\nfactory = "{factory}"\nloss = "{loss}"\n'
    '[data]\nkind = "random"\nshape = [3]\nsamples = 16\nbatch_size = 4\n'
)
MINE = (
    "import os\nfrom os import system\nimport torch\n"
    "def net(width=2): return torch.nn.Linear(3, width)\n"
    "def loss(model, batch): return model(batch['inputs']).square().mean()\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project's folder, with the module ``mine_N``; the user has not said --trust."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    monkeypatch.setenv(trust.TRUST, "0")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield project
    for name in set(sys.modules) - before:
        if name.startswith("mine"):
            del sys.modules[name]


def written(folder: Path, text: str = MINE, name: str = "mine") -> None:
    (folder / f"{name}.py").write_text(text)


# --- code ------------------------------------------------------------------------------------------------------------


def test_code_of_the_projects_folder_and_our_models_need_no_word(folder: Path) -> None:
    written(folder)
    package = folder / "mine_package"
    package.mkdir()
    (package / "__init__.py").touch()
    written(package, name="inner")
    for name in ("mine:net", "mine_package.inner:loss", "meshwright.models:MLP"):
        assert callable(trust.imported(name, "model.factory")), name


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("os:system", "os"), ("builtins:exec", "builtins"), ("subprocess:call", "subprocess"),
        ("torch.nn:Linear", "torch.nn"), ("meshwright.engines.job:called", "meshwright.engines.job"),
        ("mine:system", "posix"), ("mine_outside:net", "mine_outside"), ("mine_linked:net", "mine_linked"),
    ],
)  # fmt: skip
def test_other_code_is_refused_before_it_is_imported(folder: Path, name: str, of: str) -> None:
    written(folder)
    outside = folder.parent / "elsewhere"
    outside.mkdir()
    written(outside, f"{MINE}open({str(folder / 'run')!r}, 'w')\n", "mine_outside")
    (folder / "mine_linked.py").symlink_to(outside / "mine_outside.py")
    sys.path.append(str(outside))
    with pytest.raises(FileFormatError) as caught:
        trust.imported(name, "model.factory")
    problem = f"model.factory: {name!r} is code of {of}, which does not lie in this project's folder ({folder})"
    assert str(caught.value).startswith(f"{problem}\n  -> add --trust if you trust this run file")
    assert not (folder / "run").exists()


def test_packages_installed_in_the_folder_are_not_its_own(folder: Path) -> None:
    packages = folder / ".venv" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    written(packages, name="mine_installed")
    sys.path.append(str(packages))
    with pytest.raises(FileFormatError, match="is code of mine_installed, which does not lie in"):
        trust.imported("mine_installed:net", "model.factory")


def test_after_trust_any_code_is_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.TRUST, "1")
    assert trust.imported("math:sqrt", "model.factory")(4.0) == 2.0
    with pytest.raises(FileFormatError, match="'none_such:f' cannot be imported"):
        trust.imported("none_such:f", "model.factory")


def test_the_command_line_asks_for_trust(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(folder)
    Path("own.toml").write_text(RUN.format(factory="mine:net", loss="mine:loss"))
    Path("other.toml").write_text(RUN.format(factory="torch.nn:Linear", loss="mine:loss"))
    with Path("other.toml").open("a") as file:
        file.write("[model.arguments]\nin_features = 3\nout_features = 2\n")
    assert cli(["plan", "own.toml"]) == 0
    assert cli(["plan", "other.toml"]) == 2
    stderr = capsys.readouterr().err
    assert "model.factory: 'torch.nn:Linear' is code of torch.nn, which does not lie in this project's folder" in stderr
    assert "-> add --trust if you trust this run file" in stderr
    assert cli(["plan", "other.toml", "--trust"]) == 0
    assert os.environ[trust.TRUST] == "1"


def test_ranks_trust_what_their_launcher_trusts(folder: Path) -> None:
    written(folder)
    run = config.make(config.tables(RUN.format(factory="mine:net", loss="mine:loss").encode(), where="t"), where="t")
    job = Job(run=run, file=Path("own.toml"), trust=True)
    assert job.command(ranks=2)[-3:] == ["--trust", "--train.ranks", "2"]
    assert "--trust" not in Job(run=run, file=Path("own.toml")).command()
    assert set(api.passed_on()) == {trust.TOKEN, trust.TRUST}


# --- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "path", "problem"),
    [
        ("data.path", "/etc/passwd", "is an absolute path outside of the folder"),
        ("data.paths", "../text.txt", "leads out of the folder"),
        ("data.paths", ["in.txt", "linked/*"], "is a symbolic link out of the folder"),
        ("data.cache_directory", "/tmp/cache", "is an absolute path outside of the folder"),
        ("layout.plan", "linked/plan.json", "is a symbolic link out of the folder"),
        ("layout.cluster", "../mine.toml", "leads out of the folder"),
        ("train.directory", "a/../../b", "leads out of the folder"),
        ("train.directory", "loop", "is no path"),
    ],
)
def test_paths_in_a_run_file_stay_in_the_folder(folder: Path, key: str, path: object, problem: str) -> None:
    (folder / "linked").symlink_to(folder.parent)
    (folder / "loop").symlink_to(folder / "loop")
    section, _, name = key.partition(".")
    with pytest.raises(FileFormatError) as caught:
        config.check_paths({section: {name: path}}, folder, where="RUN.toml")
    named = path if isinstance(path, str) else path[-1]  # type: ignore[index]
    assert str(caught.value).startswith(f"RUN.toml: {key}: {named!r} {problem}")
    assert f"give it as an option (--{key}), or add --trust" in str(caught.value)


def test_other_paths_are_allowed(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "link").symlink_to(folder / "data")
    sections = {
        "data": {"path": "link/x.npz", "paths": ["data/*.txt", "standard-library"]},
        "layout": {"plan": "auto", "cluster": "a100-dgx"}, "train": {"directory": str(folder / "runs")},
    }  # fmt: skip
    config.check_paths(sections, folder, where="RUN.toml")
    beside = {"train": {"directory": str(folder.parent / "runs")}, "data": {"path": "../x.npz"}}
    config.check_paths(beside, folder, where=str(folder.parent / "RUN.toml"))
    with pytest.raises(FileFormatError):
        config.check_paths(beside, folder, where=str(folder.parent / "deeper" / "RUN.toml"))


def test_options_may_name_any_path(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("digits.toml").write_text('[model]\nname = "mlp"\n[data]\nkind = "tensors"\npath = "/etc/none.npz"\n')
    assert cli(["plan", "digits.toml"]) == 2
    assert (
        "digits.toml: data.path: '/etc/none.npz' is an absolute path outside of the folder" in capsys.readouterr().err
    )
    for options in (["--data.path", f"{tmp_path}/none.npz"], ["--trust"]):
        Path("digits.toml").write_text('[model]\nname = "mlp"\n[data]\nkind = "tensors"\npath = "none.npz"\n')
        assert cli(["plan", "digits.toml", *options]) == 2
        assert "cannot be read: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("/etc/passwd", "is an absolute path outside of the folder"), ("../x", "leads out of the folder"),
        ("a/../b", "is no plain path in the folder"), ("", "is no plain path in the folder"),
        (".", "is no plain path in the folder"), ("out/x", "is a symbolic link out of the folder"),
    ],
)  # fmt: skip
def test_names_in_manifests_are_plain(tmp_path: Path, name: str, problem: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "out").symlink_to(tmp_path)
    assert files.inside(inner, "sub/x") == inner / "sub/x"
    with pytest.raises(FileFormatError, match=f"{problem}"):
        files.inside(inner, name)


@pytest.mark.parametrize(("data", "name"), [("../other", "x"), ("data-00000000", "../../x"), ("/etc", "passwd")])
def test_a_manifest_that_names_other_files_is_refused(tmp_path: Path, data: str, name: str) -> None:
    path = tmp_path / "ckpt"
    (path / "data-00000000").mkdir(parents=True)
    (tmp_path / "x").write_text("")
    bad_manifest = Manifest(
        step=1, model="m", fingerprint="f", optimizer=None, torch="t", meshwright="m", data=data,
        files={name: manifest.SavedFile(num_bytes=0, sha256="")}, tensors={}, plan={},
    )  # fmt: skip
    raw = json.loads(files.encode_json(bad_manifest))
    raw["checksum"] = manifest._checksum(raw)  # who writes a manifest can write its checksum
    (path / manifest.MANIFEST).write_text(json.dumps(raw))
    with pytest.raises(DamagedCheckpointError, match="it names a file that is not its own"):
        manifest.read(path)


def test_retention_follows_no_links(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "ckpt"
    other.mkdir()
    path.mkdir()
    (other / "__0_0.distcp").write_text("worth keeping")
    (path / "data-00000000").symlink_to(other)
    manifest._remove_data(path)
    assert (other / "__0_0.distcp").exists()


# --- connections -----------------------------------------------------------------------------------------------------


def pair() -> tuple[socket.socket, socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    return client, accepted


def test_a_connection_with_the_token_is_admitted_and_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    for given, is_ours in (("right", True), ("wrong", False), ("", False), ("right" * 9, False)):
        client, accepted = pair()
        with client, accepted:
            admitted: list[bool] = []
            thread = threading.Thread(target=lambda: admitted.append(admit(accepted, "right")))  # noqa: B023
            thread.start()
            if is_ours:
                introduce(client, given)
            else:
                with pytest.raises(LostRankError) as caught:
                    introduce(client, given)
                assert "it refuses the connection: its job has another token" in str(caught.value)
                assert "set MESHWRIGHT_TOKEN to the same text everywhere" in str(caught.value)
            thread.join()
            assert admitted == [is_ours]
    refusals = {record.getMessage() for record in caplog.records}
    assert refusals == {"a connection from 127.0.0.1 is refused: it does not have the token of this job"}


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"meshwright 1\n\xff\xff", b"meshwright 1\n\x02\x00ab", b""]
)
def test_strangers_are_refused(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "HELLO_S", 0.2)
    client, accepted = pair()
    with client, accepted:
        client.sendall(sent)
        assert not admit(accepted, "right")


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return False

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert not sockets.same_token("a", "a")
    client, accepted = pair()
    with client, accepted:
        client.sendall(b"meshwright 1\n\x01\x00a")
        assert not admit(accepted, "b")
    assert compared == [(b"a", b"a"), (b"a", b"b")]


def test_the_processes_of_a_job_agree_on_a_random_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trust.TOKEN, raising=False)
    store = dist.HashStore()
    tokens = {trust.token(store) for _ in range(3)}
    assert len(tokens) == 1
    assert len(tokens.pop()) == 32
    assert trust.token(dist.HashStore()) != trust.token(store)
    with pytest.raises(LaunchError, match="environment variable MESHWRIGHT_TOKEN: is not set"):
        trust.launched_token()
    monkeypatch.setenv(trust.TOKEN, "given")
    assert trust.token(store) == trust.launched_token() == "given"
    assert trust.with_token({trust.TOKEN: "given"}) == {trust.TOKEN: "given"}
    assert trust.with_token({"a": "b"})[trust.TOKEN] != trust.with_token({})[trust.TOKEN]


# --- stores ----------------------------------------------------------------------------------------------------------


def listening(port: int) -> set[str]:
    """The addresses at which this machine listens at a port, as /proc writes them."""
    addresses = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                addresses.add(local.rpartition(":")[0])
    return addresses


LOOPBACK = "0100007F"


def test_a_store_listens_at_one_address() -> None:
    store = kept_store("127.0.0.1", 0, LIMIT, "port")
    assert listening(store.port) == {LOOPBACK}
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=LIMIT)
    client.set("a", "b")
    assert store.get("a") == b"b"
    with pytest.raises(LaunchError, match=f"train.port: port {store.port} cannot be used: another program uses it"):
        kept_store("127.0.0.1", store.port, LIMIT, "train.port")
    everywhere = kept_store("", 0, LIMIT, "port")
    assert listening(everywhere.port)
    assert LOOPBACK not in listening(everywhere.port)


def meeting(is_host: bool, port: int, nodes: int = 2, seconds: float = 20.0) -> Rendezvous:
    return Rendezvous(
        RendezvousParameters("meshwright", f"127.0.0.1:{port}", "name", nodes, nodes, timeout=seconds, is_host=is_host)
    )


def test_launchers_meet_without_pickles() -> None:
    port = api.free_port()
    host, guest = meeting(True, port), meeting(False, port)
    rendezvous = []
    thread = threading.Thread(target=lambda: rendezvous.append(host.next_rendezvous()))
    thread.start()
    there = guest.next_rendezvous()
    thread.join()
    (here,) = rendezvous
    assert [(each.rank, each.world_size) for each in (here, there)] == [(0, 2), (1, 2)]
    info = there.bootstrap_store_info
    assert info is not None
    assert info.master_addr == "127.0.0.1"
    assert listening(port) == listening(info.master_port) == {LOOPBACK}
    assert here.bootstrap_store_info == info
    assert guest.num_nodes_waiting() == host.num_nodes_waiting() == 0
    with pytest.raises(RendezvousError, match="2 launchers have met without this one"):
        meeting(False, port).next_rendezvous()
    assert guest.shutdown()
    assert guest.is_closed()


def test_a_launcher_that_waits_in_vain_gives_up() -> None:
    with pytest.raises(RendezvousError):
        meeting(True, api.free_port(), seconds=0.2).next_rendezvous()


def ports_and_token() -> tuple[set[str], str, str]:
    environment = launch.environment()
    store = listening(int(environment["MASTER_PORT"]))
    return store, environment[trust.TOKEN], environment["MASTER_ADDR"]


def test_ranks_of_one_host_have_a_token_and_a_store_that_only_this_host_reaches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(trust.TOKEN, raising=False)
    store, token, address = api.run_ranks(ports_and_token, num_ranks=2, directory=tmp_path)
    assert (store, address, len(token)) == ({LOOPBACK}, "127.0.0.1", 32)


def test_rank_0_keeps_a_store_that_only_this_host_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under mpirun on one machine, where no launcher keeps the store."""
    port = api.free_port()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (variables | {KEEPS_STORE: "", "TORCHELASTIC_USE_AGENT_STORE": ""}).items():
        monkeypatch.setenv(name, value)
    launch.store_of_all().set("a", "b")
    assert listening(port) == {LOOPBACK}
    assert launch.keeps_store()
    assert launch.store_of_all().get("a") == b"b", "a second call connects to the same store"
