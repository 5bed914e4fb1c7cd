"""Faults of files: damaged, missing, of another model or version, and permissions that are wrong."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from benchmarks.campaign.processes import AGAIN, killed, stopped
from benchmarks.campaign.site import KEEP, MISTAKE, Site
from meshwright.runtime import manifest

BEFORE = r"the one before it is tried"
"""The words of a command that skips a damaged checkpoint."""
TENSORS = "data-*/*.distcp"


def _latest(site: Site) -> Path:
    """Run the first part of a run, and return its latest checkpoint, which the fault will damage. The checkpoint before
    it must not be lost."""
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
    """The files that are not empty: a stage without parameters writes an empty file, which is never read."""
    return sorted(path for path in checkpoint.glob(pattern) if path.stat().st_size)


def _flipped(site: Site, pattern: str) -> None:
    path = site.draw.choice(_filled(_latest(site), pattern))
    place, bit = site.draw.randrange(path.stat().st_size), site.draw.randrange(8)
    flip(path, place, bit)
    site.notes["bit"] = f"{path.name}:{place}.{bit}"
    site.finish(codes={0}, words=BEFORE)


def bit_flip_in_tensors(site: Site) -> None:
    """A bit of a file with tensors is flipped."""
    _flipped(site, TENSORS)


def bit_flip_in_small_files(site: Site) -> None:
    """A bit of trainer.pt, of an index, or of the metadata is flipped."""
    _flipped(site, site.draw.choice(["data-*/trainer.pt", "data-*/index.json", "data-*/.metadata"]))


def bit_flip_in_manifest(site: Site) -> None:
    """A bit of a manifest is flipped."""
    _flipped(site, "manifest.json")


def torn_write(site: Site) -> None:
    """A file of the latest checkpoint is cut off."""
    path = site.draw.choice([path for path in _filled(_latest(site), "**/*") if path.is_file()])
    os.truncate(path, site.draw.randrange(path.stat().st_size))
    site.notes["file"] = path.name
    site.finish(codes={0}, words=BEFORE)


def missing_shard(site: Site) -> None:
    """A file with tensors is missing."""
    site.draw.choice(_filled(_latest(site))).unlink()
    site.finish(codes={0}, words=BEFORE)


def all_damaged(site: Site) -> None:
    """All checkpoints are damaged: the command is refused. When they are removed, the run begins again."""
    _latest(site)
    for path in site.checkpoints.glob("step-*/data-*/trainer.pt"):
        flip(path, site.draw.randrange(path.stat().st_size), site.draw.randrange(8))
    site.promised = -1
    site.start()
    site.judge(MISTAKE, r"none of its \d checkpoints is whole")
    shutil.rmtree(site.checkpoints)
    site.finish()


def damaged_plan(site: Site) -> None:
    """plan.json is damaged while ranks train, and a rank is killed: the ranks that are started again read it."""
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
    """All processes are killed, and the last row of metrics.jsonl is cut off, if its step was not saved yet."""
    killed(site)
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


def another_model(site: Site) -> None:
    """The checkpoints in the run's folder are of another model."""
    stopped(site)
    site.attempt("the checkpoint is of another model", "--model.sizes=[8, 16, 8, 4]")


def another_precision(site: Site) -> None:
    """The checkpoints in the run's folder are in another precision."""
    stopped(site)
    site.attempt("the checkpoint is in another precision", "--train.dtype", "float32")


def newer_version(site: Site) -> None:
    """The latest checkpoint is of a later version of Meshwright."""
    latest = _latest(site) / "manifest.json"
    before = latest.read_bytes()
    raw = json.loads(before) | {"version": 99}
    raw.pop("checksum")
    raw["checksum"] = hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()
    latest.write_text(json.dumps(raw))
    site.attempt("version is 99, this Meshwright reads up to version 2", heal=lambda: latest.write_bytes(before))


def wrong_permissions(site: Site) -> None:
    """The command may not write to the folder of checkpoints, or may not read a file of the latest checkpoint."""
    stopped(site)
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
    """While the run trains, it loses the permission to write to the folder of checkpoints."""
    site.start(plain=True)
    site.await_step()
    site.promise()
    site.checkpoints.chmod(0o555)
    site.judge(MISTAKE, r"[Pp]ermission denied")
    site.checkpoints.chmod(0o755)
    site.settle()
    site.finish(plain=True)


def foreign_files(site: Site) -> None:
    """A checkpoint holds a file that no save wrote. The file stays when the checkpoint is pruned."""
    stopped(site, least=KEEP)
    oldest = site.checkpoints / manifest.steps_in(site.checkpoints)[-1]
    notes = oldest / "notes.txt"
    notes.write_text("of the user")
    site.finish(codes={0})
    if not notes.exists():
        site.problem("lost", f"a file that no save wrote is removed: {notes.name}")


def killed_launcher_with_lock(site: Site) -> None:
    """A killed launcher leaves its locks, which are ignored because their holder is gone."""
    killed(site)
    (site.run / ".lock").write_bytes(b'{"host": ')
    site.finish(codes={0})
