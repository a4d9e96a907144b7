"""Prefill workers in this process whose devices compute apart from its cores: a layer of a step takes a given time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.engine.attention.attention_backend import AttentionBackend, AttentionRule, StepAttention, TokenSpan
from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.pb import gateway_pb2, types_pb2
from halfmoon.policy.models.latency import PrefillModel
from halfmoon.rpc.server import running_server
from halfmoon.rpc.transport.link import LinkSettings
from halfmoon.worker.handover.kv_channels import KVChannels
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.servicers.cache_servicer import CacheServicer
from halfmoon.worker.servicers.decode_servicer import DecodeServicer
from halfmoon.worker.servicers.prefill_servicer import PrefillServicer
from halfmoon.worker.serving import worker_services
from halfmoon.worker.state import WorkerState
from halfmoon.worker.store.restorer import Restorer
from halfmoon.worker.store.source_links import SourceLinks

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16_384,
}


def tiny_checkpoint(path: Path) -> Checkpoint:
    """A random Llama of sixteen small layers."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**_SIZES)).save_pretrained(path)
    return prepare_checkpoint(str(path))


class SlowDevice:
    """Attends like `inner`; a step of prompts takes as long as `model` says, evenly over the layers."""

    def __init__(self, inner: AttentionBackend, model: PrefillModel, num_layers: int) -> None:
        self._inner = inner
        self._model = model
        self._num_layers = num_layers

    def step(self, spans: Sequence[TokenSpan]) -> StepAttention:
        """See `AttentionBackend.step`."""
        seconds = sum(self._model.seconds(span.end - span.start, span.start) for span in spans)
        return _SlowStep(self._inner.step(spans), seconds / self._num_layers)


class _SlowStep:
    def __init__(self, inner: StepAttention, layer_s: float) -> None:
        self._inner = inner
        self._layer_s = layer_s

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        began_s = time.perf_counter()
        out = self._inner.attend(q, k, v, layer_kv, rule)
        time.sleep(max(0.0, began_s + self._layer_s - time.perf_counter()))
        return out


@asynccontextmanager
async def slow_worker(checkpoint: Checkpoint, model: PrefillModel, num_blocks: int) -> AsyncIterator[str]:
    """Serves a prefill worker without a gateway; yields its address."""
    config = EngineConfig(dtype="float32", num_blocks=num_blocks, num_threads=1, attention="sdpa")
    engine = Engine(checkpoint, config)
    runner = engine._runner
    runner._attention = SlowDevice(runner._attention, model, engine.layout.num_layers)  # type: ignore[union-attr]
    metrics, sources = WorkerMetrics(), SourceLinks()
    identity = gateway_pb2.WorkerIdentity(role=types_pb2.PREFILL, model_fingerprint=checkpoint.fingerprint)
    state = WorkerState(identity, engine.layout, metrics, sources=sources)
    async with AsyncEngine(engine, state.on_step) as async_engine, aclosing(sources):
        restorer = Restorer(async_engine, state, sources, metrics.store)
        channels = KVChannels(LinkSettings(), lambda _: None)
        prefill = PrefillServicer(async_engine, state, metrics, channels, restorer)
        decode = DecodeServicer(async_engine, state, metrics, lease_s=10.0)
        cache = CacheServicer(async_engine, engine.num_blocks, state, metrics)
        async with running_server(
            "127.0.0.1:0", worker_services(prefill, decode, cache), metrics.rpc, grace_s=0
        ) as server:
            yield f"127.0.0.1:{server.port}"
        await prefill.close()
        decode.close()
