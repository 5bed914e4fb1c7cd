"""Find the single change of a setup that makes it fit in memory and costs the least time."""

from collections.abc import Iterator

import msgspec

from meshwright.cost.memory import estimate_memory, verdict
from meshwright.cost.setup import Setup
from meshwright.cost.step import estimate_step
from meshwright.errors import LayoutError
from meshwright.ir.cluster import Cluster


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A single change in the user's notation (``recompute = "full"``), with the resulting step time and peak memory.
    ``setup`` is the changed setup of a model that is planned by its sizes. ``sample_device_s`` is the price of a sample
    of a captured model: the seconds of a step times the devices, divided by the batch."""

    text: str
    step_s: float
    peak_bytes: float
    setup: Setup | None = None
    sample_device_s: float = 0.0


def smallest_change(setup: Setup, cluster: Cluster, memory_bytes: float | None = None) -> Change | None:
    """The single change that makes the setup fit its devices (or ``memory_bytes``) and costs the least time.

    None if the setup fits already, or if no single change is enough. If no changed setup has the verdict ``fits``, a
    change with the verdict ``marginal`` is taken: the setup may then fit.
    """
    if verdict(estimate_memory(setup, cluster), cluster, memory_bytes) == "fits":
        return None
    candidates = []
    for text, changed in single_changes(setup):
        memory = estimate_memory(changed, cluster)
        fit = verdict(memory, cluster, memory_bytes)
        if fit != "does not fit":
            step_s = estimate_step(changed, cluster).step_s
            candidates.append(
                (fit != "fits", step_s, Change(text=text, setup=changed, step_s=step_s, peak_bytes=memory.peak_bytes))
            )
    return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def single_changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield all single changes that save memory and keep the number of devices."""
    wanted: list[dict[str, object]] = []
    if setup.tp > 1 and not setup.sequence_parallel:
        wanted.append({"sequence_parallel": True})
    if not setup.flash:
        wanted.append({"flash": True})
    if setup.recompute == "none" and (setup.zero == 3 or not setup.flash):
        wanted.append({"recompute": "selective"})
    if setup.recompute != "full":
        wanted.append({"recompute": "full"})
    if setup.dp * setup.cp > 1:
        # ZeRO 2 and 3 shard gradients, which a pipeline keeps for many micro-batches.
        wanted += [{"zero": level} for level in range(setup.zero + 1, 4) if level == 1 or setup.pp == 1]
    size = setup.micro_batch // 2
    while size:
        wanted.append({"micro_batch": size})
        size //= 2
    if setup.schedule == "gpipe" and setup.pp > 1:
        wanted.append({"schedule": "1f1b"})
    for factor in (2, 4, 8):
        for axis in ("tp", "pp", "cp"):
            if setup.dp % factor == 0:
                wanted.append({axis: getattr(setup, axis) * factor, "dp": setup.dp // factor})
    for changes in wanted:
        dp = changes.get("dp")
        shown = changes | ({"dp": dp // setup.depth} if isinstance(dp, int) else {})
        text = ", ".join(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in shown.items())
        try:
            yield text, msgspec.structs.replace(setup, **changes)
        except LayoutError:
            continue  # not possible: the changed sizes do not divide
