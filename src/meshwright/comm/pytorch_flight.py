"""PyTorch's own flight recorder: the operations of gloo and NCCL that this rank has begun and not completed, also those
that a program calls itself, and those for which a device waits and not the host.

PyTorch records if ``TORCH_FR_BUFFER_SIZE`` is set when the process begins to use torch.distributed.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from meshwright.ir.flight import Seen
from meshwright.ir.hang import doing, named
from meshwright.torch_private import dump_flight_recorder

BUFFER = "TORCH_FR_BUFFER_SIZE"
"""The environment variable with the number of operations that PyTorch records."""
MOST = 8
"""The most operations that are told."""
WHO = "PyTorch's recorder: "


class Pending(NamedTuple):
    """An operation that is not complete: its group and number, what it is, and the time of day when it was begun."""

    place: str
    what: str
    begun_s: float

    def __str__(self) -> str:
        return f"{WHO}{self.place}: {self.what}"


def pending() -> tuple[Pending, ...]:
    """The operations that PyTorch has recorded as begun and not completed: the first ones, in their order."""
    data = dump_flight_recorder()
    entries: list[dict[str, Any]] = json.loads(data).get("entries", []) if data else []
    left = [entry for entry in entries if entry.get("state") != "completed" and not entry.get("retired")]
    return tuple(map(_described, left[:MOST]))


def _described(entry: Mapping[str, Any]) -> Pending:
    group, is_message = (entry.get("process_group") or ("",))[0], bool(entry.get("is_p2p"))
    number = entry.get("p2p_seq_id" if is_message else "collective_seq_id")
    sizes = " ".join("x".join(map(str, size)) or "1" for size in entry.get("input_sizes") or ())
    dtypes = " ".join(str(dtype).lower() for dtype in entry.get("input_dtypes") or ())
    what = " ".join(filter(None, (entry.get("profiling_name", "operation"), "of" if sizes else "", sizes, dtypes)))
    place = f"group {group} {'message ' if is_message else ''}#{number}"
    return Pending(place, f"{what}, {entry.get('state', 'begun')}", float(entry.get("time_created_ns", 0)) / 1e9)


def report(pending: Pending, rank: int, seen: Mapping[int, Seen], now_s: float) -> Iterator[str]:
    """The lines of a report about an operation of this rank that lasts, from what all ranks have noted. ``now_s`` is
    the time of day."""
    under_way = {
        other: {line.removeprefix(WHO).partition(":")[0]: line for line in each.flight.notes.pytorch}
        for other, each in seen.items()
        if each.flight is not None
    }
    under_way.setdefault(rank, {})[pending.place] = str(pending)
    having = [other for other, places in under_way.items() if pending.place in places]
    are = "is" if len(having) == 1 else "are"
    yield f"{named(having)} {are} in {pending.place} since {now_s - pending.begun_s:.1f} s:"
    for other, each in sorted(seen.items()):
        if pending.place in under_way.get(other, ()):
            yield f"  rank {other}: {under_way[other][pending.place].removeprefix(WHO)}"
        else:
            yield f"  rank {other} has not begun it, or is not in its group: {doing(each)}"
            stack = each.flight.notes.stack if each.flight is not None else ()
            if stack:
                yield f"  rank {other} is at" + "".join(f"\n      {line}" for line in stack)
