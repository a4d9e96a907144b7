"""vLLM's `AsyncLLM`: started with our connector, and used through its public interface alone."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple

from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from halfmoon.engine.checkpoint.adapters import Adapter
from halfmoon.engine.request import SampledToken, TokenLogprobs
from halfmoon.errors import Incompatible, InvalidRequest, NoCapacity, ServiceFailed, Unavailable
from halfmoon.kv.kv_layout import KVDtype, KVLayout
from halfmoon.vllm_engine.frontend.token_source import Drawn, Prompt
from halfmoon.vllm_engine.reports import Lifeline
from halfmoon.vllm_engine.staging import StagingMemory

_DTYPES: dict[str, KVDtype] = {
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
}


_REFUSALS = (VLLMClientError, ValueError, TypeError)  # of requests
_STATES = {"linear_attention", "mamba", "conv", "hybrid"}  # layers of models that vLLM computes by transformers' code
_ONE_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0: as the name of the setting below says


class Started(NamedTuple):
    """A vLLM that is ready, and what it shares with us."""

    source: AsyncLLMSource
    memory: StagingMemory
    num_blocks: int
    context_tokens: int
    step_tokens: int
    max_running: int
    vocab_size: int
    num_ranks: int
    device: str


def start_vllm(
    arguments: dict[str, Any],
    eos_token_ids: Collection[int],
    staging_bytes: int,
    reports: str,
    events: str,
    adapters: Sequence[Adapter] = (),
) -> Started:
    """Starts vLLM's processes and waits until the model is loaded: minutes. arguments: of `AsyncEngineArgs`.

    reports: path of the socket for the connector's reports; events: endpoint for those of the prefix cache. Raises
    Incompatible for a model or an option that cannot be served, ServiceFailed if vLLM does not start.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    arguments = _in_one_process(arguments)
    transfer = KVTransferConfig(
        kv_connector="HalfmoonConnector",
        kv_connector_module_path="halfmoon.vllm_engine.connector.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    try:
        published = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=events)
        config = AsyncEngineArgs(
            **arguments,
            kv_transfer_config=transfer,
            kv_events_config=published,
            logits_processors=["halfmoon.vllm_engine.connector.own_sampling:OwnSampling"],
        ).create_engine_config()
    except (ValueError, TypeError) as error:  # pydantic's are ValueErrors
        raise Incompatible(f"vLLM refuses the model or its options: {error}", param="engine_args") from error
    layout = kv_layout(config)
    if layout.block_tokens != arguments["block_size"]:
        raise Incompatible(
            f"vLLM computes this model with blocks of {layout.block_tokens} tokens here: set block_tokens to that on "
            "all workers",
            param="block_tokens",
        )
    memory = StagingMemory(layout, max(1, staging_bytes // layout.block_bytes))
    transfer.kv_connector_extra_config.update(
        reports=reports,
        lifeline=Lifeline(reports),
        eos_token_ids=sorted(eos_token_ids),
        layout=asdict(layout),
        num_blocks=memory.num_blocks,
        memory=memory.path,
    )
    config.kv_transfer_config = transfer
    try:
        with OMPProcessManager(config).configure_omp_envs(0, 0) if current_platform.is_cpu() else nullcontext():
            llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except (RuntimeError, ValueError) as error:
        raise ServiceFailed(f"vLLM did not start: {error}") from error
    num_blocks = config.cache_config.num_gpu_blocks
    assert num_blocks is not None
    return Started(
        AsyncLLMSource(llm, adapters),
        memory,
        num_blocks - 1,  # vLLM never gives away block 0
        config.model_config.max_model_len,
        config.scheduler_config.max_num_batched_tokens,
        config.scheduler_config.max_num_seqs,
        config.model_config.get_vocab_size(),
        config.parallel_config.world_size,
        current_platform.device_type,
    )


def _in_one_process(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Puts scheduler and model into one process on a CPU, as vLLM does on one GPU, unless the user has decided.

    In two processes they wait for each other by spinning, on the cores that compute.
    """
    has_ranks = arguments.get("tensor_parallel_size", 1) > 1
    is_decided = "distributed_executor_backend" in arguments or _ONE_PROCESS in os.environ
    if has_ranks or is_decided or not current_platform.is_cpu():
        return dict(arguments)
    os.environ[_ONE_PROCESS] = "0"
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")  # for this process
    return {**arguments, "distributed_executor_backend": "uni"}


def kv_layout(config: VllmConfig) -> KVLayout:
    """The layout of the model's KV; latent attention (MLA) has one head, and half of its values count as the key.

    Raises Incompatible for KV of another kind.
    """
    model, parallel = config.model_config, config.parallel_config
    if model.runner_type != "generate" or model.is_encoder_decoder:
        raise Incompatible("the model does not go on with its prompt: encoders are not served")
    if (
        model.is_hybrid
        or model.is_attention_free
        or _STATES & set(getattr(model.hf_text_config, "layer_types", None) or ())
    ):
        raise Incompatible(
            "the model has state-space layers: their state is not KV of tokens, and cannot be handed over"
        )
    if parallel.pipeline_parallel_size > 1:
        raise Incompatible("pipeline-parallel-size: give vLLM one stage; use tensor-parallel-size")
    dtype = _DTYPES.get(str(model.dtype))
    if dtype is None:
        raise Incompatible(f"KV of dtype {model.dtype} cannot be handed over", param="dtype")
    heads, width = model.get_total_num_kv_heads(), model.get_head_size()
    if model.use_mla:
        heads, width = 1, width // 2
    return KVLayout(model.get_num_layers(parallel), heads, width, dtype, config.cache_config.block_size)


class AsyncLLMSource:
    """A `TokenSource`. Owns vLLM's processes until `close`."""

    def __init__(self, llm: AsyncLLM, adapters: Sequence[Adapter] = ()) -> None:
        self._llm = llm
        self._adapters = {
            adapter.fingerprint: LoRARequest(adapter.name, number, str(adapter.path))
            for number, adapter in enumerate(adapters, 1)
        }

    async def load_adapters(self) -> None:
        """Loads every adapter. Raises ServiceFailed for one that vLLM refuses."""
        for adapter in self._adapters.values():
            try:
                await self._llm.add_lora(adapter)
            except Exception as error:
                raise ServiceFailed(f"vLLM refuses the adapter {adapter.lora_name!r}: {error}") from error

    def check(self, sampling: Mapping[str, Any]) -> None:
        """See `TokenSource.check`."""
        try:
            SamplingParams(**sampling).verify(self._llm.model_config, None, None, None)
        except _REFUSALS as error:
            raise _refused(error) from error

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Drawn, None]:
        """See `TokenSource.generate`."""
        tokens = tokens_input(prompt.token_ids, cache_salt=prompt.salt or None)
        try:
            extra = {"kv_transfer_params": prompt.order.params(), **prompt.sampling.get("extra_args", {})}
            sampling = SamplingParams(
                **{**prompt.sampling, "output_kind": RequestOutputKind.DELTA, "extra_args": extra}
            )
            outputs = self._llm.generate(
                tokens,
                sampling,
                prompt.request_id,
                lora_request=self._adapters[prompt.adapter] if prompt.adapter else None,
                priority=prompt.priority,
            )
            async for output in outputs:
                (completion,) = output.outputs
                ids = completion.token_ids
                logprobs = completion.logprobs or [None] * len(ids)
                drawn = tuple(
                    SampledToken(token, None if known is None else _logprobs(token, known, sampling.logprobs))
                    for token, known in zip(ids, logprobs, strict=True)
                )
                of_prompt = tuple(
                    _logprobs(token, known, sampling.prompt_logprobs)
                    for token, known in zip(prompt.token_ids[1:], (output.prompt_logprobs or [])[1:], strict=False)
                )
                yield Drawn(drawn, completion.finish_reason in ("abort", "error"), of_prompt)
        except EngineDeadError as error:
            raise Unavailable(f"vLLM's engine died: {error}") from error
        except EngineGenerateError:
            raise
        except _REFUSALS as error:
            raise _refused(error) from error

    async def abort(self, request_id: str) -> None:
        """See `TokenSource.abort`."""
        await self._llm.abort(request_id)

    async def empty_cache(self) -> None:
        """See `TokenSource.empty_cache`."""
        if not await self._llm.reset_prefix_cache():
            raise NoCapacity("vLLM empties its prefix cache only while no request uses it: try again")

    def close(self) -> None:
        """Ends vLLM's processes."""
        self._llm.shutdown()


def _refused(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"vLLM refuses the request: {error}", param=getattr(error, "parameter", None))


def _logprobs(token_id: int, known: Mapping[int, Logprob], num_top: int | None) -> TokenLogprobs:
    """known: by token id, of the token itself and of the `num_top` most likely ones."""
    own = known[token_id]
    top = sorted((entry.rank or 0, other, entry.logprob) for other, entry in known.items())
    return TokenLogprobs(own.logprob, tuple((other, value) for _, other, value in top[: num_top or 0]), own.rank or 0)
