"""Known parameters that do nothing here. What would change the answer is refused, what would not is ignored."""

from __future__ import annotations

from typing import Any, NamedTuple


class UnsupportedParameter(NamedTuple):
    """One such parameter: refused with 400, except for null and for neutral values, which change nothing."""

    why: str
    neutral: tuple[Any, ...] = ()


_NO_TOOLS = "send tools, tool_choice and messages with tool_calls instead"
_TEXT = "only text is served"
_RENDER = "there are no render endpoints"
_ENGINE = "the engine does not do this"
_SET_AT_START = "it is set when the workers start"
_SAMPLER = "there is no such sampler; use temperature, top_p, top_k and min_p"
_ONE_PROVIDER = "there is one server"

IGNORED: dict[str, str] = {
    "guided_decoding_backend": "there is one library for structured output",
    "cache_prompt": "prefixes are cached in any case",
    "betas": "the API has one version",
    "cache_control": "prefixes are found by their tokens",
    "client_metadata": "labels of the client's own",
    "context_management": "the whole conversation is read",
    "draft_model": _SET_AT_START,
    "ec_transfer_params": "the gateway places requests itself",
    "id_slot": "requests are placed by their prefix",
    "inference_geo": _ONE_PROVIDER,
    "keep_alive": "the model stays loaded",
    "kv_transfer_params": "the gateway places requests itself",
    "max_tool_calls": "it limits built-in tools, of which there are none",
    "media_io_kwargs": _TEXT,
    "mm_processor_kwargs": _TEXT,
    "num_batch": _SET_AT_START,
    "num_ctx": "the context is as long as the model's",
    "num_gpu": _SET_AT_START,
    "num_keep": "a prompt is never cut to go on",
    "num_thread": _SET_AT_START,
    "prediction": "workers guess tokens by themselves, where their speculation is on",
    "provider": _ONE_PROVIDER,
    "prompt_cache_retention": "the stores' own settings say how long KV is kept",
    "repeat_last_n": "it belongs to repeat_penalty, which is refused unless it is 1",
    "request_id": "send it as the header X-Request-Id",
    "return_mm_kwargs": _TEXT,
    "return_progress": "a prompt's progress is not told",
    "rid": "send it as the header X-Request-Id",
    "route": _ONE_PROVIDER,
    "service_tier": "there is one tier; use priority",
    "session_id": "requests are placed by their prefix",
    "speed": "there is one speed",
    "spaces_between_special_tokens": "special tokens have no text",
    "store": "only responses are kept",
    "stream_interval": "workers have it, as stream_interval_ms",
    "stream_options": "the end has the usage in any case",
    "timings_per_token": "return_timing has them for the whole answer",
    "ttl": "the model stays loaded",
    "truncation": "a prompt that is too long is refused in any case",
    "usage": "the end has the usage",
    "use_mlock": _SET_AT_START,
    "use_mmap": _SET_AT_START,
    "verbosity": "the model decides",
    "user_profile_id": "there are no profiles; use metadata",
    "vllm_xargs": "there are no extensions",
}
"""Hints, bookkeeping and other servers' fields: accepted with any value, named in the response's header, and why."""

REFUSED: dict[str, UnsupportedParameter] = {
    "audio": UnsupportedParameter(_TEXT),
    "background": UnsupportedParameter("only responses run in the background", (False,)),
    "chat_template": UnsupportedParameter("templates are for chats"),
    "enable_response_messages": UnsupportedParameter("/tokenize shows the rendered messages", (False,)),
    "conversation": UnsupportedParameter("conversation objects are not kept; go on by previous_response_id"),
    "dry_multiplier": UnsupportedParameter(_SAMPLER, (0, 0.0)),
    "dynamic_temperature": UnsupportedParameter(_SAMPLER, (False,)),
    "dynatemp_range": UnsupportedParameter(_SAMPLER, (0, 0.0)),
    "documents": UnsupportedParameter("put them into the prompt or the messages", ([],)),
    "function_call": UnsupportedParameter(_NO_TOOLS, ("none", "auto")),
    "functions": UnsupportedParameter(_NO_TOOLS, ([],)),
    "include_reasoning": UnsupportedParameter("a completion is one text", (True,)),
    "length_penalty": UnsupportedParameter("there is no beam search", (1, 1.0)),
    "logprob_token_ids": UnsupportedParameter(f"{_ENGINE}; use top_logprobs"),
    "mcp_servers": UnsupportedParameter("the server reaches nothing but its model", ([],)),
    "mirostat": UnsupportedParameter(_SAMPLER, (0,)),
    "mirostat_mode": UnsupportedParameter(_SAMPLER, (0,)),
    "modalities": UnsupportedParameter(_TEXT, (["text"],)),
    "previous_input_messages": UnsupportedParameter("send the whole conversation as input"),
    "previous_response": UnsupportedParameter("send the whole conversation as input"),
    "previous_response_id": UnsupportedParameter("responses go on from one another; send all messages"),
    "prompt": UnsupportedParameter("prompts go to /v1/completions, prompt templates are not kept"),
    "prompt_embeds": UnsupportedParameter("send the prompt as text or token ids"),
    "prompt_logprobs": UnsupportedParameter("chats and completions return them"),
    "repeat_penalty": UnsupportedParameter("it is called repetition_penalty here", (1, 1.0)),
    "repetition_detection": UnsupportedParameter("use repetition_penalty"),
    "return_prompt_text": UnsupportedParameter("/tokenize shows the rendered messages", (False,)),
    "return_token_offsets": UnsupportedParameter(_RENDER, (False,)),
    "routed_experts_prompt_start": UnsupportedParameter(_ENGINE, (0,)),
    "safe_prompt": UnsupportedParameter("write it into the system message", (False,)),
    "smoothing_factor": UnsupportedParameter(_SAMPLER, (0, 0.0)),
    "suffix": UnsupportedParameter("the model continues a prompt and cannot fill a gap", ("",)),
    "tfs": UnsupportedParameter(_SAMPLER, (1, 1.0)),
    "tfs_z": UnsupportedParameter(_SAMPLER, (1, 1.0)),
    "thinking_token_budget": UnsupportedParameter("the model decides how long it thinks", (-1,)),
    "tool_choice": UnsupportedParameter("tools are for chats, messages and responses", ("none", "auto")),
    "tools": UnsupportedParameter("tools are for chats, messages and responses", ([],)),
    "top_a": UnsupportedParameter(_SAMPLER, (0, 0.0)),
    "top_n_sigma": UnsupportedParameter(_SAMPLER, (0, -1, 0.0, -1.0)),
    "typical_p": UnsupportedParameter(_SAMPLER, (1, 1.0)),
    "xtc_probability": UnsupportedParameter(_SAMPLER, (0, 0.0)),
    "parallel_tool_calls": UnsupportedParameter("tools are for chats, messages and responses", (True, False)),
    "use_beam_search": UnsupportedParameter("there is no beam search; use n and best_of", (False,)),
    "watermarking": UnsupportedParameter(_ENGINE, (False,)),
    "web_search_options": UnsupportedParameter("the server reaches nothing but its model"),
}
