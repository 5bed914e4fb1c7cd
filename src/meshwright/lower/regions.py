"""Compiles runs of neighbouring operators, called regions.

    mm, add, layer_norm, mm, log_softmax, nll_loss, exp, mul, scatter_add, mm
        [ region     ]      [ region                                  ]

The compiler is inductor, the backend of torch.compile. On a CPU, a region is a run of element-wise operators, norms and
softmaxes, and becomes one kernel. On a GPU, matrix products, convolutions and all other operators of PyTorch belong to
regions too, so that a region is all that lies between two calls of the following operators. These stay unchanged and in
their order on all devices: attention, random numbers, in-place operators, and collectives, which a compiler must not
reorder (docs/decisions/0020, 0061).
"""

import math
import operator
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, fx

from meshwright.errors import CompileError
from meshwright.lower.joined import FREE, WORTH, joins, joins_widely, regions_of, size_of
from meshwright.torch_private import inductor

aten = torch.ops.aten

TRITON_CAPABILITY = (7, 0)
"""The oldest compute capability of a GPU for which Triton compiles."""
Region = Callable[..., tuple[Tensor, ...]]


class Compiler:
    """Compiles regions to kernels; equal regions share a kernel. Each trainer has one compiler.

    ``wide``: regions have all operators that inductor can compile, as on a GPU, and not only those that it makes faster
    on a CPU.

    Raises:
        CompileError: the C++ compiler or Triton is not installed, or the GPU is too old for Triton.
    """

    def __init__(self, device: torch.device, *, wide: bool | None = None) -> None:
        self.device = device
        self.wide = device.type != "cpu" if wide is None else wide
        if device.type == "cpu":
            _check_cpp()
        else:
            _check_triton(device)
        self._known: dict[str, Region | None] = {}

    @property
    def num_kernels(self) -> int:
        """The number of kernels compiled so far."""
        return sum(kernel is not None for kernel in self._known.values())

    def compile(self, graph: fx.Graph) -> None:
        """Replace every region of the graph with a call of its kernel. Every node needs ``meta["val"]``."""
        for node in () if self.wide else graph.find_nodes(op="call_function", target=aten.gelu_backward.default):
            _share_exponential(graph, node)
        for members in regions_of(graph, joins_widely if self.wide else joins):
            _Extraction(graph, members, self.device).replace(self._kernel)
        graph.eliminate_dead_code(_is_impure)

    def _kernel(self, inner: fx.Graph, values: Sequence[Tensor]) -> Region | None:
        shapes = [(tuple(value.shape), value.stride(), value.dtype) for value in values]
        key = f"{inner}{shapes}{torch.get_num_threads()}"
        if key not in self._known:
            self._known[key] = _compiled(inner, values, self.device, f"region_{len(self._known)}")
        return self._known[key]


def _check_cpp() -> None:
    try:
        inductor().get_cpp_compiler()
    except inductor().InvalidCxxCompiler:
        raise CompileError(
            "there is no C++ compiler",
            where="compile",
            remedy="install g++ (or clang), or name one in the environment variable CXX; or train without compile",
        ) from None


def _check_triton(device: torch.device) -> None:
    if find_spec("triton") is None:
        raise CompileError(
            f"steps on {device.type} are compiled by Triton, which is not installed",
            where="compile",
            remedy="pip install triton, of the version that this PyTorch names; or train without compile",
        )
    if (capability := torch.cuda.get_device_capability(device)) < TRITON_CAPABILITY:
        least = ".".join(map(str, TRITON_CAPABILITY))
        raise CompileError(
            f"Triton compiles for GPUs of compute capability {least} and later; this one has "
            f"{capability[0]}.{capability[1]}",
            where="compile",
            remedy="train without compile",
        )


def _is_impure(node: fx.Node) -> bool:
    """Whether a node must stay even if no node reads its result: collectives, in-place operators, calls of ``note``."""
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    schema = getattr(node.target, "_schema", None)
    return bool(schema.is_mutable) if schema is not None else node.target is not operator.getitem


