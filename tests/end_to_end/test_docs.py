"""The documentation is true: its Python runs and prints what it says, its links lead somewhere, its names exist."""

import contextlib
import io
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from docs.generate import PAGES as PAGES_OF_CODE
from docs.generate import commands
from meshwright import config
from meshwright.api import capture, plan
from meshwright.capture import builder
from meshwright.cli.overrides import keys
from meshwright.comm.groups import AxisGroup
from meshwright.comm.process_group.registration import register
from meshwright.ir import files
from meshwright.ir.layout import Layout
from meshwright.ir.placement import Shard
from meshwright.ir.plan import Bucket, Plan, Stage
from meshwright.jobs.load import make as make_graph
from meshwright.lower.planned_graph import PlannedGraph
from meshwright.lower.stage import lower_stage
from meshwright.models import GPT, GPTConfig, language_model_loss
from meshwright.ops import collectives
from tests.distributed.pool import Ranks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_ALONE = ["CONTRIBUTING.md", "docs/how-to/edit-a-plan.md"]
"""Pages whose Python is not a program of one process: a test with the pool of ranks, a plan for two ranks."""
SHARING = [
    "docs/quickstart.md", "docs/how-to/fine-tune-a-hugging-face-model.md", "docs/how-to/train-a-model-of-your-own.md",
    "docs/how-to/resume-a-run.md",
]  # fmt: skip
"""Pages whose ranks write checkpoints together."""
UNSOURCED = ["CHANGELOG.md", "measured.md"]
"""Pages whose claims of speed are a history of changes, or rows that the page itself takes from result files."""
COURSE = [f"docs/course/{page.name}" for page in sorted((ROOT / "docs/course").glob("[0-9]*.md"))]
ON_TWO_RANKS = [
    "README.md", "docs/how-to/add-an-operator-rule.md", "docs/how-to/edit-a-plan.md", *SHARING,
    *(page for page in COURSE if "torchrun" in (ROOT / page).read_text()),
]  # fmt: skip

register()  # as the entry point does once the package is installed

