"""Faults of files: damaged, missing, of another model or version, and permissions that are wrong."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from benchmarks.campaign.processes import AGAIN, stopped
from benchmarks.campaign.site import KEEP, Site
from meshwright.runtime import manifest

BEFORE = r"the one before it is tried"
MISTAKE = {2}
TENSORS = "data-*/*.distcp"


def _latest(site: Site) -> Path:
    """The latest checkpoint, when there are at least two."""
    stopped(site, least=3)
    names = manifest.steps_in(site.checkpoints)
    steps = [int(name.removeprefix("step-")) for name in names]
    site.damaged.add(steps[0])
    site.promised = steps[1]
    site.notes["damaged"], site.notes["promised"] = steps[0], steps[1]
    return site.checkpoints / names[0]


def flip(path: Path, place: int, bit: int) -> None:
    """Flip a bit of a file."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def _filled(checkpoint: Path, pattern: str = TENSORS) -> list[Path]:
    """The files that hold something: a stage without parameters writes an empty file, which is not read."""
    return sorted(path for path in checkpoint.glob(pattern) if path.stat().st_size)


def _flipped(site: Site, pattern: str) -> None:
    path = site.draw.choice(_filled(_latest(site), pattern))
    place, bit = site.draw.randrange(path.stat().st_size), site.draw.randrange(8)
    flip(path, place, bit)
    site.notes["bit"] = f"{path.name}:{place}.{bit}"
    site.finish(codes={0}, words=BEFORE)


def bit_flip_in_tensors(site: Site) -> None:
    """A bit of a file with tensors is another."""
    _flipped(site, TENSORS)


def bit_flip_in_small_files(site: Site) -> None:
    """A bit of trainer.pt, of an index, or of the metadata is another."""
    _flipped(site, site.draw.choice(["data-*/trainer.pt", "data-*/index.json", "data-*/.metadata"]))


def bit_flip_in_manifest(site: Site) -> None:
    """A bit of a manifest is another."""
    _flipped(site, "manifest.json")


def torn_write(site: Site) -> None:
    """A file of the latest checkpoint is cut off."""
    path = site.draw.choice([path for path in _filled(_latest(site), "**/*") if path.is_file()])
    os.truncate(path, site.draw.randrange(path.stat().st_size))
    site.notes["file"] = path.name
    site.finish(codes={0}, words=BEFORE)


def missing_shard(site: Site) -> None:
    """A file with tensors is not there."""
    site.draw.choice(_filled(_latest(site))).unlink()
    site.finish(codes={0}, words=BEFORE)


def all_damaged(site: Site) -> None:
    """No checkpoint is whole: the command says so, and begins nothing. Without them, the run begins again."""
    _latest(site)
    for path in site.checkpoints.glob("step-*/data-*/trainer.pt"):
        flip(path, site.draw.randrange(path.stat().st_size), site.draw.randrange(8))
    site.promised = -1
    site.start()
    site.judge(MISTAKE, r"none of its \d checkpoints is whole")
    shutil.rmtree(site.checkpoints)
    site.finish()


def damaged_plan(site: Site) -> None:
    """plan.json is damaged while ranks train, and one is killed: those that take over read it."""
    site.start()
    ranks = site.fresh_ranks()
    site.await_step()
    path = site.run / "plan.json"
    if site.draw.random() < 0.5:
        os.truncate(path, site.draw.randrange(path.stat().st_size))
    else:
        flip(path, site.draw.randrange(path.stat().st_size), 7)
    site.kill(site.draw.choice(ranks))
    site.judge({0, 2}, rf"plan\.json.*\n  -> |{AGAIN}")
    site.settle()
    site.finish()


def torn_metrics(site: Site) -> None:
    """All is killed, and the last row of metrics.jsonl, of a step that was not saved yet, is cut off."""
    site.start()
    site.await_step()
    site.promise()
    site.kill_session()
    site.judge({-signal.SIGKILL})
    site.settle()
    path = site.run / "metrics.jsonl"
    last = path.read_bytes().splitlines(keepends=True)[-1]
    if json.loads(last)["step"] > site.promised:
        os.truncate(path, path.stat().st_size - site.draw.randint(1, len(last) - 1))
    site.finish(codes={0})


def damaged_run_file(site: Site) -> None:
    """The copy of the run file in the run's folder is damaged."""
    stopped(site)
    path = site.run / "run.toml"
    os.truncate(path, site.draw.randrange(path.stat().st_size))
    site.finish(codes={0})


def _refused(site: Site, words: str, *options: str, heal: Callable[[], object] = lambda: None) -> None:
    """The command is refused, with these words; without the fault, the same run goes on."""
    site.start(*options)
    site.judge(MISTAKE, words)
    site.settle()
    heal()
    site.finish()


def another_model(site: Site) -> None:
    """The checkpoints in the run's folder are of another model."""
    stopped(site)
    site.promise()
    _refused(site, "the checkpoint is of another model", "--model.sizes=[8, 16, 8, 4]")


def another_precision(site: Site) -> None:
    """The checkpoints in the run's folder are in another precision."""
    stopped(site)
    site.promise()
    _refused(site, "the checkpoint is in another precision", "--train.dtype", "float32")


def newer_version(site: Site) -> None:
    """The latest checkpoint is of a later version of Meshwright."""
    latest = _latest(site) / "manifest.json"
    before = latest.read_bytes()
    raw = json.loads(before) | {"version": 99}
    raw.pop("checksum")
    raw["checksum"] = hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()
    latest.write_text(json.dumps(raw))
    _refused(site, "version is 99, this Meshwright reads up to version 2", heal=lambda: latest.write_bytes(before))


def wrong_permissions(site: Site) -> None:
    """The command may not write into the folder of checkpoints, or not read a file of the latest checkpoint."""
    stopped(site)
    site.promise()
    latest = site.checkpoints / manifest.steps_in(site.checkpoints)[0]
    path = site.draw.choice([site.checkpoints, latest / "manifest.json", *_filled(latest)])
    mode = path.stat().st_mode
    site.notes["path"] = path.name
    path.chmod(0o555 if path.is_dir() else 0o000)
    site.start(plain=True)
    site.judge(MISTAKE, r"[Pp]ermission denied")
    if path.exists():
        path.chmod(mode)
    site.settle()
    site.finish(plain=True)


def permissions_lost(site: Site) -> None:
    """While the run trains, it loses the permission to write into the folder of checkpoints."""
    site.start(plain=True)
    site.await_step()
    site.promise()
    site.checkpoints.chmod(0o555)
    site.judge(MISTAKE, r"[Pp]ermission denied")
    site.checkpoints.chmod(0o755)
    site.settle()
    site.finish(plain=True)


def foreign_files(site: Site) -> None:
    """Files of others lie in the checkpoints, which are pruned: they stay."""
    stopped(site, least=KEEP)
    oldest = site.checkpoints / manifest.steps_in(site.checkpoints)[-1]
    mine = oldest / "notes.txt"
    mine.write_text("mine")
    site.finish(codes={0})
    if not mine.exists():
        site.problem("lost", f"a file that no save wrote is removed: {mine.name}")


def killed_launcher_with_lock(site: Site) -> None:
    """A killed launcher leaves its locks. Their holder is gone, so that they hold nobody off."""
    site.start()
    site.await_step()
    site.promise()
    site.kill_session()
    site.judge({-signal.SIGKILL})
    site.settle()
    (site.run / ".lock").write_bytes(b'{"host": ')
    site.finish(codes={0})
