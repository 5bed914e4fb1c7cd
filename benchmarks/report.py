"""Verdicts of benchmarks, and the files that hold them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.side_by_side import machine, num_cores, ratio

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Result:
    """A target, what was measured, and the verdict: ``pass``, ``fail`` or ``reported`` (not judged)."""

    target: str
    verdict: str
    measured: str
    figures: dict[str, Any] = field(default_factory=dict)


def judged(
    target: str,
    seconds: Mapping[str, Sequence[float]],
    ours: str,
    limit: float,
    *,
    num_ranks: int,
    figures: Mapping[str, Any],
) -> Result:
    """Our seconds over the fastest peer's, which must be at most ``limit``; more ranks than cores are only reported."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    peers = [name for name in seconds if name != ours]
    fastest = min(peers, key=medians.__getitem__)
    found = ratio(seconds[ours], seconds[fastest])
    verdict = "reported" if num_ranks > num_cores() else "pass" if found.value <= limit else "fail"
    return Result(
        target=target,
        verdict=verdict,
        measured=f"{found}: {ms(medians[ours])} against {ms(medians[fastest])} ({fastest})",
        figures={
            "limit": limit,
            "ratio": found.value,
            "ratio_95_percent": [found.low, found.high],
            "against": fastest,
            "ratios": {name: ratio(seconds[ours], seconds[name]).value for name in peers},
            "median_s": medians,
            "seconds_a_step": {name: list(values) for name, values in seconds.items()},
            **figures,
        },
    )


def write(name: str, title: str, command: str, how: Mapping[str, Any], results: Sequence[Result], text: str) -> None:
    """``results/NAME.json`` and ``.md``; ``text`` says how it was measured."""
    RESULTS.mkdir(exist_ok=True)
    found = {"command": command, "machine": machine(), **how, "results": [asdict(result) for result in results]}
    (RESULTS / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    here = machine()
    lines = [f"| {result.target} | {result.verdict} | {result.measured} |" for result in results]
    detail = []
    for result in results:
        heading = result.target.split(":")[0]
        for side, seconds in result.figures.get("seconds_a_step", {}).items():
            times = " | ".join(ms(value) for value in (statistics.median(seconds), min(seconds), max(seconds)))
            detail.append(f"| {heading} | {side} | {times} |")
    page = f"""# {title}

Made by `{command}` on {here["cores"]} cores ({here["cpu"]}), torch {here["torch"]}, Python {here["python"]}.

| target | verdict | measured |
| --- | --- | --- |
{chr(10).join(lines)}

{text}

| comparison | side | median | least | most |
| --- | --- | ---: | ---: | ---: |
{chr(10).join(detail)}
"""
    (RESULTS / f"{name}.md").write_text(page, encoding="utf-8")


def ms(seconds: float) -> str:
    """Milliseconds for people."""
    return f"{seconds * 1e3:.1f} ms"
