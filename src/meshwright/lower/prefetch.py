"""When parameters are gathered: one bucket ahead of its use, so that it hides and few are whole at once."""

from torch import fx

from meshwright.ops import collectives


def prefetch(graph: fx.Graph) -> None:
    """Start to gather the next bucket when one has arrived.

    a = wait(gather_parts_start(a0))                  a1 = gather_parts_start(a0)
    x = mm(x, a)                                      a = wait(a1)
    b = wait(gather_parts_start(b0))      becomes     b1 = gather_parts_start(b0)
    y = mm(x, b)                                      x = mm(x, a)
                                                      b = wait(b1)
                                                      y = mm(x, b)
    """
    before: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not collectives.GATHER_PARTS:
            continue
        if before is not None:
            before.append(node)
        before = next(user for user in node.users if user.target is collectives.WAIT)
