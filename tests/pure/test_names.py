"""Names say what a thing is: no variable is called ``found`` or ``one``, and each idea of the package has its own class
name."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import meshwright

SOURCES = Path(meshwright.__file__).parent
TOP = Path(__file__).parents[2]
REFUSED = {"came", "found", "got", "made", "mine", "one", "said", "told"}
"""Words that say how a value came about, or whose it is, but not what it is."""
STORED = {
    ("src/meshwright/ir/result.py", "found"), ("src/meshwright/models/googlenet.py", "one"),
    ("benchmarks/golden_models.py", "one"),
}  # fmt: skip
"""Keys of result files, and names of parameters in checkpoints: they stay."""
TWO_SIDES = {
    "LAMB", "LARC", "LARS", "OneBitAdam", "ZeroOneAdam",  # the optimizer, and its section of a run file
    "Local",  # the rule local(...), and an operator on one rank, as a rule's ``local`` sees it
    "Network", "Trainer",  # names of Kubernetes' schemas
    "Operator",  # of a workflow: a model (docs/glossary.md)
    "Partial",  # a placement, and the rule partial(...)
}  # fmt: skip
"""Class names of two modules, with the reason."""


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    """The modules of the package, by path."""
    return parsed(SOURCES, SOURCES)


def parsed(folder: Path, top: Path) -> dict[str, ast.Module]:
    """The modules in a folder and below it, by their paths from ``top``."""
    return {path.relative_to(top).as_posix(): ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


def refused_names(tree: ast.AST) -> set[tuple[int, str]]:
    """The refused names that a module gives to variables, parameters, fields and functions, with their lines."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                pass
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.AsyncFunctionDef(name=name):
                pass
            case ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case _:
                continue
        if name.removeprefix("_") in REFUSED:
            names.add((node.lineno, name))
    return names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("found = search()", {(1, "found")}),
        ("for one in parts: pass", {(1, "one")}),
        ("def told(plan): pass", {(1, "told")}),
        ("def explain(mine): pass", {(1, "mine")}),
        ("lambda made: made.bytes", {(1, "made")}),
        ("class A:\n    def __init__(self):\n        self._found = []", {(3, "_found")}),
        ("try: pass\nexcept ValueError as found: pass", {(2, "found")}),
        ("plan.search(found=1).one + text.found", set()),
        ("founded, one_box = search()", set()),
    ],
)  # fmt: skip
def test_a_refused_name_is_seen_wherever_it_is_given(source: str, names: set[tuple[int, str]]) -> None:
    assert refused_names(ast.parse(source)) == names


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "docs", "examples"])
def test_variables_are_named_after_what_they_hold(folder: str) -> None:
    refused = {
        (module, line, name)
        for module, tree in parsed(TOP / folder, TOP).items()
        for line, name in refused_names(tree)
        if (module, name) not in STORED
    }
    assert not refused


def test_each_idea_has_a_class_name_of_its_own(modules: dict[str, ast.Module]) -> None:
    places = defaultdict(list)
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    shared = {name for name, where in places.items() if len(where) > 1}
    assert shared == TWO_SIDES
