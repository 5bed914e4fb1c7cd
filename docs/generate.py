"""Writes the pages that follow from code and results: docs/reference, pictures of the course, figures in README."""

import ast
import inspect
import math
import sys
import textwrap
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' example calls
from docs.course_pictures import PICTURES
from docs.operator_rules import operators_page
from meshwright.bench.lint import RULES
from meshwright.cli import app
from meshwright.ir import files
from meshwright.ir.job_graph import KINDS, JobGraph, JobNode
from meshwright.ir.result import BatchPoint, Comparison, Finding, Machine, Peak, Result, ScalingPoint, Series, Settings
from meshwright.ir.run import Run
from meshwright.prediction import (
    CAPTURED,
    COLUMNS,
    OPTIONAL,
    SEARCHED,
    Validation,
    family_names,
    recompute,
    validate,
    worked_names,
)
from meshwright.serving.workflow import (
    Limits,
    Link,
    MeasuredAccuracy,
    Operator,
    Source,
    Tier,
    Variant,
    Worker,
    Workflow,
)

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
GENERATED = "<!-- Written by `python docs/generate.py` from {source}; edit that. -->"


def run_file_page() -> str:
    """Every table and key of RUN.toml, with its default and the docstring of its field."""
    lines = [
        "# Run files",
        "",
        GENERATED.format(source="src/meshwright/ir/run.py, ir/run_data.py and ir/run_model.py"),
        "",
        "A RUN.toml describes a training run: its model, data, layout, optimizer and directory.",
        "[How to write one](../how-to/write-a-run-file.md) has an example.",
    ]
    meanings = field_docstrings(Run)
    for section in msgspec.structs.fields(Run):
        required = " (required)" if section.required else ""
        lines += ["", f"## [{section.name}]{required}", "", meanings[section.name]]
        choices = [choice for choice in get_args(section.type) or (section.type,) if choice is not types.NoneType]
        tag = choices[0].__struct_config__.tag_field
        if tag is not None:
            default = "" if section.required else f" Default: `{section.default.__struct_config__.tag}`."
            names = ", ".join(f'`"{choice.__struct_config__.tag}"`' for choice in choices)
            lines += ["", f"`{tag}` is one of {names}.{default}"]
        for choice in choices:
            if tag is not None:
                lines += ["", f'### {tag} = "{choice.__struct_config__.tag}"', "", plain(inspect.getdoc(choice) or "")]
            lines += ["", *table(choice)]
    return "\n".join(lines) + "\n"


def job_graph_page() -> str:
    """Every key of a GRAPH.toml."""
    lines = [
        "# Job graph files",
        "",
        GENERATED.format(source="src/meshwright/ir/job_graph.py"),
        "",
        "A GRAPH.toml has a table for each vertex, and may have one for each node.",
        "[How to run one](../how-to/run-a-job-graph.md) has examples.",
        "",
        *(line for line in table(JobGraph) if not line.startswith("| `version`")),
    ]
    for key, kind in KINDS.items():
        lines += ["", f"## [vertices.NAME] with `{key}`", "", plain(inspect.getdoc(kind) or ""), "", *table(kind)]
    lines += ["", "## [nodes.NAME]", "", plain(inspect.getdoc(JobNode) or ""), "", *table(JobNode)]
    return "\n".join(lines) + "\n"


def workflow_file_page() -> str:
    """Every table and key of a workflow file, with its default and the docstring of its field."""
    lines = [
        "# Workflow files", "", GENERATED.format(source="src/meshwright/serving/workflow.py"), "",
        "A workflow file says what may run where. [How to write one](../how-to/serve-a-workflow.md) has an example.",
        "", *table(Workflow),
    ]  # fmt: skip
    tables: dict[str, type[msgspec.Struct]] = {
        "[limits]": Limits, "[[tiers]]": Tier, "[[links]]": Link, "[[workers]]": Worker, "[[sources]]": Source,
        "[[operators]]": Operator, "[[operators.variants]]": Variant, "[[accuracies]]": MeasuredAccuracy,
    }  # fmt: skip
    for name, struct in tables.items():
        lines += ["", f"## {name}", "", plain(inspect.getdoc(struct) or ""), "", *table(struct)]
    return "\n".join(lines) + "\n"


