"""Worked numbers of sizes and times: parameters, bytes, years, and petaflops divided by a data sheet's peak."""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.catalog import load_cluster
from meshwright.catalog.models import load_model, load_network
from meshwright.cost.collective import Group, Network
from meshwright.cost.memory import stage_memory
from meshwright.cost.setup import Setup
from meshwright.ir.cluster_names import load_device
from meshwright.ir.transformer import Transformer
from meshwright.worked.line import Line, compared, held

YEAR_S = 365.25 * 86400


def parameter_server() -> Iterator[Line]:
    """ResNet-50 on 256 workers with one parameter server."""
    net = load_network("resnet50")
    size, rate, workers, nic = 4 * net.parameters, 3, 256, 400e9 / 8
    printed, ours = 97.5e6, workers * rate * 97.5e6
    network = Network(load_cluster("v100-box1-eth400", workers))
    ring_s = network.collective_s("all_reduce", size, Group(workers))
    yield compared(
        "ResNet-50: 97.5 MB of 24.4 M parameters", 24.4, net.parameters / 1e6, "{:.2f} M",
        f"{net.parameters:,} parameters of 4 bytes are {size / 2**20:.1f} MiB, {size / 1e6:.1f} MB; the lecture "
        "divides MiB by 4 as if they were MB",
    )  # fmt: skip
    yield compared(
        "256 workers at 3 iterations/s: 73.1 GB/s into the server", 73.1, ours / 1e9, "{:.1f} GB/s",
        "256 x 3 x 97.5 MB; the lecture divides by 1,024, so its 73.1 are GiB/s if its 97.5 are MiB (in full "
        f"{workers * rate * size / 1e9:.1f} GB/s)",
    )  # fmt: skip
    yield held(
        "more than a NIC of 400 Gb/s takes",
        f"{nic / 1e9:.0f} GB/s: full at {int(nic / (rate * printed))} workers",
        ours > nic,
        f"with the model's {size / 1e6:.1f} MB at {int(nic / (rate * size))} workers",
    )
    yield held(
        "a ring does not have that bottleneck",
        f"{2 * (workers - 1) / workers * size * rate / 1e9:.2f} GB/s a NIC",
        1 / ring_s > rate,
        f"each NIC sends 2 (N-1)/N vectors an iteration, whatever N; an all-reduce over 256 such NICs takes "
        f"{ring_s * 1e3:.0f} ms, the server's star {2 * workers * size / nic * 1e3:.0f} ms",
    )


def years_412() -> Iterator[Line]:
    """Years to train GPT-4 on one A100."""
    tokens, peak = 13e12, load_device("a100-80gb").peak("bfloat16")
    token_s = 412 * YEAR_S / tokens
    other_years = 30 * tokens / YEAR_S
    yield compared(
        "13 T tokens in 412 years: 1 ms a token", 1, token_s * 1e3, "{:.3f} ms",
        f"at the peak of an A100, {token_s * peak / 1e9:.0f} GFLOP for each token, or {token_s * peak / 6e9:.0f} B "
        "parameters at 6 FLOP each",
    )  # fmt: skip
    yield held(
        "30 s a token, in the same lecture",
        f"{other_years / 1e6:.1f} M years",
        abs(other_years / 412 - 1) < 0.05,
        "30 s x 13 T tokens: the two claims contradict each other",
    )


def years_172() -> Iterator[Line]:
    """The claim that training a model takes 172 years on one A100."""
    model, peak = load_model("gpt3-175b"), load_device("a100-80gb").peak("bfloat16")
    flops = model.step_flops(1) * 300e9 / model.sequence
    years = flops / peak / YEAR_S
    simple = 6 * 175e9 * 300e9 / peak / YEAR_S
    yield held(
        "172 years for a model that is not named",
        f"GPT-3 at {simple / 172:.1%} of peak",
        0.1 < simple / 172 < 0.5,
        f"300 B tokens take {simple:.0f} years at the peak, with 6 FLOP for each parameter and token ({years:.0f} with "
        "attention and head), and 172 years at this usual part of the peak",
    )


FOOTPRINTS = (
    ("bert-large", 0.32, 5.12, 1),
    ("gpt2-xl", 1.5, 24, 4.7),
    ("turing-nlg-17b", 17.2, 275, 54),
    ("gpt3-175b", 175, 2800, 547),
)
"""Catalog name, then 1e9 parameters, GB and relative computation as printed. For GPT-2 the lecture prints 1.9 B
parameters, but the bytes of 1.5 B parameters."""

DEVICES = ("v100-16gb", "v100", "a100-40gb", "a100-80gb")


def footprint() -> Iterator[Line]:
    """Memory of four language models, and their computation relative to the first."""
    for name, parameters, size, relative in FOOTPRINTS:
        model = load_model(name)
        states = _states_bytes(model)
        fits = [device for device in DEVICES if states < load_device(device).memory_bytes]
        yield compared(
            f"{name}: {parameters:g} B parameters, {size:g} GB", size, 16 * parameters, "{:.4g} GB",
            f"16 bytes a parameter (weights and gradients in 16 bit, Adam in 32); by its layers "
            f"{model.parameters / 1e9:.3g} B and {states / 1e9:.4g} GB; "
            f"without activations it fits on {', '.join(fits) or 'none of ' + ', '.join(DEVICES)}",
        )  # fmt: skip
        why = "ratio of the parameters, for the same number of tokens"
        ratio = parameters / FOOTPRINTS[0][1]
        yield compared(f"{name}: relative computation {relative:g}", relative, ratio, "{:.1f}", why)
    why = "the 24 GB that the lecture prints belong to 1.5 B"
    yield compared("GPT-2 has 1.9 B parameters", 1.9, load_model("gpt2-xl").parameters / 1e9, "{:.2f} B", why)


