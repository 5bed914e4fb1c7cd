"""Claims that take a measurement or minutes to judge: their lines are read from result files of benchmarks."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import FileFormatError
from meshwright.ir import files
from meshwright.ir.result import Comparison, Finding, Result, Utilization
from meshwright.worked.line import Line, held


class KeptResult(NamedTuple):
    """A result file, the command that writes it, the function that finds the lines of an example in it, and the claims
    of these lines, for the case that there is no file."""

    file: str
    command: str
    lines: Callable[[Result], Iterator[Line]]
    claims: tuple[str, ...]


def read(kept: KeptResult, folder: Path) -> Iterator[Line]:
    """The lines of an example from ``FILE.json`` in a folder of result files. If the file is not there, the verdict on
    every claim is ``not measured``.

    Raises:
        FileFormatError: the file is no result file, or its findings are not those that the example needs.
    """
    path = folder / f"{kept.file}.json"
    if not path.exists():
        why = f"`{kept.command}` in a checkout writes the file; --results names the folder of result files"
        for claim in kept.claims:
            yield Line(claim=claim, ours=f"there is no {path.name}", verdict="not measured", why=why)
        return
    yield from kept.lines(files.load(path, Result))


DEEPBENCH = "up to 4.54 x as fast (single convolutions of DeepBench, on GPUs)"


def mu_cudnn(result: Result) -> Iterator[Line]:
    """The gain of convolutions in pieces on this project's machine, beside the published gain."""
    limited_findings = [each for each in result.findings if "an eighth of the workspace" in each.target]
    gains = {each.target.split(",")[0]: 1 / each.ratio for each in limited_findings if isinstance(each, Comparison)}
    costs = []
    for name in gains:
        limited, free = (_finding(result, f"{name}, {words}") for words in ("an eighth", "no limit"))
        assert isinstance(limited, Comparison)
        assert isinstance(free, Comparison)
        more = limited.series[limited.baseline].value_s / free.series[free.baseline].value_s - 1
        costs.append(f"{name} {more:.0%}")
    yield Line(
        claim=DEEPBENCH,
        ours=", ".join(f"{name} {gain:.2f} x" for name, gain in gains.items()),
        verdict="we differ",
        why="whole training steps in an eighth of the workspace, beside PyTorch's convolutions of one sample at a "
        f"time. On a core of a CPU, these are only a little slower than those of all samples ({', '.join(costs)}), so "
        f"that pieces have little to gain; {_provenance(result)}",
    )


JELLYBEAN = ("compute 6.242, communication 1.267 $/h, accuracy 56.59", "30-60 % saved at like accuracy")


def jellybean(result: Result) -> Iterator[Line]:
    """Plans of the published workflow (Wu et al., "JellyBean", PVLDB 16(3), 2022), beside the plan of its artifact."""
    best = _finding(result, "published workflow: at most")
    cost, accuracy, published = (float(number) for number in _numbers(best.measured, 0, 1, -1))
    compute, communication = 6.242, 1.267
    yield held(
        JELLYBEAN[0],
        f"{cost:.3f} $/h at accuracy {accuracy:g}",
        abs(compute + communication - published) < 5e-3 and cost <= published and accuracy >= 56.59,
        f"the artifact's sum is {published:.3f} $/h; ours is {1 - cost / published:.1%} cheaper, and proven to be the "
        f"cheapest; {_provenance(result)}",
    )
    saved = {}
    for words in ("on a single tier", "with uniform models"):
        other = _finding(result, f"published workflow: at least 30% below the best plan {words}")
        saved[words] = _numbers(other.measured, 0)[0] / 100
    yield held(
        JELLYBEAN[1],
        ", ".join(f"{share:.1%} below the best plan {words}" for words, share in saved.items()),
        all(share >= 0.3 for share in saved.values()),
        f"planned, for the published workflow; {_provenance(result)}",
    )


SPARSE = "sparse and 4 bits beat dense at 1 Gbit/s (measured)"


def sparse(result: Result) -> Iterator[Line]:
    """A measured sparse all-reduce, and a measured step with it, beside dense ones on emulated links."""
    exchange = _finding(result, "2 boxes x 2 ranks, emulated 1 Gbit/s, 64 MiB, 1 %: a sparse all-reduce of streams")
    times = _numbers(exchange.measured, 0)[0]
    steps = _finding(result, "MLP, 2 boxes x 2 ranks, emulated 1 Gbit/s: the fastest codec")
    step = _ratio(steps, "DDP", "topk(1%)+qsgd(4)")
    slower = _finding(result, "MLP, 2 boxes x 2 ranks, emulated 0.1 Gbit/s: the fastest codec")
    yield held(
        SPARSE,
        f"communication {times:.2f} x, a whole step {step:.2f} x as fast",
        times > 1 and step > 1,
        "2 boxes of 2 ranks: 64 MiB of which 1 % is chosen; a step of an MLP with topk(1%)+qsgd(4), beside "
        f"DistributedDataParallel; at 0.1 Gbit/s the step is {_ratio(slower, 'DDP', 'topk(1%)+qsgd(4)'):.1f} x as "
        f"fast; {_provenance(result)}",
    )


ALEXNET = {
    f"the same, chosen for the captured model by the planner ({words})": where
    for where, words in (("v100-dgx1", "one box"), ("v100-box1-eth10x1", "8 boxes on 10 Gbit/s"))
}
"""Maps the claims to the clusters of the plans."""


