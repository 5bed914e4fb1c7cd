"""Writes what follows from code and results, docs/reference and the figures in README: `python docs/generate.py`."""

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import typer

from meshwright.cli import app
from meshwright.ir.run import Run
from meshwright.prediction import COLUMNS, OPTIONAL, family_names

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
GENERATED = "<!-- Written by `python docs/generate.py` from {source}; edit that. -->"


def run_file_page() -> str:
    """Every table and key of RUN.toml, with its default and the docstring of its field."""
    lines = [
        "# Run files",
        "",
        GENERATED.format(source="src/meshwright/ir/run.py"),
        "",
        "A RUN.toml says what is trained, on which data, how and where.",
        "[How to write one](../how-to/write-a-run-file.md) has an example.",
    ]
    meanings = field_docstrings(Run)
    for section in msgspec.structs.fields(Run):
        required = " (required)" if section.required else ""
        lines += ["", f"## [{section.name}]{required}", "", meanings[section.name]]
        choices = [one for one in get_args(section.type) or (section.type,) if one is not types.NoneType]
        tag = choices[0].__struct_config__.tag_field
        if tag is not None:
            default = "" if section.required else f" Default: `{section.default.__struct_config__.tag}`."
            names = ", ".join(f'`"{one.__struct_config__.tag}"`' for one in choices)
            lines += ["", f"`{tag}` is one of {names}.{default}"]
        for choice in choices:
            if tag is not None:
                lines += ["", f'### {tag} = "{choice.__struct_config__.tag}"', "", plain(inspect.getdoc(choice) or "")]
            lines += ["", *table(choice)]
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
        choices = ", ".join(f"`{one}`" for one in get_args(field.type)) if get_origin(field.type) is Literal else ""
        meaning = meanings[field.name] + (f" One of {choices}." if choices else "")
        yield f"| `{field.encode_name}` | {default} | {meaning} |"


def value_text(default: Any, factory: Any) -> str:
    """A default as it would stand in a TOML file."""
    value = factory() if default is msgspec.NODEFAULT else default
    return msgspec.json.format(msgspec.json.encode(value), indent=-1).decode().replace(",", ", ")


def field_docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field, by the field's name, inherited ones too."""
    found: dict[str, str] = {}
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
                found[node.target.id] = plain(str(ast.literal_eval(following.value)))
    return found


def plain(docstring: str) -> str:
    """A docstring as one paragraph of Markdown."""
    return " ".join(docstring.replace("``", "`").split()).replace("|", "\\|")


def command_page() -> str:
    """Every command with its arguments, options and examples, as its ``--help`` says."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [
        "# Command line",
        "",
        GENERATED.format(source="src/meshwright/cli"),
        "",
        "Exit codes: 0, 1 (a check failed, or a defect), 2 (a mistake in what was given), 130 (stopped by Ctrl-C).",
        "`--SECTION.KEY VALUE` is any key of a [run file](run-file.md); `demo`, `train`, `plan` and `verify` take it.",
    ]
    for name, command in commands.items():
        examples = inspect.cleandoc(command.epilog).replace("[bold]Examples[/bold]", "").strip().split("\n\n")
        code = [example.strip() for example in examples if example.strip().startswith(("meshwright", "torchrun"))]
        notes = [example.strip() for example in examples if example.strip() not in code]
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        usage = [option_text(one) if one.required else f"[{option_text(one)}]" for one in arguments]
        lines += ["", f"## meshwright {name}", "", plain(command.help)]
        lines += ["", "```text", " ".join(["meshwright", name, "[OPTIONS]", *usage]), "```"]
        lines += ["", "| option | meaning |", "|---|---|"]
        for one in command.params:
            default = "" if one.default in (None, "", False) or one.required else f" Default: `{one.default}`."
            lines.append(f"| `{plain(option_text(one))}` | {plain(one.help)}{default} |")
        lines += ["", "```sh", *code, "```", *(line for note in notes for line in ("", plain(note)))]
    return "\n".join(lines) + "\n"


def cases_page() -> str:
    """The columns of a table of measured runs, for `meshwright validate`."""
    lines = [
        "# Tables of measured runs",
        "",
        GENERATED.format(source="src/meshwright/planner/cases.py"),
        "",
        "`meshwright validate CASES.csv` reads a CSV table: a header, then one run a row. Sizes are counts, times seconds, memory",
        "bytes; cells have no units. All columns of the first table must be there, in any order; columns of the second may be.",
        "Others are not read. A row that cannot be read is left out, and said so.",
        "",
        "| column | what may stand in it |",
        "|---|---|",
        *(f"| `{name}` | {plain(meaning)} |" for name, meaning in COLUMNS.items()),
        "",
        "| further column | what may stand in it |",
        "|---|---|",
        *(f"| `{name}` | {plain(meaning)} |" for name, meaning in OPTIONAL.items()),
        "",
        f"Families: {', '.join(f'`{name}`' for name in family_names())}.",
    ]
    return "\n".join(lines) + "\n"


def option_text(parameter: Any) -> str:
    """An argument or option of a command as one writes it."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return ", ".join(parameter.opts)


def readme() -> str:
    """README with the table of targets of the last benchmark that was written."""
    text = README.read_text()
    before, start, rest = text.partition("<!-- measured: `python docs/generate.py` -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    results = HERE.parent / "benchmarks" / "results" / "foundation.md"
    if results.exists():
        found = results.read_text()
        made = next(line for line in found.splitlines() if line.startswith("Made by"))
        table = found[found.index("| target") :].split("\n\n")[0].rstrip()
        measured = (
            f"{made} All of it: [benchmarks/results/foundation.md](benchmarks/results/foundation.md).\n\n{table}\n"
        )
    else:
        measured = "No result has been written yet.\n"
    return f"{before}{start}\n{measured}\n{end}{after}"


PAGES = {
    HERE / "reference" / "cli.md": command_page,
    HERE / "reference" / "run-file.md": run_file_page,
    HERE / "reference" / "cases.md": cases_page,
    README: readme,
}


if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page())
