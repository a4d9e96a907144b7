"""Parameters that are known and not supported: what they are accepted at, and why no further."""

from __future__ import annotations

from typing import Any, NamedTuple


class Refused(NamedTuple):
    """One such parameter: refused with 400, but for null and for the values that change nothing."""

    why: str
    neutral: tuple[Any, ...] = ()


_NO_TOOLS = "send tools, tool_choice and messages with tool_calls instead"
_TEXT = "only text is served"
_GUIDED = "send structured_outputs"
_RENDER = "there are no render endpoints"
_ENGINE = "the engine does not do this"

REFUSED: dict[str, Refused] = {
    "add_special_tokens": Refused("the model's tokenizer or chat template decides", ()),
    "allowed_token_ids": Refused(f"{_ENGINE}; use logit_bias or structured_outputs", ([],)),
    "audio": Refused(_TEXT),
    "background": Refused("a request is answered while the client waits", (False,)),
    "bad_words": Refused(f"{_ENGINE}; use logit_bias", ([],)),
    "chat_template": Refused("the model's own template is used", ()),
    "continue_final_message": Refused("send a prompt to /v1/completions instead", (False,)),
    "enable_response_messages": Refused("/tokenize says what becomes of messages", (False,)),
    "documents": Refused("put them into the messages", ([],)),
    "ec_transfer_params": Refused("the gateway places requests by itself"),
    "function_call": Refused(_NO_TOOLS, ("none", "auto")),
    "functions": Refused(_NO_TOOLS, ([],)),
    **{f"guided_{kind}": Refused(_GUIDED) for kind in ("choice", "decoding_backend", "grammar", "json", "regex")},
    "include_reasoning": Refused("reasoning is not told from other text", (True,)),
    "kv_transfer_params": Refused("the gateway places requests by itself"),
    "length_penalty": Refused("there is no beam search", (1, 1.0)),
    "logprob_token_ids": Refused(f"{_ENGINE}; use top_logprobs"),
    "max_tool_calls": Refused("tools are for chat completions"),
    "media_io_kwargs": Refused(_TEXT),
    "mm_processor_kwargs": Refused(_TEXT),
    "modalities": Refused(_TEXT, (["text"],)),
    "parallel_tool_calls": Refused("tools are for chat completions", (True, False)),
    "prediction": Refused("there is no speculative decoding"),
    "previous_input_messages": Refused("send the whole conversation as input"),
    "previous_response": Refused("send the whole conversation as input"),
    "previous_response_id": Refused("nothing is kept: send the whole conversation as input"),
    "prompt": Refused("prompts go to /v1/completions, prompt templates are not kept"),
    "prompt_embeds": Refused("send the prompt as text or token ids"),
    "prompt_logprobs": Refused("only output tokens have log-probabilities"),
    "reasoning_effort": Refused("set what the template knows in chat_template_kwargs", ("none",)),
    "repetition_detection": Refused("use repetition_penalty"),
    "request_id": Refused("send it as the header X-Request-Id"),
    "reasoning": Refused("reasoning is not told from other text"),
    "return_mm_kwargs": Refused(_RENDER, (True,)),
    "return_prompt_text": Refused("/tokenize says what becomes of messages", (False,)),
    "return_token_offsets": Refused(_RENDER, (False,)),
    "routed_experts_prompt_start": Refused(_ENGINE, (0,)),
    "service_tier": Refused("there is one tier; use priority", ("auto", "default")),
    "session_id": Refused("requests are placed by their prefix; no session is needed"),
    "skip_special_tokens": Refused("special tokens have no text", (True,)),
    "spaces_between_special_tokens": Refused("special tokens have no text", (True,)),
    "store": Refused("nothing that was generated is kept", (False,)),
    "stream_interval": Refused("every token is sent at once", (1,)),
    "suffix": Refused("the model continues a prompt, it fills no gap", ("",)),
    "thinking_token_budget": Refused("reasoning is not told from other text", (-1,)),
    "tool_choice": Refused("tools are for chat completions", ("none", "auto")),
    "tools": Refused("tools are for chat completions", ([],)),
    "truncate_prompt_tokens": Refused("a prompt that is too long is refused; shorten it", (-1,)),
    "truncation": Refused("a prompt that is too long is refused; shorten it", ("disabled",)),
    "truncation_side": Refused("a prompt that is too long is refused; shorten it", ()),
    "use_beam_search": Refused("there is no beam search; use n and best_of", (False,)),
    "verbosity": Refused(_ENGINE, ("medium",)),
    "vllm_xargs": Refused("there are no extensions", ({},)),
    "watermarking": Refused(_ENGINE, (False,)),
    "web_search_options": Refused("the server reaches nothing but its model"),
}
