"""Private names of PyTorch stand in ``torch_private`` alone, so that a new version of PyTorch is easy to check."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import _symmetric_memory

import meshwright
from meshwright.runtime.device import CudaKind

SOURCES = Path(meshwright.__file__).parent


def is_private(path: str) -> bool:
    """Whether a part of a dotted path is private. ATen operators (``torch.ops.aten._softmax``) are public."""
    return not path.startswith("torch.ops.") and any(
        part.startswith("_") and not part.startswith("__") for part in path.split(".")
    )


def imported(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """The imports of PyTorch in a module: the local name, the full path and the line of each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "torch":
                    yield name.asname or "torch", name.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            for name in node.names:
                yield name.asname or name.name, f"{node.module}.{name.name}", node.lineno


def private_names(source: str) -> set[tuple[int, str]]:
    """The private names of PyTorch that a source imports, or reads from what it imports, with their lines."""
    tree = ast.parse(source)
    names = {(line, path) for _, path, line in imported(tree) if is_private(path)}
    paths = {local: "torch" if local == "torch" else path for local, path, _ in imported(tree)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        parts: list[str] = []
        value: ast.expr = node
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if isinstance(value, ast.Name) and value.id in paths:
            path = ".".join([paths[value.id], *reversed(parts)])
            if is_private(path) and not is_private(path.rpartition(".")[0]):
                names.add((node.lineno, path))
    return names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._scaled_mm(a, b)", {(2, "torch._scaled_mm")}),
        ("import torch\ntorch.cuda._sleep(1)", {(2, "torch.cuda._sleep")}),
        ("import torch\ntorch._C._dispatch_keys(a)", {(2, "torch._C")}),
        ("import torch.distributed as dist\ndist._x.y", {(2, "torch.distributed._x")}),
        ("import torch.distributed as dist\ndist.init_process_group()", set()),
        ("def late():\n    from torch._inductor.config import patch", {(2, "torch._inductor.config.patch")}),
        ("from torch.nn.modules.batchnorm import _BatchNorm as Norm", {(1, "torch.nn.modules.batchnorm._BatchNorm")}),
        ("import torch._dynamo", {(1, "torch._dynamo")}),
        ("from torch import nn\nnn.modules.dropout._DropoutNd", {(2, "torch.nn.modules.dropout._DropoutNd")}),
        ("import torch\ntorch.ops.aten._softmax.default\ntorch.__version__\nvalue._version", set()),
    ],
)
def test_private_names_are_found(source: str, names: set[tuple[int, str]]) -> None:
    assert private_names(source) == names


def test_only_torch_private_uses_private_names_of_pytorch() -> None:
    uses = {
        str(path.relative_to(SOURCES)): names
        for path in sorted(SOURCES.rglob("*.py"))
        if (names := private_names(path.read_text(encoding="utf-8")))
    }
    assert set(uses) == {"torch_private.py"}, "import these names from torch_private, which checks them at import"


def test_memory_that_gpus_share_counts_as_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps a workspace for each group, which its allocator does not count."""
    for name, workspace in (("a", torch.empty(1024)), ("b", torch.empty(512, dtype=torch.uint8)), ("c", None)):
        monkeypatch.setitem(_symmetric_memory._group_name_to_workspace_tensor, name, workspace)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    read = CudaKind(torch.device("cuda", 0)).memory_now
    assert read is not None
    assert read() == 100 + 4096 + 512
