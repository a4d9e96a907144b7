"""Which code computes on the configured device. triton is imported only where it was chosen."""

from __future__ import annotations

from functools import partial

import torch

from halfmoon.engine.attention import SdpaBackend
from halfmoon.engine.attention_backend import AttentionBackend
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.kv_arena import KVArena
from halfmoon.engine.model_runner import DecodeSteps
from halfmoon.engine.models import Model
from halfmoon.kv.layout import KVLayout


def choose_attention(config: EngineConfig, layout: KVLayout, context_tokens: int) -> AttentionBackend:
    """The back end of `config.attention_backend`. Raises Incompatible where it cannot run."""
    if config.attention_backend == "sdpa":
        return SdpaBackend(config.block_tokens, config.device)
    from halfmoon.engine.triton_attention import TritonBackend

    return TritonBackend(config.block_tokens, layout.num_kv_heads, context_tokens, config.device)


@torch.inference_mode()
def capture_decode(
    config: EngineConfig, model: Model, arena: KVArena, attention: AttentionBackend
) -> DecodeSteps | None:
    """Decode steps as CUDA graphs where those are wanted and possible. Not run on a GPU yet."""
    if not (config.cuda_graphs and arena.tensor.is_cuda and config.attention_backend == "triton"):
        return None
    from halfmoon.engine.cuda_graphs import CudaCapture, DecodeGraphs
    from halfmoon.engine.triton_attention import TritonBackend

    assert isinstance(attention, TritonBackend)
    forward = partial(model.forward, kv=arena.tensor)
    return DecodeGraphs(forward, attention, config.max_running, CudaCapture())
