"""What decides the computation of a decoder-only transformer. Torch-free; read from `config.json` by `config_json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from types import MappingProxyType
from typing import Any, Literal

Activation = Literal["silu", "relu", "gelu", "gelu_new"]
RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]


@dataclass(frozen=True, slots=True)
class Latent:
    """What attention over latents caches and makes of it (DeepSeek-V2, section 2.1). Sizes count numbers."""

    size: int  # of the latent
    rotary_size: int  # of the rotated part that all heads share
    plain_size: int  # of a head's query and key that is not rotated
    value_size: int  # of a head
    query_size: int  # of the latent that queries are made of; 0: they are made of the hidden state
    is_interleaved: bool  # numbers that are rotated together are neighbours in the checkpoint

    @property
    def row_size(self) -> int:
        """What is cached for each token and layer."""
        return self.size + self.rotary_size


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: perceptrons of which a router chooses some for each token. Sizes count elements, not bytes."""

    num_experts: int
    num_chosen: int  # for each token
    intermediate_size: int  # of each
    in_layer: tuple[bool, ...]  # other layers have one perceptron of the model's `intermediate_size`
    normalised: bool = False  # the chosen experts' weights are divided by their sum
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_biased: bool = False  # a bias is added to scores while experts are chosen, not to their weights
    num_groups: int = 1  # only experts of the best groups can be chosen
    num_chosen_groups: int = 1
    weight_scale: float = 1.0
    shared_intermediate_size: int = 0  # of the perceptron that computes every token besides; 0: there is none
    is_shared_gated: bool = False
    names: Literal["mixtral", "qwen2", "deepseek"] = "qwen2"  # as whose checkpoints call them

    def divided_inner(self, intermediate_size: int) -> int:
        """See `ModelConfig.divided_inner`; `intermediate_size` is of layers without a mixture."""
        return gcd(0 if all(self.in_layer) else intermediate_size, self.shared_intermediate_size)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama or the OPT family. Sizes count elements, not bytes."""

    architecture: str
    family: Literal["llama", "opt"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    context_tokens: int  # longest sequence for which our attention is exact
    activation: Activation
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: bool = False  # Gemma: RMS norms multiply with 1 + weight
    post_norms: bool = False  # Gemma: what each half of a layer adds is normed first
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # of scores; 0: head_dim**-0.5
    attention_softcap: float | None = None  # scores x become softcap * tanh(x / softcap), and so logits
    logit_softcap: float | None = None
    windows: tuple[int | None, ...] = ()  # by layer: the latest tokens that a token sees, itself included; (): all
    fused_in_checkpoint: bool = False  # Phi-3: Q, K and V are one tensor there, and so are gate and up
    experts: Experts | None = None
    latent: Latent | None = None  # then `head_dim` is half of its row, and `num_kv_heads` 1
    num_prediction_layers: int = 0  # behind the layers in a checkpoint, and ignored (DeepSeek-V3's MTP)
    rope_type: RopeType = "default"
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    window_rope_theta: float | None = None  # Gemma 3: base of the layers with a window, which have default rotation
    rotary_dim: int = 0  # leading numbers of a head that are rotated; 0: all
    embed_proj_dim: int = 0  # OPT: width of the embedding when it is projected to `hidden_size`
    norm_before: bool = True  # OPT: layer norm before (True) or after each half of a layer
    final_norm: bool = True
    norm_affine: bool = True

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied with."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def rotary_size(self) -> int:
        """See `rotary_dim`."""
        return self.rotary_dim or self.head_dim

    def window(self, layer: int) -> int | None:
        """See `windows`."""
        return self.windows[layer] if self.windows else None

    @property
    def longest_window(self) -> int | None:
        """The most that any layer lets a token see; None: all tokens before it."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == self.num_layers else None

    @property
    def divided_inner(self) -> int:
        """What the inner units of all perceptrons but experts have as common divisor; 0: there are experts only."""
        if self.experts is None:
            return self.intermediate_size
        return self.experts.divided_inner(self.intermediate_size)

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim
