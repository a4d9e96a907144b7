"""The request and its outputs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from halfmoon.pb.types_pb2 import NOT_FINISHED, SamplingParams, Token
from halfmoon.policy.admission.qos_classes import QosClass
from services.gateway.openai.generation_request import GenerationRequest
from services.gateway.replies.reply_format import Usage
from services.gateway.request import GatewayRequest
from tests.services.gateway.fakes import served_model

GOLD = QosClass("gold", ttft_s=1.0)


def a_request(prompts: tuple[tuple[int, ...], ...] = ((1, 2, 3),), best_of: int = 1, **options: Any) -> GatewayRequest:
    request = GatewayRequest("r", "completions", datetime.now(UTC), arrived_s=10.0, qos=GOLD, tenant_salt=b"salt")
    sampling = SamplingParams(max_tokens=8, seed=7)
    generation = GenerationRequest(prompts, sampling, best_of=best_of, num_choices=best_of, **options)
    request.begin_outputs(generation, served_model())
    return request


def test_a_single_output_has_the_id_of_the_request() -> None:
    (output,) = a_request().outputs
    assert (output.request_id, output.prompt_token_ids, output.qos) == ("r", (1, 2, 3), GOLD)
    assert (output.tenant_salt, output.progress.arrived_s) == (b"salt", 10.0)


def test_outputs_have_ids_and_seeds_of_their_own() -> None:
    request = a_request(((1, 2, 3), (4,)), best_of=2)
    assert [output.request_id for output in request.outputs] == ["r-0", "r-1", "r-2", "r-3"]
    assert [output.sampling.seed for output in request.outputs] == [7, 8, 7, 8]
    assert [len(outputs) for outputs in request.by_prompt] == [2, 2]
    assert [output.prompt_token_ids for output in request.outputs] == [(1, 2, 3), (1, 2, 3), (4,), (4,)]


def test_a_prompt_counts_once_however_many_outputs_it_has() -> None:
    request = a_request(((1, 2, 3), (4,)), best_of=2)
    for output in request.outputs:
        output.text.push([Token(token_id=97, finish_reason=NOT_FINISHED)])
        output.progress.cached_tokens = 1
    assert request.usage() == Usage(4, 2, 4)


def test_guessed_tokens_are_counted_where_there_are_any() -> None:
    request = a_request(best_of=2)
    assert "completion_tokens_details" not in request.usage().as_dict()
    first, second = (output.progress for output in request.outputs)
    first.note_drafts([Token(), Token(num_drafts=5, num_right_drafts=2)])
    second.note_drafts([Token(num_drafts=1)])
    details = {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 4}
    assert request.usage().as_dict()["completion_tokens_details"] == details


def test_tokens_that_came_with_the_end_of_a_stop_string_are_no_reasoning() -> None:
    request = a_request(reasoning_tags=(None, 1), stops=("b",))
    (output,) = request.outputs
    token_ids = [ord("a"), ord("b"), ord("c")]
    output.progress.note_tokens(token_ids, 11.0)
    output.text.push([Token(token_id=token_id, finish_reason=NOT_FINISHED) for token_id in token_ids])
    assert (request.usage().num_reasoning_tokens, request.usage().completion_tokens) == (2, 2)


def test_times_are_those_of_all_outputs() -> None:
    request = a_request(best_of=2)
    assert (request.ttft_s, request.gaps_s, request.num_retries) == (None, [], 0)
    first, second = (output.progress for output in request.outputs)
    second.note_tokens([1], 11.0)
    first.note_tokens([1], 12.0)
    first.note_tokens([2], 12.5)
    second.num_retries = 3
    assert (request.ttft_s, request.gaps_s, request.num_retries) == (1.0, [0.5], 3)


def test_before_tokenization_a_request_has_no_outputs() -> None:
    request = GatewayRequest("r", "completions", datetime.now(UTC), 0.0)
    assert (request.outputs, request.usage(), request.ttft_s) == ([], Usage(0, 0, 0), None)