def _states_bytes(model: Transformer) -> float:
    """The bytes of the whole model's weights, 16-bit gradients (``zero=1``) and optimizer state on one device."""
    memory = stage_memory(Setup(model=model, zero=1), 0, load_cluster("a100-80gb-box1"))
    return memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes


def gpt4_layer() -> Iterator[Line]:
    """Whether one GPU holds one layer of GPT-4."""
    layer = 1.8e12 / 120 * 4 / 1e9
    yield compared("1.8 T parameters in 120 layers: 60 GB a layer", 60, layer, "{:.0f} GB", "4 bytes a parameter")
    yield held(
        "which GPUs of 80 and of 140 GB hold",
        f"{layer:.0f} GB",
        layer < 80,
        f"weights only; with gradients and Adam's two moments {4 * layer:.0f} GB, more than either GPU has: training "
        "must divide a layer",
    )


RUNS = (
    ("FORGE", 112.6, 2048, "mi250x", 29.0),
    ("Dash et al.", 188.0, 3072, "mi250x", 31.9),
    ("Narayanan et al.", 502.0, 3072, "a100-80gb", 52.0),
    ("MT-NLG", 379.7, 3360, "a100-80gb", 36.0),
    ("AxoNN, 40 B", 620.1, 4096, "a100-40gb", 49.0),
    ("AxoNN, 160 B", 815.7, 16384, "mi250x", 26.0),
)
"""Large training runs: name, petaflops, chips, device, percent of peak as printed. The petaflops of FORGE are an
estimate of the table that prints them (Singh et al., SC 2024, arXiv:2502.08145, table 1)."""


def percent_of_peak() -> Iterator[Line]:
    """Petaflops of large runs, divided by the number of chips times their peak."""
    for name, petaflops, chips, device, percent in RUNS:
        peak = load_device(device).peak("bfloat16")
        yield compared(
            f"{name}: {petaflops:g} PF on {chips:,} {device}: {percent:g} %",
            percent,
            100 * petaflops * 1e15 / (chips * peak),
            "{:.1f} %",
            f"{chips:,} x {peak / 1e12:g} TFLOP/s are {chips * peak / 1e15:,.1f} PF",
            exact=0.5 / percent,
        )


class _Run(NamedTuple):
    """A published training run: petaflops, chips, device, percent of peak as printed; the number of chips that the
    run's own publication states, and its percentage (0: computed from the petaflops)."""

    name: str
    petaflops: float
    chips: int
    device: str
    percent: float
    own_chips: int
    own_percent: float
    source: str


MORE_RUNS = (
    _Run(
        "MegaScale", 2166.3, 12288, "a100-80gb", 55.0, 12288, 55.2,
        'Jiang et al., "MegaScale", NSDI 2024: 55.2 % with 12,288 A100',
    ),
    _Run(
        "Google", 4480.0, 55094, "tpu-v5e", 44.67, 50944, 0.0,
        "Google's announcement of November 2023: 50,944 chips",
    ),
)  # fmt: skip
"""Runs whose printed percentage, petaflops and chips do not belong together."""


def more_of_peak() -> Iterator[Line]:
    """Two further runs, whose printed percentages are not those of their petaflops and chips."""
    for run in MORE_RUNS:
        peak = load_device(run.device).peak("bfloat16")
        ours = 100 * run.petaflops * 1e15 / (run.chips * peak)
        fits = run.petaflops * 1e15 / (run.percent / 100 * peak)
        own = run.own_percent or 100 * run.petaflops * 1e15 / (run.own_chips * peak)
        yield held(
            f"{run.name}: {run.percent:g} %, as the run itself counts",
            f"{own:.1f} % of {run.own_chips:,} chips",
            abs(run.percent - own) < 0.5,
            run.source,
        )
        yield held(
            f"{run.name}: {run.petaflops:,g} PF on {run.chips:,} {run.device} are {run.percent:g} %",
            f"{ours:.1f} %",
            abs(run.percent - ours) < 0.5,
            f"{run.chips:,} x {peak / 1e12:g} TFLOP/s are {run.chips * peak / 1e15:,.0f} PF; {run.percent:g} % would "
            f"be {run.percent / 100 * run.chips * peak / 1e15:,.0f} PF, or {fits:,.0f} chips",
        )


USUAL = (min(run[4] for run in RUNS), max(run[4] for run in RUNS))
"""The smallest and the largest percentage of ``RUNS``."""


def cards_for_a_petaflop() -> Iterator[Line]:
    """The claim that 16 cards make about 1 PFLOP/s."""
    cards, petaflop = 16, 1e15
    for name in ("v100", "a100-80gb"):
        peak = cards * load_device(name).peak("float16")
        share = 100 * petaflop / peak
        yield held(
            f"16 {name}: about 1 PFLOP/s",
            f"{share:.1f} % of their {peak / 1e12:,.0f} TFLOP/s",
            USUAL[0] <= share <= USUAL[1],
            f"{petaflop / cards / 1e12:g} TFLOP/s a card; large runs reach {USUAL[0]:g} to {USUAL[1]:g} % of the "
            f"peak; 16 such cards then make {peak * USUAL[0] / 1e17:.2g} to {peak * USUAL[1] / 1e17:.2g} PFLOP/s",
        )
