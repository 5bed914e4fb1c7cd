"""When collectives start and are waited for: parameters are gathered one bucket ahead, halos waited for when read."""

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


def sink_waits(graph: fx.Graph) -> None:
    """Wait for rows that go back to their owners when somebody reads the sum: the gradient of a convolution's weight is
    computed while those of its input travel.

    gx = wait(halo_reduce_start(...))                 s  = halo_reduce_start(...)
    gw = convolution_backward(...)        becomes     gw = convolution_backward(...)
    y  = relu_backward(gx, x)                         gx = wait(s)
                                                      y  = relu_backward(gx, x)
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is collectives.HALO_REDUCE:
            wait = next(user for user in node.users if user.target is collectives.WAIT)
            first = min(wait.users, key=place.__getitem__, default=None)
            if first is not None:
                first.prepend(wait)