def _compiled(inner: fx.Graph, values: Sequence[Tensor], device: torch.device, name: str) -> Region | None:
    """The kernel of a region; None if one of its results would share memory with an input."""
    tool = inductor()
    bare: list[Callable[[list[Tensor]], Sequence[Tensor]]] = []

    def compiled(*args: Any, **kwargs: Any) -> Any:
        kernel: Any = tool.compile_fx_inner(*args, **kwargs)
        bare.append(kernel.current_callable)
        return kernel

    examples = [_example(value, device) for value in values]
    options = {"compile_threads": 1} if device.type == "cpu" else {}  # a GPU's many kernels are compiled side by side
    with torch.no_grad(), tool.patch(**options):
        function: Any = tool.compile_fx(fx.GraphModule(torch.nn.Module(), inner), examples, inner_compile=compiled)
        results = function(*examples)
    given = {value.untyped_storage().data_ptr() for value in examples}
    if any(result.untyped_storage().data_ptr() in given for result in results):
        return None
    (call,) = bare  # torch.compile's wrapper is not needed; it costs 0.1 ms with cold caches

    expected = [(value.dtype, value.stride()) for value in examples]
    unchecked = device.type != "cpu"

    def region(*arguments: Tensor) -> tuple[Tensor, ...]:
        nonlocal unchecked
        if unchecked:
            _check_arguments(name, arguments, expected)
            unchecked = False
        return tuple(call(list(arguments)))

    region.__name__ = region.__qualname__ = name
    return region


def _check_arguments(name: str, arguments: Sequence[Tensor], expected: Sequence[tuple[torch.dtype, Any]]) -> None:
    """Check that an accelerator's operators have made what fake tensors of the CPU had foretold. A kernel would read
    other dtypes and strides as if they were those for which it was compiled.

    Raises:
        CompileError: they have not.
    """
    for index, (value, (dtype, stride)) in enumerate(zip(arguments, expected, strict=True)):
        lengths = zip(value.shape, value.stride(), stride, strict=True)
        if value.dtype != dtype or any(actual != wanted for size, actual, wanted in lengths if size > 1):
            described = f"{str(value.dtype).removeprefix('torch.')} with strides {value.stride()}"
            raise CompileError(
                f"{name}, input {index} ({'x'.join(map(str, value.shape))}): it is {described}, and was compiled as "
                f"{str(dtype).removeprefix('torch.')} with strides {tuple(stride)}",
                where="compile", remedy="train without compile, and report it",
            )  # fmt: skip


def _example(value: Tensor, device: torch.device) -> Tensor:
    example = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return example.fill_(1)


# --- gelu -------------------------------------------------------------------------------------------------------------

_SCALE, _TAIL = 0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
"""erf(z) = 1 - (a1 t + ... + a5 t^5) exp(-z^2), t = 1 / (1 + p z), for z >= 0 within 1.5e-7 (Abramowitz, Stegun 1964,
7.1.26)."""


