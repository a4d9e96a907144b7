"""Our settings as vLLM's own options. No vLLM."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from halfmoon.engine.checkpoint.adapters import Adapter
from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_layout import KVDtype
from halfmoon.yaml_text import parsed_yaml

_OURS = {  # vLLM's option: the setting that decides it
    "model": "model",
    "model_weights": "model",
    "tokenizer": "model",
    "skip_tokenizer_init": "model",
    "dtype": "dtype",
    "block_size": "block_tokens",
    "max_model_len": "max_context_tokens",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_batch_tokens",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_memory",
    "num_gpu_blocks_override": "kv_memory",
    "load_format": "weights",
    "kv_transfer_config": "",
    "kv_events_config": "",
    "kv_offloading_size": "",
    "kv_offloading_backend": "",
    "scheduling_policy": "",
    "enable_prompt_embeds": "",
    "data_parallel_size": "",
    "prefill_context_parallel_size": "",
    "decode_context_parallel_size": "",
    "nnodes": "",
    "runner": "",
    "convert": "",
    "speculative_config": "",
    "spec_method": "",
    "spec_model": "",
    "spec_tokens": "",
    "stream_interval": "",
    "logits_processors": "",
    "kv_cache_dtype": "",
    "enable_lora": "lora",
    "lora_modules": "lora",
    "disable_hybrid_kv_cache_manager": "",
}


_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM can be told


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What a worker asks of vLLM. None: vLLM's own default."""

    model: str  # a directory
    dtype: KVDtype | str = "auto"
    block_tokens: int = 64
    max_context_tokens: int | None = None
    max_running: int = 64
    max_batch_tokens: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    gpu_memory_utilization: float | None = None
    kv_memory_bytes: int | None = None
    has_dummy_weights: bool = False
    engine_args: str = ""  # vLLM's own options, as on its command line
    adapters: tuple[Adapter, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's `AsyncEngineArgs`. Raises InvalidRequest for options that are not to be given there."""
        ours = {
            "model": self.model,
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "block_size": self.block_tokens,
            "max_model_len": self.max_context_tokens,
            "max_num_seqs": self.max_running,
            "max_num_batched_tokens": self.max_batch_tokens,
            "tensor_parallel_size": self.tensor_parallel,
            "pipeline_parallel_size": self.pipeline_parallel,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": self.kv_memory_bytes,
            "load_format": "dummy" if self.has_dummy_weights else None,
            "scheduling_policy": "priority",
        }
        if self.adapters:
            rank = max(adapter.rank for adapter in self.adapters)
            room = next((size for size in _LORA_RANKS if size >= rank), rank)
            ours |= {"enable_lora": True, "max_loras": len(self.adapters), "max_lora_rank": room}
        return {name: value for name, value in ours.items() if value is not None} | further_arguments(self.engine_args)


def further_arguments(text: str) -> dict[str, Any]:
    """Options as on vLLM's command line, `--quantization awq --enforce-eager`, as arguments. Raises InvalidRequest."""
    found: dict[str, Any] = {}
    name = ""
    for word in shlex.split(text):
        if word.startswith("--"):
            flag, sign, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            if name.startswith("no_") and not sign:
                found[name.removeprefix("no_")] = False
                name = ""
            else:
                found[name] = _value(name, value) if sign else True
        elif name and found[name] is True:
            found[name] = _value(name, word)
        else:
            raise InvalidRequest(f"--engine-args: {word!r} belongs to no option", param="engine_args")
    for name in found:
        if name in _OURS:
            why = f"set {_OURS[name]} instead" if _OURS[name] else "Halfmoon needs it as it is"
            raise InvalidRequest(f"--engine-args: --{name.replace('_', '-')}: {why}", param="engine_args")
    return found


def _value(name: str, written: str) -> Any:
    try:
        return parsed_yaml(written).value
    except yaml.YAMLError as error:
        raise InvalidRequest(
            f"--engine-args: --{name.replace('_', '-')}: {written!r} cannot be read as YAML: {error}",
            param="engine_args",
        ) from error
