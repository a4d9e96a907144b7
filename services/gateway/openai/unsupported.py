"""Known parameters that are not supported: the values that are accepted all the same, and why no others are."""

from __future__ import annotations

from typing import Any, NamedTuple


class UnsupportedParameter(NamedTuple):
    """One such parameter: refused with 400, except for null and for neutral values, which change nothing."""

    why: str
    neutral: tuple[Any, ...] = ()


_NO_TOOLS = "send tools, tool_choice and messages with tool_calls instead"
_TEXT = "only text is served"
_GUIDED = "send structured_outputs"
_RENDER = "there are no render endpoints"
_ENGINE = "the engine does not do this"

REFUSED: dict[str, UnsupportedParameter] = {
    "add_special_tokens": UnsupportedParameter("the model's tokenizer or chat template decides", ()),
    "allowed_token_ids": UnsupportedParameter(f"{_ENGINE}; use logit_bias or structured_outputs", ([],)),
    "audio": UnsupportedParameter(_TEXT),
    "background": UnsupportedParameter("a request is answered while the client waits", (False,)),
    "bad_words": UnsupportedParameter(f"{_ENGINE}; use logit_bias", ([],)),
    "chat_template": UnsupportedParameter("the model's own template is used", ()),
    "continue_final_message": UnsupportedParameter("send a prompt to /v1/completions instead", (False,)),
    "enable_response_messages": UnsupportedParameter("/tokenize shows the rendered messages", (False,)),
    "documents": UnsupportedParameter("put them into the messages", ([],)),
    "ec_transfer_params": UnsupportedParameter("the gateway places requests itself"),
    "function_call": UnsupportedParameter(_NO_TOOLS, ("none", "auto")),
    "functions": UnsupportedParameter(_NO_TOOLS, ([],)),
    **{
        f"guided_{kind}": UnsupportedParameter(_GUIDED)
        for kind in ("choice", "decoding_backend", "grammar", "json", "regex")
    },
    "include_reasoning": UnsupportedParameter("reasoning is not separated from other text", (True,)),
    "kv_transfer_params": UnsupportedParameter("the gateway places requests itself"),
    "length_penalty": UnsupportedParameter("there is no beam search", (1, 1.0)),
    "logprob_token_ids": UnsupportedParameter(f"{_ENGINE}; use top_logprobs"),
    "max_tool_calls": UnsupportedParameter("tools are for chat completions"),
    "media_io_kwargs": UnsupportedParameter(_TEXT),
    "mm_processor_kwargs": UnsupportedParameter(_TEXT),
    "modalities": UnsupportedParameter(_TEXT, (["text"],)),
    "parallel_tool_calls": UnsupportedParameter("tools are for chat completions", (True, False)),
    "prediction": UnsupportedParameter("there is no speculative decoding"),
    "previous_input_messages": UnsupportedParameter("send the whole conversation as input"),
    "previous_response": UnsupportedParameter("send the whole conversation as input"),
    "previous_response_id": UnsupportedParameter("nothing is kept: send the whole conversation as input"),
    "prompt": UnsupportedParameter("prompts go to /v1/completions, prompt templates are not kept"),
    "prompt_embeds": UnsupportedParameter("send the prompt as text or token ids"),
    "prompt_logprobs": UnsupportedParameter("only output tokens have log-probabilities"),
    "reasoning_effort": UnsupportedParameter("set the template's own variable in chat_template_kwargs", ("none",)),
    "repetition_detection": UnsupportedParameter("use repetition_penalty"),
    "request_id": UnsupportedParameter("send it as the header X-Request-Id"),
    "reasoning": UnsupportedParameter("reasoning is not separated from other text"),
    "return_mm_kwargs": UnsupportedParameter(_RENDER, (True,)),
    "return_prompt_text": UnsupportedParameter("/tokenize shows the rendered messages", (False,)),
    "return_token_offsets": UnsupportedParameter(_RENDER, (False,)),
    "routed_experts_prompt_start": UnsupportedParameter(_ENGINE, (0,)),
    "service_tier": UnsupportedParameter("there is one tier; use priority", ("auto", "default")),
    "session_id": UnsupportedParameter("requests are placed by their prefix; no session is needed"),
    "skip_special_tokens": UnsupportedParameter("special tokens have no text", (True,)),
    "spaces_between_special_tokens": UnsupportedParameter("special tokens have no text", (True,)),
    "store": UnsupportedParameter("nothing that was generated is kept", (False,)),
    "stream_interval": UnsupportedParameter("every token is sent at once", (1,)),
    "suffix": UnsupportedParameter("the model continues a prompt and cannot fill a gap", ("",)),
    "thinking_token_budget": UnsupportedParameter("reasoning is not separated from other text", (-1,)),
    "tool_choice": UnsupportedParameter("tools are for chat completions", ("none", "auto")),
    "tools": UnsupportedParameter("tools are for chat completions", ([],)),
    "truncate_prompt_tokens": UnsupportedParameter("a prompt that is too long is refused; shorten it", (-1,)),
    "truncation": UnsupportedParameter("a prompt that is too long is refused; shorten it", ("disabled",)),
    "truncation_side": UnsupportedParameter("a prompt that is too long is refused; shorten it", ()),
    "use_beam_search": UnsupportedParameter("there is no beam search; use n and best_of", (False,)),
    "verbosity": UnsupportedParameter(_ENGINE, ("medium",)),
    "vllm_xargs": UnsupportedParameter("there are no extensions", ({},)),
    "watermarking": UnsupportedParameter(_ENGINE, (False,)),
    "web_search_options": UnsupportedParameter("the server reaches nothing but its model"),
}
