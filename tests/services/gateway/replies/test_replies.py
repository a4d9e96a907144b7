"""Prepared events, and the choice of the best outputs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.pb.types_pb2 import Token
from services.gateway.replies.chat_format import ChatFormat
from services.gateway.replies.completion_format import CompletionFormat
from services.gateway.replies.replies import TextEvents, best_outputs
from services.gateway.replies.reply_format import Output, ReplyFormat, ReplyOptions, Usage
from services.gateway.replies.sse_body import sse
from services.gateway.replies.text_stream import TextPiece
from tests.services.gateway.fakes import ByteTokenizer


def format_of(kind: type[ChatFormat] | type[CompletionFormat], options: ReplyOptions, model: str = "m") -> ReplyFormat:
    return kind("id", model, 7, ByteTokenizer(), options, [])


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
@pytest.mark.parametrize("usage", ["none", "last"])
@given(text=st.text(min_size=1), index=st.integers(0, 3), model=st.text())
def test_a_prepared_event_is_the_event(kind: Any, usage: Any, text: str, index: int, model: str) -> None:
    reply_format = format_of(kind, ReplyOptions(usage=usage), model)
    assert reply_format.repeats
    events = TextEvents(reply_format)
    for content in (text, text[::-1]):
        (chunk,) = reply_format.chunks(index, TextPiece(content, (Token(token_id=5),), None))
        assert events.of(index, content) == sse(reply_format.frame(chunk, lambda: Usage(1, 2, 3)))


@pytest.mark.parametrize(
    "options", [ReplyOptions(logprobs=True), ReplyOptions(token_ids=True), ReplyOptions(usage="running")]
)
@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_what_changes_is_not_prepared(kind: Any, options: ReplyOptions) -> None:
    assert not format_of(kind, options).repeats


def piece(*logprobs: float) -> TextPiece:
    return TextPiece("", tuple(Token(logprob=logprob) for logprob in logprobs), "stop")


def test_the_best_outputs_of_each_prompt_have_the_highest_mean_logprob() -> None:
    low, high, middle = piece(-3.0, -1.0), piece(-0.5), piece(-1.0, -1.0)
    outputs = best_outputs([low, high, middle, high, middle, low], num_choices=2, best_of=3)
    assert outputs == [Output(0, high), Output(1, middle), Output(2, high), Output(3, middle)]


def test_all_outputs_keep_their_order() -> None:
    pieces = [piece(-2.0), piece(-1.0)]
    assert best_outputs(pieces, num_choices=2, best_of=2) == [Output(0, pieces[0]), Output(1, pieces[1])]
