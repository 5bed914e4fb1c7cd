"""Group operators into decisions: a forward operator with its backward operators, in all repetitions of a block."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshwright.ir.graph import Graph, Operator
from meshwright.ir.kind import kind_of
from meshwright.ir.plan import starred


@dataclass(eq=False)
class Decision:
    """A group of operators (``members``) that get their strategies together. The group stands for ``times`` equal
    groups, one for each repetition of a block. ``twins`` has a list of operator names for each member: first the
    member's own name, then the names of the equal operators that the member stands for."""

    members: tuple[Operator, ...]
    twins: tuple[list[str], ...] = ()

    @property
    def times(self) -> int:
        """The number of equal groups that the decision stands for."""
        return len(self.twins[0])

    @property
    def leads(self) -> list[Operator]:
        """The forward operators, which determine the choices; all members if none is a forward operator."""
        return [member for member in self.members if not member.backward] or list(self.members)


@dataclass
class Decisions:
    """All decisions of a graph (``entries``). ``place`` maps an operator to the index of its decision, and its index
    among the members of the decision. ``followers`` are views with one reader. A follower is split in the way that its
    reader needs."""

    entries: list[Decision] = field(default_factory=list)
    place: dict[str, tuple[int, int]] = field(default_factory=dict)
    followers: set[str] = field(default_factory=set)


def decisions_of(graph: Graph, marks: Mapping[str, object]) -> Decisions:
    """The decisions of a graph. ``marks`` maps operators to their pins. Operators with different pins get different
    decisions."""
    followers = _followers(graph, marks)
    result = Decisions(followers=followers)
    blocks = _repeated_blocks(graph)
    known: dict[object, int] = {}
    for group in _groups(graph, followers):
        key = _signature(graph, group, blocks, marks) or object()  # outside of blocks, every group is unique
        index = known.setdefault(key, len(result.entries))
        if index == len(result.entries):
            result.entries.append(Decision(tuple(group), tuple([] for _ in group)))
        for number, operator in enumerate(group):
            result.entries[index].twins[number].append(operator.name)
            result.place[operator.name] = (index, number)
    return result


def _followers(graph: Graph, marks: Mapping[str, object]) -> set[str]:
    """The views whose output has exactly one reader and is no output of the graph. A resharding costs the same before
    such a view as after it."""
    outside = {graph.loss, *graph.metrics.values(), *graph.buffer_updates.values()}
    reads = Counter(name for operator in graph.operators for name in operator.inputs)
    reads.update(entry.gradient for entry in graph.gradients if entry.gradient is not None)
    return {
        operator.name
        for operator in graph.operators
        if operator.bytes == 0 and operator.rule is not None and len(operator.inputs) == len(operator.outputs) == 1
        and reads[operator.outputs[0]] == 1 and operator.outputs[0] not in outside and not marks.get(operator.name)
    }  # fmt: skip


def _groups(graph: Graph, followers: set[str]) -> list[list[Operator]]:
    """Group a forward operator with its backward operators, which have the same sequence number. Forward operators with
    this number whose outputs the operator reads, directly or through each other, join the group. All other operators
    are groups of one."""
    by_sequence: dict[tuple[str, int], list[Operator]] = defaultdict(list)
    for operator in graph.operators:
        if operator.name not in followers and operator.sequence >= 0 and not operator.prologue:
            by_sequence[operator.module, operator.sequence].append(operator)
    group_of: dict[str, list[Operator]] = {}
    for members in by_sequence.values():
        backward = [member for member in members if member.backward]
        forward = [member for member in members if not member.backward]
        if not backward or not forward:
            continue
        joined = [forward[-1]]
        for operator in reversed(forward[:-1]):
            if any(set(operator.outputs) & set(other.inputs) for other in joined):
                joined.insert(0, operator)
        group = [*joined, *backward]
        group_of |= {member.name: group for member in group}
    groups: dict[str, list[Operator]] = {}
    for operator in graph.operators:
        if operator.name not in followers:
            group = group_of.get(operator.name, [operator])
            groups.setdefault(group[0].name, group)
    return list(groups.values())


def block_of(operator: Operator, depth: int = 1) -> str:
    """The repeated block that contains an operator (``h.3`` of ``h.3.mlp``), or an empty string. For nested blocks,
    ``depth`` counts from the outermost block."""
    ends = [place for place, part in enumerate(operator.repeat.split("."), start=1) if part == "*"]
    return ".".join(operator.module.split(".")[: ends[depth - 1]]) if len(ends) >= depth else ""


def _repeated_blocks(graph: Graph) -> set[str]:
    """The starred names of repeated blocks that are split alike: blocks with two or more products. Blocks of one
    product are excluded, because a chain of such blocks is split by columns and by rows in turn."""
    products = Counter(
        block_of(operator)
        for operator in graph.operators
        if not operator.backward and kind_of(operator) in ("matmul", "convolution", "attention")
    )
    return {starred(name) for name, count in products.items() if name and count >= 2}


def _signature(graph: Graph, group: Iterable[Operator], blocks: set[str], marks: Mapping[str, object]) -> object | None:
    """A key that is equal for groups of operators with equal choices and costs; None outside of ``blocks``."""
    classes: dict[str, tuple[int, str]] = {}
    entries: list[object] = []
    for op in group:
        if starred(block_of(op)) not in blocks:
            return None
        named = [
            classes.setdefault(name, (len(classes), graph.factor_classes[name].role)) for name in op.classes.values()
        ]
        dtypes = tuple(graph.tensors[name].dtype for name in (*op.inputs, *op.outputs))
        pattern, sizes = ("", ()) if op.rule is None else (op.rule.pattern, tuple(op.rule.sizes.items()))
        entries.append((starred(op.name), op.target, pattern, sizes, tuple(named), dtypes, op.bytes, op.flops,
                     marks.get(op.name)))  # fmt: skip
    return tuple(entries)
