"""Kinds of operators: operators of one kind run alike on a device, and share one of its efficiency curves."""

from meshwright.ir.graph import Operator

COMPUTE = (
    "matmul", "convolution", "convolution_input", "convolution_weight", "attention", "attention_backward",
)  # fmt: skip
"""Kinds bound by arithmetic: the size of a call is its FLOPs, its efficiency a fraction of ``peak_flops_per_s``."""
MEMORY = (
    "pointwise", "activation", "activation_backward", "softmax", "norm", "norm_backward", "batch_norm",
    "batch_norm_backward", "reduction", "gather", "scatter", "copy", "random", "update",
    "operands", "convolution_operands",
)  # fmt: skip
"""Kinds bound by memory: the size of a call is the bytes of its inputs and outputs, its efficiency a fraction of the
bandwidth. ``activation``: functions with many instructions per element. ``copy``: changes the order of elements.
``update``: a pass of an optimizer over parameters. ``operands`` and ``convolution_operands``: the work of a matrix
product or a convolution on its operands and its result besides multiplying, which counts for flat products (few rows
for their weights) and for convolutions with small kernels."""
OPERANDS = {"matmul": "operands"} | dict.fromkeys(
    ("convolution", "convolution_input", "convolution_weight"), "convolution_operands"
)
"""Maps kinds bound by arithmetic to the kind of their work on operands."""
KINDS = (*COMPUTE, *MEMORY)

_EXPERTS = (
    "meshwright.experts", "meshwright.experts_backward", "meshwright.experts_across",
    "meshwright.experts_across_backward", "meshwright.experts_kept", "meshwright.experts_backward_kept",
)  # fmt: skip
_TARGETS = {
    "matmul": ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.mv", "aten.dot", *_EXPERTS),
    "convolution": ("aten.convolution",),
    "attention": ("meshwright.attention", "meshwright.attention_ring"),
    "attention_backward": ("meshwright.attention_backward", "meshwright.attention_ring_backward"),
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
        "aten.var", "aten.var_mean", "aten.prod", "aten.any", "aten.all", "aten.cumsum",
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
    """The kind of a call of ``target`` (``aten.mm.default``, ``aten.add_.Tensor``); not for convolution gradients."""
    namespace, name = target.split(".")[:2]
    return _KIND_OF.get(f"{namespace}.{name.removesuffix('_')}", "pointwise")


def _keeps_samples(operator: Operator) -> bool:
    """Whether a convolution's gradient is that of its input, which has the same samples as the output's gradient."""
    if operator.rule is None:
        return True
    pattern = operator.rule.parsed
    return pattern.outputs[0].find(pattern.inputs[0].dims[0][0].name) is not None