def alexnet(result: Result) -> Iterator[Line]:
    """The plan of the captured AlexNet on 8 devices, with nothing pinned."""
    for claim, where in ALEXNET.items():
        plan = _finding(result, f"plan of AlexNet, batch 1024, on {where}:")
        yield held(
            claim,
            plan.measured,
            plan.verdict == "pass",
            "time of a step, over that of the better of all data parallel and all tensor parallel; batch of 1,024; "
            f"{_provenance(result)}",
        )


UTILIZATION = {
    "matrix product": "large matrix products reach 80 % of a chip",
    "naive step": "typical code reaches 10-15 % of a chip",
    "step of small operators": "the same, as a step of small operators",
    "rows one at a time": "the same, as a product whose rows are multiplied one at a time",
}
PRODUCT_BAND, NAIVE_BAND = (0.7, 1.0), (0.05, 0.2)
"""The parts of the peak that still count as the lecture's 80 % of a large product, and 10-15 % of typical code."""
NAIVE_WHY = {
    "naive step": "PyTorch calls a tuned library for its products, in which such a step spends most of its time",
    "step of small operators": "the time of small operators is their start, and reading and writing their operands",
    "rows one at a time": "each row reads the whole matrix, so the rate is that of the memory",
}


def utilization(result: Result) -> Iterator[Line]:
    """The parts of this machine's peak that products and training steps reach, in tuned and in naive code."""
    for name, claim in UTILIZATION.items():
        finding = next((each for each in result.findings if each.target.startswith(f"{name}: ")), None)
        if not isinstance(finding, Utilization):
            why = f"it was written before this row was measured; `{result.command}` writes it again"
            yield Line(claim=claim, ours=f"{result.name}.json has no such row", verdict="not measured", why=why)
            continue
        low, high = PRODUCT_BAND if name == "matrix product" else NAIVE_BAND
        reached, measured = finding.fraction * finding.peak.flops_per_s, _measured_peak(finding)
        share = (
            f"{reached / measured:.0%} of the {measured / 1e9:,.0f} GFLOP/s of the fastest product that was measured"
        )
        why = f"; {NAIVE_WHY[name]}" if name in NAIVE_WHY else ""
        if name == "matrix product" and measured < finding.peak.flops_per_s:
            why = (
                "; a nominal peak counts all cores as whole ones, and those of a virtual machine may be threads of one"
            )
        yield Line(
            claim=claim,
            ours=f"{finding.fraction:.1%} of the peak, {share}",
            verdict="agrees" if low <= finding.fraction <= high else "we differ",
            why=f"of {finding.peak.flops_per_s / 1e9:,.0f} GFLOP/s ({finding.peak.found}){why}; {_provenance(result)}",
        )


def _measured_peak(finding: Utilization) -> float:
    """The FLOP/s of the fastest product that was measured; the peak itself, if that was measured."""
    others: dict[str, float] = finding.notes.get("other_peaks", {})
    return next((float(each) for name, each in others.items() if name.startswith("measured")), finding.peak.flops_per_s)


FILES = {
    "alexnet": KeptResult("convolution", "make bench-convolution", alexnet, tuple(ALEXNET)),
    "mu-cudnn": KeptResult("convolution_algorithms", "make bench-convolution-algorithms", mu_cudnn, (DEEPBENCH,)),
    "sparcml": KeptResult("codecs", "make bench-codecs", sparse, (SPARSE,)),
    "jellybean": KeptResult("serving", "make bench-serving", jellybean, JELLYBEAN),
    "utilization": KeptResult("utilization", "make bench-utilization", utilization, tuple(UTILIZATION.values())),
}
"""Maps examples to the result files with their measured lines."""


def example_of(name: str, result: Result) -> Iterator[Line]:
    """The lines that ``benchmarks.lectures`` has kept of an example with captured models."""
    for finding in result.findings:
        if finding.target.startswith(f"{name}: "):
            yield Line(
                claim=finding.target.removeprefix(f"{name}: "), ours=finding.measured,
                verdict=finding.notes["verdict"], why=finding.notes["why"],
            )  # fmt: skip


def _finding(result: Result, beginning: str) -> Finding:
    finding = next((each for each in result.findings if each.target.startswith(beginning)), None)
    if finding is None:
        raise FileFormatError(
            f"it has no finding that begins with {beginning!r}",
            where=f"result {result.name}",
            remedy=f"write it again: `{result.command}`",
        )
    return finding


def _numbers(text: str, *places: int) -> list[float]:
    """The numbers at these places among all numbers of a text."""
    numbers = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", text)]
    return [numbers[place] for place in places]


def _ratio(finding: Finding, over: str, under: str) -> float:
    """The ratio of two medians that a finding lists as ``NAME RATIO``."""
    medians = {}
    for name in (over, under):
        match = re.search(rf"(?:, |: ){re.escape(name)} (\d+\.\d+)", finding.measured)
        assert match is not None, f"{finding.target} does not list {name}"
        medians[name] = float(match[1])
    return medians[over] / medians[under]


def _provenance(result: Result) -> str:
    """The file, machine and day of a result."""
    return f"{result.name}.json, {result.machine.cores} cores, {result.date}"
