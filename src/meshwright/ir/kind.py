"""Kinds of operators. Operators of one kind have the same efficiency curve on a device."""

from meshwright.ir.graph import Operator

COMPUTE = (
    "matmul", "convolution", "convolution_input", "convolution_weight", "attention", "attention_backward",
)  # fmt: skip
"""Kinds bound by arithmetic. The size of a call is its FLOPs. Its efficiency is a fraction of ``peak_flops_per_s``."""
MEMORY = (
    "pointwise", "activation", "activation_backward", "softmax", "norm", "norm_backward", "batch_norm",
    "batch_norm_backward", "reduction", "gather", "scatter", "copy", "random", "update",
    "operands", "convolution_operands",
)  # fmt: skip
"""Kinds bound by memory. The size of a call is the bytes of its inputs and outputs. Its efficiency is a fraction of the
memory bandwidth. An ``activation`` computes a function with many instructions per element. A ``copy`` moves elements
without computing. An ``update`` is a pass of an optimizer over parameters. A matrix product reads its
operands and writes its result: ``operands`` stands for these memory accesses. ``convolution_operands`` stands for the
memory accesses of a convolution. Both take noticeable time if a product has few rows, or a convolution a small
kernel."""
OPERANDS = {"matmul": "operands"} | dict.fromkeys(
    ("convolution", "convolution_input", "convolution_weight"), "convolution_operands"
)
"""Maps a kind of matrix product or convolution to the kind that stands for its memory accesses."""
KINDS = (*COMPUTE, *MEMORY)

_EXPERTS = (
    "meshwright.experts", "meshwright.experts_backward", "meshwright.experts_across",
    "meshwright.experts_across_backward", "meshwright.experts_kept", "meshwright.experts_backward_kept",
)  # fmt: skip
_TARGETS = {
    "matmul": ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.mv", "aten.dot", *_EXPERTS),
    "convolution": ("aten.convolution",),
    "attention": ("meshwright.attention", "meshwright.attention_ring", "meshwright.attention_packed"),
    "attention_backward": (
        "meshwright.attention_backward", "meshwright.attention_ring_backward", "meshwright.attention_packed_backward",
    ),
    "activation": (
        "aten.gelu", "aten.exp", "aten.tanh", "aten.sigmoid", "aten.silu", "aten.erf", "aten.log", "aten.pow",
        "aten.sin", "aten.cos", "aten.softplus", "aten.elu", "aten.mish", "aten.logsumexp",
        "meshwright.cross_entropy_backward",
    ),
    "activation_backward": (
        "aten.gelu_backward", "aten.silu_backward", "aten.elu_backward", "aten.softplus_backward", "aten.mish_backward",
    ),
    "softmax": (
        "aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten._softmax_backward_data",
        "aten._log_softmax_backward_data",
    ),
    "norm": ("aten.native_layer_norm", "aten.native_group_norm", "aten._fused_rms_norm"),
    "norm_backward": (
        "aten.native_layer_norm_backward", "aten.native_group_norm_backward", "aten._fused_rms_norm_backward",
    ),
    "batch_norm": ("aten._native_batch_norm_legit_functional", "aten.native_batch_norm"),
    "batch_norm_backward": ("aten.native_batch_norm_backward",),
    "reduction": (
        "aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.argmax", "aten.argmin",
        "aten.var", "aten.var_mean", "aten.prod", "aten.any", "aten.all", "aten.cumsum", "meshwright.float8_max",
    ),
    "gather": ("aten.embedding", "aten.index", "aten.gather", "aten.index_select", "aten.nll_loss_forward"),
    "scatter": (
        "aten.embedding_dense_backward", "aten.index_put", "aten.scatter", "aten.scatter_add", "aten.index_add",
    ),
    "copy": (
        "aten.cat", "aten.clone", "aten.stack", "aten.constant_pad_nd", "aten.repeat", "aten.reshape",
        "aten.contiguous", "aten.split_with_sizes_copy",
    ),
    "random": ("meshwright.bernoulli", "meshwright.uniform", "meshwright.normal"),
}  # fmt: skip
_KIND_OF = {target: kind for kind, targets in _TARGETS.items() for target in targets}


def kind_of(operator: Operator) -> str:
    """The kind of an operator; unknown operators are ``pointwise``."""
    base = ".".join(operator.target.split(".")[:2])
    if base == "aten.convolution_backward":
        return "convolution_input" if _keeps_samples(operator) else "convolution_weight"
    return kind_of_target(base)


def kind_of_target(target: str) -> str:
    """The kind of a call of ``target`` (``aten.mm.default``). For gradients of convolutions, use ``kind_of``."""
    namespace, name = target.split(".")[:2]
    return _KIND_OF.get(f"{namespace}.{name.removesuffix('_')}", "pointwise")


def _keeps_samples(operator: Operator) -> bool:
    """Whether a convolution's backward operator makes the gradient of the input, not the gradient of the weight."""
    if operator.rule is None:
        return True
    pattern = operator.rule.parsed
    return pattern.outputs[0].find(pattern.inputs[0].dims[0][0].name) is not None