def table(struct: type[msgspec.Struct]) -> Iterator[str]:
    """The fields of a struct as a Markdown table."""
    meanings = field_docstrings(struct)
    fields = msgspec.structs.fields(struct)
    if not fields:
        return
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    for field in fields:
        default = "required" if field.required else f"`{value_text(field.default, field.default_factory)}`"
        choices = ", ".join(f"`{value}`" for value in get_args(field.type)) if get_origin(field.type) is Literal else ""
        meaning = meanings[field.name] + (f" One of {choices}." if choices else "")
        yield f"| `{field.encode_name}` | {default} | {meaning} |"


def value_text(default: Any, factory: Any) -> str:
    """A default in the form of a TOML file."""
    value = factory() if default is msgspec.NODEFAULT else default
    return msgspec.json.format(msgspec.json.encode(value), indent=-1).decode().replace(",", ", ")


def field_docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field, by the field's name, inherited ones too."""
    meanings: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        if cls.__module__.split(".")[0] != "meshwright":
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for node, following in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(following, ast.Expr)
            ):
                meanings[node.target.id] = plain(str(ast.literal_eval(following.value)))
    return meanings


def plain(docstring: str) -> str:
    """A docstring as one paragraph of Markdown."""
    return " ".join(docstring.replace("``", "`").split()).replace("|", "\\|")


def commands() -> dict[str, Any]:
    """Every command by the words that call it; for a group of commands, each command of the group."""
    commands: dict[str, Any] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        below = getattr(command, "commands", None)
        commands |= {f"{name} {inner_name}": inner for inner_name, inner in below.items()} if below else {name: command}
    return commands


def command_page() -> str:
    """Every command with its arguments, options and examples, as in its ``--help``."""
    lines = [
        "# Command line",
        "",
        GENERATED.format(source="src/meshwright/cli"),
        "",
        "Exit codes: 0 (success), 1 (a failed check, or a defect), 2 (wrong input), 130 (stopped by Ctrl-C).",
        "`--SECTION.KEY VALUE` sets a key of the [run file](run-file.md) in `demo`, `train`, `plan` and `verify`.",
    ]
    for name, command in commands().items():
        examples = inspect.cleandoc(command.epilog).replace("[bold]Examples[/bold]", "").strip().split("\n\n")
        code = [example.strip() for example in examples if example.strip().startswith(("meshwright", "torchrun"))]
        notes = [example.strip() for example in examples if example.strip() not in code]
        arguments = [argument for argument in command.params if argument.param_type_name == "argument"]
        usage = [option_text(argument) if argument.required else f"[{option_text(argument)}]" for argument in arguments]
        lines += ["", f"## meshwright {name}", "", plain(command.help)]
        lines += ["", "```text", " ".join(["meshwright", name, "[OPTIONS]", *usage]), "```"]
        lines += ["", "| option | meaning |", "|---|---|"]
        for parameter in command.params:
            default = (
                ""
                if parameter.default in (None, "", False) or parameter.required
                else f" Default: `{parameter.default}`."
            )
            lines.append(f"| `{plain(option_text(parameter))}` | {plain(parameter.help)}{default} |")
        lines += ["", "```sh", *code, "```", *(line for note in notes for line in ("", plain(note)))]
    return "\n".join(lines) + "\n"


def cases_page() -> str:
    """The columns of a table of measured runs, for `meshwright validate`."""
    lines = [
        "# Tables of measured runs",
        "",
        GENERATED.format(source="src/meshwright/planner/cases.py"),
        "",
        "`meshwright validate CASES.csv` reads a CSV table: a header, then a row for each run. Sizes are counts, times",
        "are seconds, memory is in bytes; cells have no units. The file must have all columns of the first table,",
        "in any order, and may have columns of the second table. Other columns are not read. A row that cannot be",
        "read is left out, with a warning.",
        "",
        "| column | content |",
        "|---|---|",
        *(f"| `{name}` | {plain(meaning)} |" for name, meaning in COLUMNS.items()),
        "",
        "| optional column | content |",
        "|---|---|",
        *(f"| `{name}` | {plain(meaning)} |" for name, meaning in OPTIONAL.items()),
        "",
        f"Families: {', '.join(f'`{name}`' for name in family_names())}.",
    ]
    return "\n".join(lines) + "\n"


