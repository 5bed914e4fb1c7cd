"""Faults of the model and of the data."""

from __future__ import annotations

import numpy as np

from benchmarks.campaign.processes import stopped
from benchmarks.campaign.site import SUBJECT, Site


def exception_in_the_model(site: Site) -> None:
    """The model raises an error: its ranks are not started again. Without the mistake, the run goes on."""
    kind = site.draw.choice(["exception", "shape", "import"])
    file = site.write("wrong.toml", model=SUBJECT | {"arguments": {"fails": kind}})
    site.attempt("the step cannot be traced: .*(mistake|no_such_module|same reduction dim)", file=file)


def nan_in_the_loss(site: Site) -> None:
    """A sample is NaN or infinite. The run ends at the step that reads it; with the right sample, it begins again."""
    _attempt_with_nan(site, r"the loss became (nan|inf) at step \d+")


def data_changed(site: Site) -> None:
    """A sample changes before a run goes on: the saved position then belongs to other data."""
    stopped(site)
    _attempt_with_nan(site, r"the saved position is of other data")


def _attempt_with_nan(site: Site, words: str) -> None:
    """Make a sample NaN or infinite. The command must be refused with these words, until the sample is right again."""
    path = site.folder / "data.npz"
    right = path.read_bytes()
    with np.load(path) as saved:
        arrays = {name: saved[name].copy() for name in saved.files}
    arrays["inputs"][site.draw.randrange(len(arrays["inputs"]))] = site.draw.choice([np.nan, np.inf])
    np.savez(path, **arrays)
    site.attempt(words, heal=lambda: path.write_bytes(right))


def sample_vanishes(site: Site) -> None:
    """A file with a sample vanishes, while the run trains or before it goes on."""
    if site.draw.random() < 0.5:
        stopped(site)
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
    path = site.draw.choice(sorted((site.folder / "images").rglob("*.png")))
    right = path.read_bytes()
    path.write_bytes(bytes(len(right)))
    site.finish_or_refused(path.name)
    path.write_bytes(right)
    site.finish()
