"""Puts together again what capture took apart, where nothing has come between."""

import torch
from torch import fx

aten = torch.ops.aten


def fuse(graph: fx.Graph) -> None:
    """mm + add of a bias -> addmm, where both run on the same rank without a collective between them."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.add.Tensor:
            _fuse_addmm(graph, node)


def _fuse_addmm(graph: fx.Graph, node: fx.Node) -> None:
    if len(node.args) != 2 or node.kwargs:
        return
    product, bias = node.args
    if not (isinstance(product, fx.Node) and isinstance(bias, fx.Node)):
        return
    if product.target is not aten.mm.default or len(product.users) != 1 or len(bias.meta.get("local_shape", (0, 0))) != 1:
        return
    with graph.inserting_before(node):
        fused = graph.call_function(aten.addmm.default, (bias, *product.args))
    fused.meta.update(node.meta)
    node.replace_all_uses_with(fused)
    graph.erase_node(node)
    graph.erase_node(product)