def result_page() -> str:
    """The format of result files, and the rules that refuse misleading ones."""
    lines = [
        "# Result files",
        "",
        GENERATED.format(source="src/meshwright/ir/result.py and src/meshwright/bench/lint.py"),
        "",
        "`meshwright bench scaling`, `utilization` and `batch-size` print a result file with `--json`. The folder",
        "[benchmarks/results](../../benchmarks/results) has result files. `meshwright bench lint RESULT.json` refuses",
        "misleading files, and names the rule, the key and the remedy. It finds forgotten entries, but it cannot find",
        "wrong entries.",
        "",
        "## Rules",
        "",
        "| rule | requirement | source |",
        "|---|---|---|",
        *(f"| `{rule.name}` | {rule.asks} | {rule.source} |" for rule in RULES),
        "",
        '*tell N*: rule N of T. Hoefler and R. Belli, "Scientific Benchmarking of Parallel Computing Systems: Twelve',
        "Ways to Tell the Masses when Reporting Performance Results\", SC'15,",
        "[doi:10.1145/2807591.2807644](https://doi.org/10.1145/2807591.2807644).",
        '*fool N*: way N of T. Hoefler, "[Twelve ways to fool the masses when reporting performance of deep learning',
        'workloads](https://htor.inf.ethz.ch/blog/index.php/2018/11/)", 2018.',
        "",
        "## The file",
        "",
        "JSON. Times are seconds, rates are per second.",
        "",
        *table(Result),
    ]
    parts: list[tuple[str, Any]] = [("settings.NAME: Settings", Settings), ("machine: Machine", Machine)]
    parts += [(f'findings[]: kind "{finding.__struct_config__.tag}"', finding) for finding in get_args(Finding)]
    parts += [
        ("series: Series", Series),
        ("points[]: ScalingPoint", ScalingPoint),
        ("points[]: BatchPoint", BatchPoint),
        ("peak: Peak", Peak),
    ]
    for title, struct in parts:
        lines += ["", f"### {title}", "", plain(inspect.getdoc(struct) or ""), "", *table(struct)]
    return "\n".join(lines) + "\n"


def worked_page() -> str:
    """Claims of lectures with the verdicts of `meshwright recompute`."""
    lines = [
        "# Worked numbers",
        "",
        GENERATED.format(source="src/meshwright/worked"),
        "",
        "`meshwright recompute [ID]` recomputes numbers from lectures on parallel deep learning: with the formulas of",
        "`meshwright predict`, the schedules, the step lists of collectives, the simulator and the planner. Verdicts:",
        "*agrees*; *rounds* (the difference is at most 5 %); *claim wrong*; *we differ* (a prediction of a measured",
        "number is outside of the allowed difference); and *not measured* (there is no result file).",
        "",
        "Some examples capture, plan and train models: " + ", ".join(CAPTURED) + ". The command does that if one of",
        "them is named. On this page, their lines are those that `make bench-lectures` has kept. Measured lines name",
        "their [result file](../../benchmarks/results).",
    ]
    for name in worked_names():
        comparison = recompute(name, results=_FOLDER)
        lines += [
            "",
            f"## {name}",
            "",
            plain(comparison.about),
            "",
            "| claim | ours | verdict | why |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {plain(line.claim)} | {plain(line.ours)} | {line.verdict} | {plain(line.why)} |"
            for line in comparison.lines
        ]
    lines += ["", "## alpa", ""]
    lines += [
        f"The evaluation of Alpa with captured models is recomputed only if it is named: {', '.join(SEARCHED)}.",
        "[The page on predictions](../predictor.md#alpas-evaluation) has the result.",
    ]
    return "\n".join(lines) + "\n"


