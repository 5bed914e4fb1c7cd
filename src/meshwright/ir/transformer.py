"""A transformer described by its sizes, so that its step time can be predicted without a captured model."""

from collections.abc import Iterator

import msgspec

from meshwright.errors import LayoutError, Problem, refuse


class Transformer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A stack of equal transformer layers between an embedding and a vocabulary head.

    If ``gated`` is true, the MLP has three matrices (SwiGLU), else two. If ``experts`` is above 0, every
    ``expert_every``-th layer has ``experts`` MLPs of width ``expert_ffn`` (0: ``ffn``) instead of one. A token visits
    ``experts_per_token`` of them. Such a layer also has ``shared_experts`` MLPs that every token visits. If ``causal``
    is true, fused attention kernels skip half of the products. ``cross`` is the number of layers with a second
    attention, which reads an encoder.

    Raises:
        LayoutError: a size is impossible, or heads do not divide the hidden size or are not a multiple of kv_heads.
    """

    name: str = ""
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    sequence: int
    kv_heads: int = 0
    head_size: int = 0
    gated: bool = False
    bias: bool = True
    dropout: bool = True
    rotary: bool = False
    causal: bool = True
    tied: bool = True
    cross: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_every: int = 1
    expert_ffn: int = 0
    shared_experts: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        refuse(LayoutError, self._problems())

    def _problems(self) -> Iterator[Problem]:
        for key, least in {"layers": 1, "hidden": 1, "heads": 1, "ffn": 1, "sequence": 1, "vocabulary": 0}.items():
            if getattr(self, key) < least:
                yield key, f"{getattr(self, key)} is less than {least}", "give a whole number"
        if not self.head_size and self.hidden % self.heads:
            problem = f"hidden size {self.hidden} is not divisible by {self.heads} heads"
            yield "heads", problem, "correct one of them, or give head_size"
        if self.kv_heads and self.heads % self.kv_heads:
            problem = f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly"
            yield "kv_heads", problem, "give a divisor of the heads"
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            problem = f"a token cannot visit {self.experts_per_token} of {self.experts} experts"
            yield "experts_per_token", problem, f"give 1 to {self.experts}"

    @property
    def query_width(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """The width of all key heads (or value heads) together."""
        return (self.kv_heads or self.heads) * self.head_width

    @property
    def head_width(self) -> int:
        """The width of one head."""
        return self.head_size or self.hidden // self.heads

    @property
    def mlp_matrices(self) -> int:
        """The number of matrices in an MLP."""
        return 3 if self.gated else 2

    @property
    def expert_layers(self) -> int:
        """The number of layers with experts."""
        return self.layers // self.expert_every if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """The number of parameters of one attention and its norm."""
        biases = self.query_width + 2 * self.key_width + self.hidden if self.bias else 0
        return self._attention_weights + biases + self._norm

    @property
    def mlp_parameters(self) -> int:
        """The number of parameters of a dense MLP and its norm."""
        return self._mlp(self.ffn) + self._norm

    @property
    def expert_parameters(self) -> int:
        """The number of parameters of one expert."""
        return self._mlp(self.expert_ffn or self.ffn)

    @property
    def embedding_parameters(self) -> int:
        """The number of parameters of the token embedding and, if positions are learned, of the position embedding."""
        return self.hidden * (self.vocabulary + (0 if self.rotary else self.sequence))

    @property
    def head_parameters(self) -> int:
        """The number of parameters of the vocabulary head; 0 if it shares its weight with the embedding."""
        return 0 if self.tied else self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole model."""
        shared = self.shared_experts * self.expert_parameters
        routed = self.expert_layers * (
            self.experts * self.expert_parameters + shared + self.hidden * self.experts + self._norm
        )
        dense = (self.layers - self.expert_layers) * self.mlp_parameters
        attention = (self.layers + self.cross) * self.attention_parameters
        return self.embedding_parameters + self.head_parameters + attention + dense + routed + self._norm

    @property
    def active_parameters(self) -> int:
        """The number of parameters that one token uses: all except those of the experts that it does not visit."""
        idle = self.experts - self.experts_per_token if self.experts else 0
        return self.parameters - self.expert_layers * idle * self.expert_parameters

    def step_flops(self, sequences: int) -> float:
        """Model FLOPs of a training step on ``sequences`` sequences: three times the FLOPs of the forward pass.

        Attention counts as full, even if it is causal. Recomputation does not count (Korthikanti et al. 2022, appendix
        A)."""
        tokens = sequences * self.sequence
        attention = 2 * self._attention_weights
        scores = 4 * self.sequence * self.query_width
        dense = 2 * self.mlp_matrices * self.hidden * self.ffn
        routed = 2 * self.mlp_matrices * self.hidden * (self.expert_ffn or self.ffn)
        routed *= self.experts_per_token + self.shared_experts
        head = 2 * self.hidden * self.vocabulary
        layers = (self.layers + self.cross) * (attention + scores)
        layers += (self.layers - self.expert_layers) * dense + self.expert_layers * routed
        return 3.0 * tokens * (layers + head)

    @property
    def _attention_weights(self) -> int:
        return 2 * self.hidden * (self.query_width + self.key_width)

    @property
    def _norm(self) -> int:
        return self.hidden * (2 if self.bias else 1)

    def _mlp(self, width: int) -> int:
        weights = self.mlp_matrices * self.hidden * width
        return weights + (width * (self.mlp_matrices - 1) + self.hidden if self.bias else 0)
