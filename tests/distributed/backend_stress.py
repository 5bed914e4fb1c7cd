"""Random collectives of several groups from several threads of each rank, each checked against its closed form."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch
import torch.distributed as dist

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
SIZES = (1, 3, 17, 1000, 70_000)
"""Elements of each rank's part."""
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16)


def members(number: int, size: int) -> list[int]:
    """The ranks of group ``number``: all, or all but one."""
    return [rank for rank in range(size) if number < 2 or size < 3 or rank != (number - 2) % size]


def stress(total: int, num_groups: int, seed: int) -> int:
    """Start ``total`` collectives, divided over groups. Each group has a thread; threads take turns as the system lets
    them, so that ranks start collectives of different groups in different orders. How many were right."""
    size = dist.get_world_size()
    groups = [dist.new_group(members(number, size), backend="meshwright") for number in range(num_groups)]
    right = [0] * num_groups
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            right[number] = _run_group(groups[number], members(number, size), total // num_groups, seed + number)
        except BaseException as error:  # noqa: BLE001 - the rank's own thread raises it
            errors.append(error)

    group_numbers = [number for number in range(num_groups) if dist.get_rank() in members(number, size)]
    threads = [threading.Thread(target=run, args=(number,)) for number in group_numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    for number in group_numbers:
        dist.destroy_process_group(groups[number])
    return sum(right)


def _run_group(group: Any, ranks: list[int], total: int, seed: int) -> int:
    draw, me, size, right = random.Random(seed), ranks.index(dist.get_rank()), len(ranks), 0
    waiting: list[Any] = []
    for index in range(total):
        operation, count, dtype = draw.choice(OPERATIONS), draw.choice(SIZES), draw.choice(DTYPES)
        root, later = draw.randrange(size), draw.random() < 0.5
        waiting.append(_start(operation, group, ranks, me, root, count, dtype, index % 5))
        if not later or len(waiting) > 4:
            draw.shuffle(waiting)
            right += sum(_is_right(*call) for call in waiting)
            waiting = []
    return right + sum(_is_right(*call) for call in waiting)


def _start(
    operation: str, group: Any, ranks: list[int], me: int, root: int, count: int, dtype: torch.dtype, base: int
) -> tuple[Any, list[torch.Tensor], list[float]]:
    """Start a collective; returns its work, the tensors that it writes, and the value that each must have."""
    size, top = len(ranks), ranks[root]
    sums = float(sum(base + rank for rank in range(size)))

    def full(value: float, num: int = count) -> torch.Tensor:
        return torch.full((num,), value, dtype=dtype)

    if operation == "all_reduce":
        tensor = full(base + me)
        return dist.all_reduce(tensor, group=group, async_op=True), [tensor], [sums]
    if operation == "all_gather":
        outputs = [full(-1) for _ in ranks]
        return dist.all_gather(outputs, full(base + me), group, async_op=True), outputs, [base + r for r in range(size)]
    if operation == "reduce_scatter":
        output = full(-1)
        inputs = [full(base + me + 2 * rank) for rank in range(size)]
        return dist.reduce_scatter(output, inputs, group=group, async_op=True), [output], [sums + 2 * me * size]
    if operation == "all_to_all":
        output, counts = full(-1, count * size), [count] * size
        value = torch.cat([full(base + 3 * me + rank) for rank in range(size)])
        work = dist.all_to_all_single(output, value, counts, counts, group=group, async_op=True)
        return work, list(output.split(counts)), [base + 3 * rank + me for rank in range(size)]
    if operation == "broadcast":
        tensor = full(base + me)
        return dist.broadcast(tensor, top, group, async_op=True), [tensor], [base + root]
    if operation == "reduce":
        tensor = full(base + me)
        wanted = sums if me == root else base + me
        return dist.reduce(tensor, top, group=group, async_op=True), [tensor], [wanted]
    if operation == "gather":
        outputs = [full(-1) for _ in ranks] if me == root else []
        work = dist.gather(full(base + me), outputs or None, top, group, async_op=True)
        return work, outputs, [base + rank for rank in range(size)]
    output = full(-1)
    inputs = [full(base + rank) for rank in range(size)] if me == root else []
    return dist.scatter(output, inputs or None, top, group, async_op=True), [output], [base + me]


def _is_right(work: Any, outputs: list[torch.Tensor], wanted: list[float]) -> bool:
    work.wait()
    return all(bool((output == value).all()) for output, value in zip(outputs, wanted, strict=False))