TABLES = sorted((HERE.parent / "validation").glob("*.csv"))
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


def validation_page() -> str:
    """Predictions and measurements for the tables in validation/: the errors of each table, and its worst rows."""
    validations = {path.stem: validate(path) for path in TABLES}
    lines = [
        "# Predicted and measured",
        "",
        GENERATED.format(source="validation/*.csv"),
        "",
        "Published step times, with the errors that `meshwright validate` reports. The column `source` of each table",
        "has the citation. Predictions use one set of constants for each device and one profile for each software",
        "([how constants were fitted](../predictor.md#how-constants-were-fitted)). Errors are in percent. *Inside* is",
        "the share of times in their interval of 80 %. *Constant* is the error of a single constant efficiency that",
        "is fitted to the same table.",
        "",
        "| table | software | runs | mean | 90th percentile | bias | inside | rank correlation | memory | constant |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(
            f"| [{name}](../../validation/{name}.csv) | {', '.join(table.software)} | {table.cases} | {table.mape:.1f} "
            f"| {table.p90:.1f} | {table.bias:+.1f} | {table.coverage:.0%} | {table.spearman:.3f} "
            f"| {'' if table.memory_mape is None else f'{table.memory_mape:.1f}'} | {table.baseline_mape:.1f} |"
            for name, table in validations.items()
        ),
        "",
        "![predicted against measured](validation.svg)",
    ]
    for name, validation in validations.items():
        lines += [
            "",
            f"## {name}: the worst five",
            "",
            "| run | predicted | measured | error |",
            "|---|---:|---:|---:|",
        ]
        worst = sorted(errors_of(validation), key=lambda row: -abs(row[2] / row[1] - 1))[:5]
        lines += [
            f"| {case} | {ours:.3g} s | {true:.3g} s | {100 * (ours / true - 1):+.1f} % |" for case, true, ours in worst
        ]
    return "\n".join(lines) + "\n"


def errors_of(validation: Validation) -> list[tuple[str, float, float]]:
    """Name, measured and predicted seconds of the rows that have a time."""
    return [(row.case, row.measured_s, row.predicted_s) for row in validation.rows if row.measured_s]