TOKENS = torch.zeros(2, 16, dtype=torch.int64)

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]*)(#[^)\s]*)?\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. What a Python block prints stands right below it as a ``text`` block, and what it
    prints on two ranks in the next block that is a ``console``, after the command."""

    language: str
    text: str
    line: int
    output: str | None = None
    output_of_two: str | None = None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    fences = list(_FENCE.finditer(text))
    result = []
    for match, following in zip_longest(fences, fences[1:]):
        line = text[: match.start()].count("\n") + 2
        output = output_of_two = None
        if match[1] == "python" and following is not None:
            near = not text[match.end() : following.start()].strip()
            output = following[2].strip("\n") if following[1] == "text" and near else None
            output_of_two = following[2].partition("\n")[2].strip("\n") if following[1] == "console" else None
        result.append(Block(match[1], match[2], line, output, output_of_two))
    return result


def run_python(page: str, directory: Path) -> None:
    """Run the Python blocks of a page, one after the other in one namespace; they must print what the page says."""
    python_blocks = [block for block in blocks(ROOT / page) if block.language == "python"]
    names: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # programs begin with unlike seeds on ranks
    with contextlib.chdir(directory):
        for block in python_blocks:
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream):
                # As many lines down as on the page, so that a traceback names the page's line.
                exec(compile("\n" * (block.line - 1) + block.text, ROOT / page, "exec"), names)
            printed = stream.getvalue().rstrip()
            if block.output is not None:
                assert printed == block.output, f"{page}:{block.line}"
            if block.output_of_two is not None and dist.is_initialized() and dist.get_rank() == 0:
                assert printed == block.output_of_two, f"{page}:{block.line}"


def pages_with(language: str) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in PAGES if any(block.language == language for block in blocks(page))]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone() -> Iterator[object]:
    """Pages that run in one process. Pages that run on two ranks, too, must print the same there, and more; the first
    pages that a user reads run both ways."""
    for page in pages_with("python"):
        if page not in NOT_ALONE:
            repeated = page in ON_TWO_RANKS and page not in ("README.md", "docs/quickstart.md")
            yield pytest.param(page, marks=pytest.mark.product if repeated else ())


@pytest.mark.parametrize("page", list(alone()))
def test_python_on_a_page_runs_and_prints_what_the_page_says(page: str, tmp_path: Path) -> None:
    before = dict(os.environ)
    try:
        run_python(page, tmp_path)
    finally:  # Lightning leaves the variables of a launcher behind
        os.environ.clear()
        os.environ.update(before)


def run_on_a_rank(page: str, directory: Path) -> None:
    if page not in SHARING:
        directory = directory / f"rank{dist.get_rank()}"
        directory.mkdir()
    run_python(page, directory)


@pytest.mark.parametrize("page", ON_TWO_RANKS)
def test_python_on_a_page_runs_on_two_ranks(ranks: Ranks, page: str, tmp_path: Path) -> None:
    ranks(2, run_on_a_rank, page, tmp_path)


def test_pages_have_blocks_that_are_found() -> None:
    assert {"README.md", "docs/quickstart.md", "docs/concepts.md"} <= set(pages_with("python"))
    (first, *_) = [block for block in blocks(ROOT / "docs/concepts.md") if block.language == "python"]
    assert first.output is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor and linked.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in anchors, f"{page.name}: {target}{anchor}"


_SPEED = re.compile(
    r"\d[\d.,]*\s+(x|times)\s+(as\s+fast|faster|slower)|\b(twice|half)\s+as\s+fast|\d\s*%\s+(faster|slower)"
    r"|\b[\d.]+\s*%\s+of\s+(the|a)\s+step's\s+time|\bhalf\s+(of\s+)?the\s+time",
    re.IGNORECASE,
)
_SOURCE = re.compile(
    r"benchmarks/results/\w+\.(md|json)|validation/\w+\.csv|data\s+sheet|et\s+al\.,?\s+(\"|\w+\s+)?(19|20)\d\d",
    re.IGNORECASE,
)


_GENERATED = re.compile(r"^<!-- measured:.*?^<!-- end -->", re.MULTILINE | re.DOTALL)
"""The part of README with rows of result files."""


def claims_of_speed(text: str) -> list[str]:
    """The paragraphs and items of a page that say how fast something is, without programs and what they print."""
    prose = _FENCE.sub("", _GENERATED.sub("", text))
    return [part for part in re.split(r"\n\s*\n|\n(?=- )", prose) if _SPEED.search(part)]


def test_claims_of_speed_are_found() -> None:
    text = (
        "It is 2.5 times as\nfast.\n\n- It costs 3 % of the step's time.\n- It is fast.\n\n```text\n4 % slower\n```\n"
    )
    assert claims_of_speed(text) == ["It is 2.5 times as\nfast.", "- It costs 3 % of the step's time."]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parts[-2] not in ("decisions", "reference") and page.name not in UNSOURCED],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_claim_of_speed_cites_its_result_file_or_its_source(page: Path) -> None:
    for claim in claims_of_speed(page.read_text()):
        assert _SOURCE.search(claim), claim


# ---------------------------------------------------------------------------------------------- files, names, commands


@pytest.mark.parametrize("page", sorted(PAGES_OF_CODE), ids=lambda page: page.name)
def test_generated_pages_are_up_to_date(page: Path) -> None:
    assert page.read_text() == PAGES_OF_CODE[page](), "run `python docs/generate.py`"


def shell_lines(page: Path) -> list[str]:
    """The commands of the shell blocks of a page, without prompts and comments, continued lines joined."""
    text = "\n".join(block.text for block in blocks(page) if block.language in ("sh", "console"))
    return [line.removeprefix("$ ").partition("  ")[0].strip() for line in text.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("page", [page for page in PAGES if shell_lines(page)], ids=lambda page: page.name)
def test_commands_on_a_page_exist(page: Path) -> None:
    known = commands()
    dotted = {
        "--model.name",
        "--data.kind",
        "--optimizer.name",
        "--schedule.name",
        *(f"--{name}" for name, _, _ in keys()),
    }
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in shell_lines(page):
        program, *words = shlex.split(line, comments=True) or [""]
        if program == "make":
            assert set(words) <= targets, line
        if program == "meshwright":
            name = words[0] if words[0] in known else " ".join(words[:2])
            options = {"--help", *(option for param in known[name].params for option in param.opts)}
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= options | dotted, line


def test_every_key_of_a_plan_is_explained() -> None:
    text = (ROOT / "docs/reference/plan-file.md").read_text()
    for struct in (Plan, Stage, Bucket, Layout):
        missing = [field for field in struct.__struct_fields__ if f"`{field}`" not in text]
        assert not missing, f"{struct.__name__}: {missing}"


def test_the_example_of_a_plan_is_a_plan() -> None:
    (example,) = [block for block in blocks(ROOT / "docs/reference/plan-file.md") if block.language == "json"]
    plan = files.decode(example.text.encode(), Plan, where="the example")
    assert plan.stage.strategy("1:gelu#0") == {"dp": "b", "tp": "f"}


@pytest.mark.parametrize("page", pages_with("toml"))
def test_run_files_and_job_graphs_on_a_page_are_valid(page: str) -> None:
    for block in blocks(ROOT / page):
        if block.language == "toml":
            raw, where = config.tables(block.text.encode(), where=page), f"{page}:{block.line}"
            make_graph(raw, where=where) if "vertices" in raw else config.make(raw, where=where)


def test_names_of_the_glossary_exist() -> None:
    """The last column: a class or a constant of the code, or a path below src/meshwright."""
    text = (ROOT / "docs/glossary.md").read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    names = [
        name for row in re.findall(r"\| ([^|]*) \|$", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)
    ]
    assert len(names) > 30
    for name in names:
        if "/" in name:
            assert (ROOT / "src/meshwright" / name).exists(), name
        else:
            last = name.rpartition(".")[2]
            assert re.search(rf"^(class {last}\b|([A-Z]+, )*{last}\b.* = |    {last}: )", sources, re.MULTILINE), name


def test_fused_projection_of_gpt2_is_refined_as_the_pictures_say() -> None:
    """docs/concepts.md draws how the heads of GPT-2 are found in one product of query, key and value."""
    text = (ROOT / "docs/concepts.md").read_text()
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=16, n_embd=128, n_layer=1, n_head=4))
    graph = capture(model, lambda model, batch: model(**batch).loss, dict.fromkeys(("input_ids", "labels"), TOKENS))
    rules = {
        operator.name.removeprefix("transformer.h.0.attn"): operator.rule
        for operator in graph.operators
        if operator.rule
    }
    for name in (".c_attn:mm#0", ".c_attn:view#1", ":split#0", ":view#0"):
        assert rules[name].pattern.replace("^", "") in text
    weight = plan(graph, layout=Layout(tp=2)).stage.storage["transformer.h.0.attn.c_attn.weight"]
    assert weight == {"tp": Shard(1, 3)}
    assert "Shard(dim=1, outer=3)" in text


def test_a_block_has_two_all_reduces_forward_and_two_backward() -> None:
    """docs/theory.md counts them."""
    counts = [Counter(module for module in all_reduces(layers) if module.startswith("blocks.")) for layers in (1, 2)]
    assert sum(counts[0].values()) == 4
    assert sum(counts[1].values()) == 8
    assert counts[0] == {
        "blocks.0.attention.projection": 1, "blocks.0.mlp.down": 1, "blocks.0.mlp.up": 1, "blocks.0.attention.qkv": 1,
    }  # fmt: skip


def all_reduces(layers: int) -> list[str]:
    """The modules of a GPT whose results are all-reduced over tp=2."""
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=layers, width=64, vocabulary=256, sequence_length=16))
    captured = builder.capture(model, language_model_loss, {"tokens": TOKENS, "targets": TOKENS})
    chosen = plan(captured.graph, layout=Layout(tp=2))
    lowered = lower_stage(PlannedGraph(captured.graph, chosen), 0, {"tp": AxisGroup("tp", 2, 0)}, rules=captured.rules)
    nodes = [node for node in lowered.functions["prologue"].graph.nodes if node.target is collectives.ALL_REDUCE]
    return [str(node.meta["operator"]).partition(":")[0] for node in nodes]