def _share_exponential(graph: fx.Graph, backward: fx.Node) -> None:
    """Compute exp(-x^2 / 2) once for gelu and its gradient: both the error function and the normal density need it.
    Forward then keeps the slope of gelu for backward, instead of x. Only float32 is changed, because the formula for
    the error function is not precise enough for wider dtypes."""
    gradient, x = backward.args[:2]
    assert isinstance(gradient, fx.Node)
    assert isinstance(x, fx.Node)
    forward = next((user for user in x.users if user.target is aten.gelu.default), None)
    if forward is None or backward < forward or forward.kwargs or backward.kwargs:
        return
    if x.meta["val"].dtype != torch.float32 or size_of(forward) < WORTH:
        return

    def emit(target: Any, *args: Any) -> fx.Node:
        with graph.inserting_before(forward):
            node = graph.call_function(target, args)
        values = fx.map_arg(args, lambda argument: argument.meta["val"])
        node.meta = {**forward.meta, "val": target(*values)}
        return node

    bell = emit(aten.exp.default, emit(aten.mul.Tensor, emit(aten.mul.Tensor, x, x), -0.5))
    size = emit(aten.mul.Tensor, emit(aten.abs.default, x), _SCALE / math.sqrt(2))
    t = emit(aten.reciprocal.default, emit(aten.add.Tensor, size, 1.0))
    tail = emit(aten.mul.Tensor, t, _TAIL[-1])
    for factor in reversed(_TAIL[:-1]):
        tail = emit(aten.mul.Tensor, emit(aten.add.Tensor, tail, factor), t)
    tail = emit(aten.mul.Tensor, emit(aten.mul.Tensor, tail, bell), 0.5)
    below = emit(aten.where.self, emit(aten.lt.Scalar, x, 0.0), tail, emit(aten.rsub.Scalar, tail, 1.0))
    density = emit(aten.mul.Tensor, bell, 1 / math.sqrt(2 * math.pi))
    slope = emit(aten.add.Tensor, below, emit(aten.mul.Tensor, x, density))
    forward.target, forward.args = aten.mul.Tensor, (x, below)
    backward.target, backward.args = aten.mul.Tensor, (gradient, slope)


# --- a region as a graph of its own -----------------------------------------------------------------------------------


