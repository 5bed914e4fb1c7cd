"""A rank's programs as text: phases, nodes with their results and costs, collectives, freed storages."""

from meshwright.ir.program import Collective, Node, Program, RankPrograms, Value
from meshwright.ir.schedule import ActionKind

_TRANSFERS = {
    ActionKind.RECV_F: "receives from the stage before",
    ActionKind.SEND_F: "sends to the stage after",
    ActionKind.RECV_B: "receives from the stage after",
    ActionKind.SEND_B: "sends to the stage before",
}
_PREFIXES = ("", "k", "M", "G", "T", "P")


def program_text(rank_programs: RankPrograms) -> str:
    """The text of every stage of a rank, one line per node. ``<-`` marks inputs, ``x`` marks freed storages."""
    return "\n".join(line for program in rank_programs.programs for line in _program(program, rank_programs.rank))


def _program(program: Program, rank: int) -> list[str]:
    kinds = {"parameters": program.parameters, "buffers": program.buffers, "inputs": program.inputs}
    lines = [
        f"rank {rank}, stage {program.stage} of {program.num_stages}"
        + (", in one function" if program.together else "")
    ]
    lines += [
        f"  holds {what}: {len(held)}, {_size(sum(each.bytes for each in held))}"
        for what, held in kinds.items() if held
    ]  # fmt: skip
    names = {each.value: each.name for held in kinds.values() for each in held if each.value}
    for action, what in _TRANSFERS.items():
        values = [(each.tensor, each.value) for each in program.crossing(action)]
        lines += [f"  {what}: {value.name} ({tensor}), {_size(value.num_bytes)}" for tensor, value in values]
    lines += [
        f"  sums up: gradient of {each.parameter}, {_size(each.value.num_bytes)}" for each in program.accumulators
    ]
    for phase in program.phases:
        if phase.nodes:
            flops = sum(node.flops for node in phase.nodes)
            lines.append(f"{phase.name}: {len(phase.nodes)} nodes, {_count(flops)}FLOP")
            lines += [_node(node, names) for node in phase.nodes]
    buffers = program.buffer_updates | program.buffers_after
    ends = {"loss and metrics": program.scalars, "gradients": program.gradients, "buffers": buffers}
    lines += [
        f"gives {what}: {', '.join(f'{k} = {v}' for k, v in named.items())}" for what, named in ends.items() if named
    ]
    return lines


def _node(node: Node, names: dict[str, str]) -> str:
    outputs = ", ".join(map(_value, node.outputs)) or node.name
    words = [f"  {outputs} = {node.target.removesuffix('.default')}"]
    words.append("<- " + ", ".join(names.get(name, name) for name in node.inputs) if node.inputs else "")
    for collective in (node.starts, *node.inside):
        words.append(_collective(collective) if collective is not None else "")
    words.append(f"waits for {node.waits}" if node.waits else "")
    words.append(f"{_count(node.flops)}FLOP {_size(node.bytes)}" if node.kernels else "")
    words.append(f"[{node.operator}]" if node.operator else "")
    words.append("x " + ", ".join(node.frees) if node.frees else "")
    return "  ".join(filter(None, words))


def _value(value: Value) -> str:
    inside = "" if value.owns else f" in {value.storage}"
    return f"{value.name} {value.dtype}{list(value.shape)}{inside}"


def _collective(op: Collective) -> str:
    algorithm = f", {op.algorithm}" if op.algorithm else ""
    return f"{op.kind.replace('_', '-')} over {op.axis} ({op.size} ranks{algorithm}): {_size(op.bytes)}, {op.label}"


def _count(number: float) -> str:
    at = 0
    while number >= 1000 and at + 1 < len(_PREFIXES):
        number, at = number / 1000, at + 1
    return f"{number:.3g} {_PREFIXES[at]}"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.3g} {unit}" if num_bytes < 1000 else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    raise AssertionError(unit)
