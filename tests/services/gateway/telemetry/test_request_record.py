"""The ledger row of a request."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from halfmoon.ledger.models import RequestRow
from halfmoon.pb.types_pb2 import SamplingParams, Token
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.refusal import PredictedLatency, Refused
from halfmoon.policy.values import AdmissionTargets
from services.gateway.openai.generation_request import GenerationRequest
from services.gateway.request import GatewayRequest
from services.gateway.telemetry.request_record import request_row
from tests.services.gateway.fakes import served_model

GOLD = QosClass("gold", ttft_s=1.0)


def arrived(*, needs_workers: bool = True) -> GatewayRequest:
    now = datetime(2026, 11, 22, tzinfo=UTC)
    return GatewayRequest("r", "completions", now, 10.0, qos=GOLD, needs_workers=needs_workers)


def tokenized() -> GatewayRequest:
    request = arrived()
    generation = GenerationRequest(((1, 2, 3),), SamplingParams(max_tokens=8), best_of=2, num_choices=2)
    request.begin_outputs(generation, served_model())
    return request


def refused(request: GatewayRequest) -> GatewayRequest:
    latency, targets = PredictedLatency(3.0, 0.2), AdmissionTargets(1.0, None)
    request.refusal = Refused(GOLD, "ttft", "too late", latency, targets, 1.0)
    return request


def row_of(request: GatewayRequest) -> RequestRow:
    return request_row(request, "m", "rejected", 429, "too late", request.gaps_s, 12.5)


def test_a_row_has_the_figures_of_the_first_output_and_the_gaps_of_all() -> None:
    request = tokenized()
    first, second = (output.progress for output in request.outputs)
    first.qos_class, first.predicted_ttft_s, first.predicted_tbt_s = "gold", 0.7, 0.1
    first.prefill_worker, first.decode_worker, first.queue_s, first.prefill_s = "p0", "d0", 0.2, 0.3
    first.note_tokens([1], 11.0)
    second.note_tokens([1], 11.5)
    second.note_tokens([1], 11.75)
    first.note_drafts([Token(num_drafts=5, num_right_drafts=2)])
    second.note_drafts([Token(num_drafts=1)])
    row = request_row(request, "m", "ok", 200, None, request.gaps_s, 12.5)
    assert (row.qos_class, row.predicted_ttft_s, row.predicted_tbt_s) == ("gold", 0.7, 0.1)
    assert (row.prefill_worker, row.decode_worker, row.queue_s, row.prefill_s) == ("p0", "d0", 0.2, 0.3)
    assert (row.ttft_s, row.mean_tbt_s, row.max_tbt_s, row.e2e_s) == (1.0, 0.25, 0.25, 2.5)
    assert (row.prompt_tokens, row.num_outputs, row.refused_unread) == (3, 2, False)
    assert (row.num_drafts, row.num_right_drafts) == (6, 2)


def test_tokens_that_share_a_message_share_its_wait_but_the_longest_is_whole() -> None:
    request = tokenized()
    first, second = (output.progress for output in request.outputs)
    first.note_tokens([1, 1], 11.0)
    first.note_tokens([1, 1], 12.0)
    second.note_tokens([1, 1], 11.5)
    second.note_tokens([1], 11.75)
    assert request.gaps_s == [0.0, 1.0, 0.0, 0.0, 0.25]
    assert request.shared_gaps_s == [0.0, 0.5, 0.5, 0.0, 0.25]
    row = request_row(request, "m", "ok", 200, None, request.gaps_s, 12.5)
    assert (row.mean_tbt_s, row.max_tbt_s) == (0.25, 1.0)


@pytest.mark.parametrize("request_", [refused(arrived()), refused(tokenized())], ids=["early", "routing"])
def test_a_refused_request_has_the_predictions_that_it_was_refused_by(request_: GatewayRequest) -> None:
    row = row_of(request_)
    assert (row.qos_class, row.predicted_ttft_s, row.predicted_tbt_s) == ("gold", 3.0, 0.2)
    assert row.num_outputs == len(request_.outputs)


@pytest.mark.parametrize(("needs_workers", "qos_class"), [(True, "gold"), (False, None)])
def test_a_bad_request_has_a_class_once_that_matters(needs_workers: bool, qos_class: str | None) -> None:
    row = row_of(arrived(needs_workers=needs_workers))
    assert (row.qos_class, row.predicted_ttft_s, row.prefill_worker, row.finish_reason) == (qos_class, None, None, None)