def validation_picture() -> str:
    """A plot of predicted over measured times on logarithmic axes, with the diagonal and lines at 10 % from it."""
    size, margin, low, high = 480, 44, -1.0, 3.0

    def at(seconds: float) -> float:
        return margin + (math.log10(seconds) - low) / (high - low) * (size - 2 * margin)

    def line(left: float, right: float, style: str) -> str:
        ends = f'x1="{at(left):.1f}" y1="{size - at(right):.1f}" '
        ends += f'x2="{at(left * 1e4):.1f}" y2="{size - at(right * 1e4):.1f}"'
        return f"<line {ends} {style}/>"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" font-family="sans-serif" font-size="11">',
        f'<rect width="{size}" height="{size}" fill="white"/>',
        line(0.1, 0.1, 'stroke="black"'),
        line(0.1, 0.11, 'stroke="gray" stroke-dasharray="3"'),
        line(0.11, 0.1, 'stroke="gray" stroke-dasharray="3"'),
    ]
    for power in range(-1, 4):
        where = at(10.0**power)
        parts.append(f'<text x="{where:.1f}" y="{size - margin + 16}" text-anchor="middle">{10.0**power:g} s</text>')
        parts.append(f'<text x="{margin - 6}" y="{size - where + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    for index, path in enumerate(TABLES):
        color = COLORS[index % len(COLORS)]
        parts.append(f'<text x="{margin + 10}" y="{margin + 14 * index}" fill="{color}">{path.stem}</text>')
        for _, true, ours in errors_of(validate(path)):
            parts.append(
                f'<circle cx="{at(true):.1f}" cy="{size - at(ours):.1f}" r="2.5" fill="{color}" fill-opacity="0.7"/>'
            )
    parts.append(f'<text x="{size / 2:g}" y="{size - 8}" text-anchor="middle">measured</text>')
    parts.append(
        f'<text x="12" y="{size / 2:g}" text-anchor="middle" transform="rotate(-90 12 {size / 2:g})">predicted</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def option_text(parameter: Any) -> str:
    """An argument or option of a command, as it is written in a shell."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return ", ".join(parameter.opts)


RESULTS = (
    "foundation", "pipelines", "zero", "models", "models-parity", "convolution", "convolution-parity", "collectives",
    "codecs", "consistency", "products", "message_driven", "convolution_algorithms", "data", "serving", "jobs",
    "faults", "campaign", "checkpoints", "conformance", "export", "planning", "search", "placements",
    "exhaustive", "uniform", "unlike", "alpa", "prediction", "memory", "large_batch", "lectures", "placements_truth",
    "backend", "utilization", "scaling", "course", "ui", "dry_runs", "applications", "pieces", "gpu-nvidia-h200",
    "gpu-nvidia-h200-gpt-calibrate-llama-foretold",
)  # fmt: skip
"""The results that docs/measured.md shows, and whose misses README counts. Both name those without a file."""
HEADLINES = (
    ("GPT, one rank", "foundation", "world size 1, GPT-S"),
    ("GPT, data parallel", "foundation", "dp2, GPT-S"),
    ("GPT, tensor parallel", "foundation", "tp2, GPT-S"),
    ("GPT, ZeRO 3", "zero", "GPT-S, dp2, zero3"),
    ("GPT, ZeRO 1", "zero", "GPT-S, dp2, zero1"),
    ("GPT, 1F1B, 4 micro-batches", "pipelines", "1f1b, m = 4"),
    ("GPT, 1F1B, 16 micro-batches", "pipelines", "1f1b, m = 16"),
    ("Hugging Face's Llama, data parallel", "models", "Llama, dp2"),
    ("Hugging Face's ViT, data parallel", "models", "ViT, dp2"),
    ("3x3 convolutions cut over rows", "convolution", "stack of 3x3 on 2048 x 2048, 2 ranks by rows: at most 1.000"),
    ("all-reduce of 1 MiB", "collectives", "2 ranks, 1 MiB: at most 0.3"),
    ("all-reduce of 64 MiB", "collectives", "2 ranks, 64 MiB: at most 1 x Open MPI"),
    ("GPT of 1.3 B parameters on an H200", "gpu-nvidia-h200-gpt-calibrate-llama-foretold", "GPT 1.3 B: a step"),
)
"""The comparisons in README: the words of a row, the result file, and the begin of the target; all on two ranks, except
those on a GPU."""
_FOLDER = HERE.parent / "benchmarks" / "results"


def results() -> dict[str, Result]:
    """All result files, by name."""
    return {name: files.load(_FOLDER / f"{name}.json", Result) for name in RESULTS if name not in missing()}


def missing() -> list[str]:
    """The results that have no file, because their benchmark did not run yet."""
    return [name for name in RESULTS if not (_FOLDER / f"{name}.json").exists()]


def last_findings(name: str, by_name: dict[str, Result]) -> list[Finding]:
    """The findings of a result, without those that a later run of some of its parts (``NAME-PARTS``) has again."""
    again = {
        each.target for other, result in by_name.items() if other.startswith(f"{name}-") for each in result.findings
    }
    return [finding for finding in by_name[name].findings if finding.target not in again]


def measured_page() -> str:
    """Every row of every result file."""
    lines = [
        "# Measured",
        "",
        GENERATED.format(source="benchmarks/results"),
        "",
        "In a timed comparison, both sides take turns in the same processes, unless the row says otherwise. The row",
        "gives the median of the rounds' ratios, with its 95 % interval (bootstrap), and then the median time of each",
        "side. A comparison passes or fails only if the whole interval is on one side of the limit. Otherwise it is",
        "measured once more; if the limit is still within the interval of all rounds, the verdict is undecided. A",
        "reported row is not judged. `meshwright bench lint` refuses misleading files, and files whose measured code",
        "has changed since the measurement.",
    ]
    for name, result in results().items():
        lines += [
            "",
            f"## {name}",
            "",
            f"{provenance(result)} {counts(result)} [All times](../benchmarks/results/{name}.md).",
        ]
        lines += ["", "| target | verdict | measured |", "|---|---|---|"]
        lines += [
            f"| {plain(finding.target)} | {finding.verdict} | {plain(finding.measured)} |"
            for finding in result.findings
        ]
    if missing():
        lines += ["", "## Not measured", "", "These benchmarks have not been run for a result file yet.", ""]
        lines += [f"- {name}: `python -m benchmarks.{name}`" for name in missing()]
    return "\n".join(lines) + "\n"


def provenance(result: Result) -> str:
    """The command, machine, version and date of a result file."""
    at = f", on {result.date} at commit {result.commit}" if result.date else ""
    machine = f"{result.machine.cores} cores ({result.machine.cpu})"
    return f"Made by `{result.command}` on {machine}, torch {result.versions['torch']}{at}."


def counts(result: Result) -> str:
    """The number of targets with each verdict."""
    verdicts = Counter(finding.verdict for finding in result.findings)
    words = [
        f"{verdicts[verdict]} {verdict}" for verdict in ("pass", "fail", "undecided", "reported") if verdicts[verdict]
    ]
    return f"{len(result.findings)} rows: {', '.join(words)}."


def readme() -> str:
    """README with its table of comparisons, and the number of missed targets of each area."""
    before, start, rest = README.read_text().partition("<!-- measured: `python docs/generate.py` -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    by_name = results()
    lines = [
        "",
        "| workload | peer | Meshwright's time / peer's time (95 %) | limit | verdict |",
        "|---|---|---|---:|---|",
    ]
    for words, name, beginning in HEADLINES:
        finding = next(finding for finding in by_name[name].findings if finding.target.startswith(beginning))
        assert isinstance(finding, Comparison)
        assert finding.interval is not None
        low, high = finding.interval
        figure = f"{finding.ratio:.3f} ({low:.3f} to {high:.3f})"
        lines.append(f"| {words} | {finding.baseline} | {figure} | {finding.limit:g} | {finding.verdict} |")
    areas = {name: Counter(finding.verdict for finding in last_findings(name, by_name)) for name in by_name}
    verdicts = sum(areas.values(), Counter[str]())
    tally = f"{verdicts['pass']} pass, {verdicts['fail']} fail, {verdicts['undecided']} are undecided, "
    tally += f"{verdicts['reported']} are only reported"
    lines += ["", f"Of all {verdicts.total()} rows {tally}: [docs/measured.md](docs/measured.md)."]
    if missing():
        lines += [f"Benchmarks without a result file, whose targets are not judged yet: {', '.join(missing())}."]
    lines += ["", "## Where it loses", "", "The areas with missed targets; each link leads to their rows.", ""]
    lines += ["| area | rows | missed | undecided |", "|---|---:|---:|---:|"]
    for name, area in areas.items():
        if area["fail"]:
            link = f"[{name.replace('_', ' ')}](docs/measured.md#{name})"
            lines.append(f"| {link} | {area.total()} | {area['fail']} | {area['undecided']} |")
    return f"{before}{start}" + "\n".join(lines) + f"\n\n{end}{after}"


PAGES = {
    HERE / "reference" / "cli.md": command_page,
    HERE / "reference" / "run-file.md": run_file_page,
    HERE / "reference" / "job-graph.md": job_graph_page,
    HERE / "reference" / "workflow-file.md": workflow_file_page,
    HERE / "reference" / "cases.md": cases_page,
    HERE / "reference" / "result-file.md": result_page,
    HERE / "reference" / "worked-numbers.md": worked_page,
    HERE / "reference" / "validation.md": validation_page,
    HERE / "reference" / "validation.svg": validation_picture,
    HERE / "operators.md": lambda: operators_page(GENERATED.format(source="src/meshwright/ops")),
    HERE / "measured.md": measured_page,
    README: readme,
    **{HERE / "course" / "pictures" / f"{name}.svg": draw for name, draw in PICTURES.items()},
}


if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page())
