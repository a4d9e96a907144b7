"""docs/reference/api.md has every parameter as the schemas treat it, and the schemas know every parameter of vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.openai.bodies.unsupported import IGNORED, REFUSED
from services.gateway.openai.document.parameter_table import ENDPOINTS, parameter_table

DOCUMENT = Path(__file__).parents[5] / "docs" / "reference" / "api.md"

SAMPLING = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop stream
    stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking length_penalty
    stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words
    add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget stream_interval echo
"""
# What vLLM's OpenAI server takes, of its main branch in the autumn of 2026.
VLLM = {
    "/v1/completions": f"{SAMPLING} prompt suffix best_of prompt_embeds",
    "/v1/chat/completions": f"""{SAMPLING} messages top_logprobs max_completion_tokens tools tool_choice
        reasoning_effort include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents
        chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text""",
    "/v1/responses": """background include input instructions max_output_tokens max_tool_calls metadata model
        logit_bias parallel_tool_calls previous_response_id reasoning service_tier store stream temperature text
        tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output
        prompt_cache_key prompt request_id mm_processor_kwargs priority cache_salt enable_response_messages
        previous_input_messages previous_response structured_outputs repetition_penalty seed stop ignore_eos
        vllm_xargs""",
    "/tokenize": """model prompt messages add_special_tokens return_token_strs add_generation_prompt tools
        continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs""",
    "/detokenize": "model tokens",
}


def test_the_document_holds_the_table() -> None:
    assert parameter_table() in DOCUMENT.read_text(), (
        "paste what `python -m services.gateway.openai.document.parameter_table` says"
    )


@pytest.mark.parametrize("path", VLLM)
def test_no_parameter_of_vllm_is_unknown(path: str) -> None:
    known = {*ENDPOINTS[path].model_fields, *REFUSED, *IGNORED}
    assert [name for name in VLLM[path].split() if name not in known] == []


def test_every_parameter_is_explained() -> None:
    for schema in ENDPOINTS.values():
        for name, field in schema.model_fields.items():
            assert field.description or name == "echo", f"{schema.__name__}.{name}"
    assert all(refused.why for refused in REFUSED.values())
    assert all(IGNORED.values())
    assert not IGNORED.keys() & REFUSED.keys()