class _Extraction:
    """Copies a region's operators into a graph of their own, with the views of their results and the views that only
    they read."""

    def __init__(self, graph: fx.Graph, members: Sequence[fx.Node], device: torch.device) -> None:
        self.graph, self.members, self.inside, self.device = graph, members, set(members), device
        self.absorbed: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            free = node.op == "call_function" and node.target in FREE
            if node.target is operator.getitem:
                free = node.args[0] in self.inside
            if free and node.users and all(user in self.inside or user in self.absorbed for user in node.users):
                self.absorbed.add(node)
        self.inner = fx.Graph()
        self.inputs: dict[fx.Node, fx.Node] = {}
        self.copies: dict[fx.Node, fx.Node] = {}
        self.softmaxes: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        """Maps a log_softmax node to the nodes of its exponentials and of their sum (all in ``inner``)."""

    def replace(self, kernel: Callable[[fx.Graph, Sequence[Tensor]], Region | None]) -> None:
        for node in self.members:
            self._copy(node)
        results = [result for node in self.members for result in self._results(node)]
        if not results:
            return
        self.inner.output(tuple(self.copies.get(result) or self._copy(result) for result in results))
        function = kernel(self.inner, [node.meta["val"] for node in self.inputs])
        if function is None:
            return
        last = self.members[-1]
        views = self._views_before(last)
        with self.graph.inserting_after(last):
            call = self.graph.call_function(function, tuple(self.inputs))
        with self.graph.inserting_before(call):
            contiguous = [self._as_expected(node) for node in self.inputs]
        call.args = tuple(contiguous)
        call.meta.update({**last.meta, "val": tuple(result.meta["val"] for result in results)})
        place = call
        for index, result in enumerate(results):
            with self.graph.inserting_after(place):
                place = self.graph.call_function(operator.getitem, (call, index))
            place.meta.update(result.meta)
            result.replace_all_uses_with(place, delete_user_cb=lambda user: user not in self.inside)
        self._erase(last)
        for node in views:
            place.append(node)
            place = node

    def _views_before(self, last: fx.Node) -> list[fx.Node]:
        """Views of the region's results that are made before the region's end and are read outside the region."""
        views: list[fx.Node] = []
        node = self.members[0]
        while node is not last:
            if node.op == "call_function" and node.target in FREE and self._is_view_of_member(node):
                views.append(node)
            node = node.next
        return [node for node in views if node not in self.absorbed and not self._is_result(node)]

    def _erase(self, last: fx.Node) -> None:
        """Drop the operators that the kernel replaces."""
        first, node = self.members[0], last
        while True:
            before = node.prev
            dead = node in self.inside or node in self.absorbed or self._is_result(node)
            if dead and not node.users:
                self.graph.erase_node(node)
            if node is first:
                return
            node = before

    def _is_result(self, node: fx.Node) -> bool:
        return node.op == "call_function" and node.target is operator.getitem and node.args[0] in self.inside

    def _as_expected(self, node: fx.Node) -> fx.Node:
        """An input with the strides for which the kernel was compiled: the executor's values may have other strides."""
        value = node.meta["val"]
        root = node
        while root.op == "call_function" and root.target in FREE and isinstance(root.args[0], fx.Node):
            root = root.args[0]
        if root.op != "placeholder" or not value.is_contiguous():
            return node
        contiguous = self.graph.call_function(aten.contiguous.default, (node,))
        contiguous.meta.update(node.meta)
        return contiguous

    def _results(self, node: fx.Node) -> list[fx.Node]:
        """The results of an operator that nodes outside the region read."""

        def is_read(value: fx.Node) -> bool:
            return any(user not in self.inside and user not in self.absorbed for user in value.users)

        if isinstance(node.meta["val"], Tensor):
            return [node] if is_read(node) else []
        return [user for user in node.users if user.target is operator.getitem and is_read(user)]

    def _copy(self, node: fx.Node) -> fx.Node:
        if node not in self.copies:
            self.copies[node] = self._copied(node)
        return self.copies[node]

    def _copied(self, node: fx.Node) -> fx.Node:
        if node not in self.inside and node not in self.absorbed and not self._is_view_of_member(node):
            with self.inner.inserting_after(next(reversed(self.inputs.values()), None)):
                self.inputs[node] = self.inner.placeholder(f"given_{len(self.inputs)}")
            return self.inputs[node]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._copy)
        if node.target is aten.scatter_add.default:
            return self._add_to_rows(node, args)
        if node.target is aten._log_softmax.default and node.meta["val"].dtype in (torch.float32, torch.float64):
            return self._log_softmax(args)
        parts = self.softmaxes.get(args[0]) if node.target is aten.exp.default else None  # type: ignore[arg-type]
        if parts is not None:
            return self.inner.call_function(aten.div.Tensor, parts)
        return self.inner.call_function(node.target, args, dict(kwargs))  # type: ignore[arg-type]

    def _is_view_of_member(self, node: fx.Node) -> bool:
        while node.op == "call_function" and node.target in FREE and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        return node in self.inside

    def _log_softmax(self, args: Any) -> fx.Node:
        """Emit log_softmax as separate operators. Its gradient needs exp(log_softmax(x)), and can so reuse the
        exponentials."""
        x, dim, _ = args
        call = self.inner.call_function
        shifted = call(aten.sub.Tensor, (x, call(aten.amax.default, (x, [dim], True))))
        parts = call(aten.exp.default, (shifted,))
        whole = call(aten.sum.dim_IntList, (parts, [dim], True))
        output = call(aten.sub.Tensor, (shifted, call(aten.log.default, (whole,))))
        self.softmaxes[output] = (parts, whole)
        return output

    def _add_to_rows(self, node: fx.Node, args: Any) -> fx.Node:
        """Emit a scatter of one number per row as element-wise operators."""
        into, _, index, values = args
        value = node.meta["val"]
        columns = self.inner.call_function(aten.arange.default, (value.shape[-1],), {"device": self.device})
        here = self.inner.call_function(aten.eq.Tensor, (columns, index))
        zero = self.inner.call_function(aten.full.default, ([], 0), {"dtype": value.dtype, "device": self.device})
        added = self.inner.call_function(aten.where.self, (here, values, zero))
        return self.inner.call_function(aten.add.Tensor, (into, added))
