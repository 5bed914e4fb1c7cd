"""Faults of the model and of the data."""

from __future__ import annotations

import numpy as np

from benchmarks.campaign.damage import MISTAKE
from benchmarks.campaign.processes import stopped
from benchmarks.campaign.site import SUBJECT, Site


def exception_in_the_model(site: Site) -> None:
    """The model raises an error. It is not started again and again; without the mistake, the run goes on."""
    kind = site.draw.choice(["exception", "shape", "import"])
    file = site.write("wrong.toml", model=SUBJECT | {"arguments": {"fails": kind}})
    site.start(file=file)
    site.judge(MISTAKE, "mistake|no_such_module|shape|mat1")
    site.settle()
    site.finish()


def nan_in_the_loss(site: Site) -> None:
    """A sample is NaN. The run ends at the step that sees it; with the right sample, it begins again."""
    right = _with_nan(site)
    site.start()
    site.judge(MISTAKE, r"the loss became (nan|inf) at step \d+")
    site.settle()
    (site.folder / "data.npz").write_bytes(right)
    site.finish()


def data_changed(site: Site) -> None:
    """A sample becomes another one before a run goes on: the position in the data belongs to other data."""
    stopped(site)
    site.promise()
    right = _with_nan(site)
    site.start()
    site.judge(MISTAKE, r"the saved position is of other data")
    site.settle()
    (site.folder / "data.npz").write_bytes(right)
    site.finish()


def _with_nan(site: Site) -> bytes:
    """Make a sample NaN or infinite. Return the file as it was."""
    path = site.folder / "data.npz"
    right = path.read_bytes()
    with np.load(path) as found:
        arrays = {name: found[name].copy() for name in found.files}
    arrays["inputs"][site.draw.randrange(len(arrays["inputs"]))] = site.draw.choice([np.nan, np.inf])
    np.savez(path, **arrays)
    return right


def sample_vanishes(site: Site) -> None:
    """A file with a sample vanishes, while the run trains or before it goes on."""
    if site.draw.random() < 0.5:
        stopped(site)
        site.promise()
    else:
        site.start()
        site.await_step(saved=False)
        site.promise()
    path = site.draw.choice(sorted((site.folder / "images").rglob("*.png")))
    aside = site.folder / "aside.png"
    path.rename(aside)
    site.finish_or_refused(rf"{path.name}|number of (samples|images|files)|\d+ (samples|images)")
    aside.rename(path)
    site.finish()


def sample_damaged(site: Site) -> None:
    """A file with a sample is overwritten with zeros before the run goes on."""
    stopped(site)
    site.promise()
    path = site.draw.choice(sorted((site.folder / "images").rglob("*.png")))
    right = path.read_bytes()
    path.write_bytes(bytes(len(right)))
    site.finish_or_refused(path.name)
    path.write_bytes(right)
    site.finish()
