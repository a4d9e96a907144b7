"""The properties of a model that decide its cost, and which devices can share it."""

from __future__ import annotations

from dataclasses import dataclass

from halfmoon.policy.parallelism import check_parallelism


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense transformer."""

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
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0

    def check(self, tensor: int, pipeline: int) -> None:
        """Raises Incompatible for a parallelism that a worker would refuse."""
        check_parallelism(
            tensor,
            pipeline,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            intermediate_size=self.intermediate,
            num_layers=self.num_layers,
        )

    @property
    def layer_params(self) -> float:
        """Weights of all layers: what each token is multiplied with."""
        attention = 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        return float(self.num_layers * (attention + self.mlp_matrices * self.hidden * self.intermediate))

    @property
    def head_params(self) -> float:
        """Weights of the output head: what each sampled token is multiplied with."""
        return float(self.vocab * self.hidden)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        heads = self.head_params * (1 if self.tied_embeddings else 2)
        return (self.layer_params + heads) * self.bytes_per_weight

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv

    def stage_share(self, pipeline: int) -> float:
        """The share of all layers in the longest of `pipeline` stages."""
        return -(-self.num_layers // pipeline) / self.num_layers

    def device_weight_bytes(self, tensor: int, pipeline: int) -> float:
        """Weight bytes on the fullest device. The head is on the last stage, the embedding on the first."""
        layers = self.layer_params * self.stage_share(pipeline)
        heads = self.head_params * (2 if pipeline == 1 and not self.tied_embeddings else 1)
        return (layers + heads) / tensor * self.bytes_per_weight

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
        heads = self.head_dim * (self.num_heads + 2 * max(self.num_kv_heads, tensor)) / tensor
        width = 3 * self.hidden + max(inner, heads)
        return batch_tokens * width * self.bytes_per_weight + min(batch_tokens, 256) * self.vocab * 4.0 / tensor
