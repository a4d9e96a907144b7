"""The properties of a model that decide its cost, and which devices can share it."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.architectures.model_config import Experts, Latent, ModelConfig
from halfmoon.architectures.weight_format import BFLOAT16, WeightFormat
from halfmoon.policy.parallelism import check_parallelism

_PLAIN_BYTES = 2.0  # of a value that is never quantised: embedding, head, activations


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A transformer. With `latent`, one row for all heads is cached: `num_kv_heads` 1, `head_dim` half of the row."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    mlp_matrices: int = 3  # 2 without a gate
    tied_embeddings: bool = False
    context_tokens: int | None = None  # longest sequence; None: unknown
    weights: WeightFormat = BFLOAT16
    bytes_per_kv: float = 2.0
    experts: Experts | None = None
    latent: Latent | None = None
    windows: tuple[int | None, ...] = ()  # see ModelConfig

    def check(self, tensor: int, pipeline: int) -> None:
        """Raises Incompatible for a parallelism that a worker would refuse."""
        inner = self.intermediate if self.experts is None else self.experts.divided_inner(self.intermediate)
        check_parallelism(
            tensor,
            pipeline,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            intermediate_size=inner,
            num_layers=self.num_layers,
        )

    @property
    def num_mixtures(self) -> int:
        """Layers with experts."""
        return 0 if self.experts is None else sum(self.experts.in_layer)

    @property
    def expert_params(self) -> float:
        """Weights of one expert in one layer."""
        return 0.0 if self.experts is None else 3.0 * self.hidden * self.experts.intermediate_size

    @property
    def common_params(self) -> float:
        """Weights of all layers that each token is multiplied with: all but experts."""
        num_dense, per_mixture = self.num_layers - self.num_mixtures, 0
        if self.experts is not None:
            per_mixture = self.hidden * (self.experts.num_experts + 3 * self.experts.shared_intermediate_size)
        mlps = num_dense * self.mlp_matrices * self.hidden * self.intermediate + self.num_mixtures * per_mixture
        return float(self.num_layers * self._attention_params + mlps)

    @property
    def layer_params(self) -> float:
        """Weights of all layers."""
        num_experts = 0 if self.experts is None else self.experts.num_experts
        return self.common_params + self.num_mixtures * num_experts * self.expert_params

    @property
    def head_params(self) -> float:
        """Weights of the output head: what each sampled token is multiplied with."""
        return float(self.vocab * self.hidden)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, but for norms and biases."""
        heads = self.head_params * self._num_heads_and_embeddings
        return self.layer_params * self.weights.bytes_per_weight + heads * _PLAIN_BYTES

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of K and V, or of the latent row, of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv

    @property
    def prompt_pair_flops(self) -> float:
        """Operations in all layers for each pair of a prompt's token and one that it attends to.

        Latents are taken as expanded to keys and values for prompts (DeepSeek-V2, section 2.1).
        """
        if self.latent is None:
            return 4 * self.num_layers * self.num_heads * self.head_dim
        widths = self.latent.plain_size + self.latent.rotary_size + self.latent.value_size
        return 2 * self.num_layers * self.num_heads * widths

    @property
    def decode_pair_flops(self) -> float:
        """The same for a decoded token, which attends to latents as they are (absorbed matrices)."""
        if self.latent is None:
            return self.prompt_pair_flops
        return 2 * self.num_layers * self.num_heads * (self.latent.row_size + self.latent.size)

    def stage_share(self, pipeline: int) -> float:
        """The share of all layers in the longest of `pipeline` stages."""
        return -(-self.num_layers // pipeline) / self.num_layers

    def stage_mixtures(self, pipeline: int) -> int:
        """The most layers with experts in one of `pipeline` stages."""
        return min(-(-self.num_layers // pipeline), self.num_mixtures)

    def device_weight_bytes(self, tensor: int, pipeline: int) -> float:
        """Weight bytes on the fullest device. The head is on the last stage, the embedding on the first.

        Tensor ranks share the experts out, and all hold the matrices that make latents.
        """
        share, of_layers = self.stage_share(pipeline), self.weights.bytes_per_weight
        copied = self.num_layers * self._copied_params
        heads = self.head_params * (self._num_heads_and_embeddings if pipeline == 1 else 1)
        cut_bytes = (self.common_params - copied) * share * of_layers + heads * _PLAIN_BYTES
        num_experts = 0 if self.experts is None else -(-self.experts.num_experts // tensor)
        expert_bytes = self.stage_mixtures(pipeline) * num_experts * self.expert_params * of_layers
        return cut_bytes / tensor + copied * share * of_layers + expert_bytes

    def device_layer_bytes(self, tensor: int) -> float:
        """Weight bytes of one layer on one of `tensor` devices, in the mean of the layers."""
        heads = self.head_params * self._num_heads_and_embeddings * _PLAIN_BYTES
        return (self.device_weight_bytes(tensor, 1) - heads / tensor) / self.num_layers

    @property
    def computes_kv_from_inputs(self) -> bool:
        """Whether K and V may be computed from a layer's inputs, half as large (our engine: OPT)."""
        return self.mlp_matrices == 2 and self.num_kv_heads * self.head_dim == self.hidden

    def device_kv_bytes_per_token(self, tensor: int, pipeline: int) -> float:
        """KV bytes per token on the fullest device. With more devices than KV heads, some hold copies."""
        heads = max(self.num_kv_heads / tensor, 1.0)
        layers = self.num_layers * self.stage_share(pipeline)
        return 2 * layers * heads * self.head_dim * self.bytes_per_kv

    def activation_bytes(self, batch_tokens: int, tensor: int) -> float:
        """At the widest place of a layer on one device: its residual, its inner units or its heads, and the logits.

        Logits are of one token a sequence, in float32; there are at most as many sequences as tokens, taken as 256.
        """
        inner = (self.mlp_matrices - 1) * self.intermediate / tensor
        if self.experts is not None:
            chosen = self.experts.num_chosen * self.experts.intermediate_size
            inner = max(inner if self.num_mixtures < self.num_layers else 0.0, 2 * chosen / tensor)
        heads = self.head_dim * (self.num_heads + 2 * max(self.num_kv_heads, tensor)) / tensor
        if self.latent is not None:  # queries against rows, and what they sum up
            heads = self.num_heads * (self.latent.row_size + self.latent.size) / tensor
        width = 3 * self.hidden + max(inner, heads)
        return batch_tokens * width * _PLAIN_BYTES + min(batch_tokens, 256) * self.vocab * 4.0 / tensor

    @property
    def _num_heads_and_embeddings(self) -> int:
        return 1 if self.tied_embeddings else 2

    @property
    def _attention_params(self) -> int:
        """Of one layer."""
        if self.latent is None:
            return 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        latent, query = self.latent, self.latent.plain_size + self.latent.rotary_size
        expanded = latent.size * (latent.plain_size + latent.value_size)
        per_head = (latent.query_size or self.hidden) * query + expanded + latent.value_size * self.hidden
        return self._copied_params + self.num_heads * per_head

    @property
    def _copied_params(self) -> int:
        """Of one layer, on every tensor rank."""
        return 0 if self.latent is None else self.hidden * (self.latent.query_size + self.latent.row_size)


def shape_of(name: str, config: ModelConfig, weights: WeightFormat = BFLOAT16) -> ModelShape:
    """The shape of a model that an engine computes."""
    return ModelShape(
        name,
        config.num_layers,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
        2 if config.family == "opt" else 3,
        config.tie_word_embeddings,
        config.context_tokens,
        weights,
        experts=config.experts,
        latent=config.latent,
        windows=config.windows,
    )
