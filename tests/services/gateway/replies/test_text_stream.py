"""Tokens to text."""

from __future__ import annotations

from halfmoon.pb.types_pb2 import LENGTH, STOP
from services.gateway.replies.text_stream import TextStream
from tests.services.gateway.fakes import EOS, ByteDetokenizer, token


def test_text_of_tokens() -> None:
    stream = TextStream(ByteDetokenizer(), ["STOP"])
    piece = stream.push([token(0, ord("a")), token(1, ord("S"))])
    assert (piece.text, piece.finish_reason, len(piece.content)) == ("a", None, 2)
    piece = stream.push([token(2, ord("T")), token(3, EOS, STOP)])
    assert (piece.text, piece.finish_reason, len(piece.content)) == ("ST", "stop", 1)
    assert stream.num_tokens == 4


def test_text_cut_off_inside_a_character() -> None:
    stream = TextStream(ByteDetokenizer(), [])
    assert stream.push([token(0, 0xC3, LENGTH)]).text == "\ufffd"
    assert stream.finish_reason == "length"


def test_a_stop_string_ends_nothing_within_the_least_tokens() -> None:
    stream = TextStream(ByteDetokenizer(), ["bc"], min_tokens=3)
    piece = stream.push([token(i, ord(letter)) for i, letter in enumerate("bcabcd")])  # begun within them
    assert (piece.text, piece.finish_reason, piece.stop_reason, stream.num_tokens) == ("bca", "stop", "bc", 5)
    stream = TextStream(ByteDetokenizer(), ["bc"], min_tokens=3)
    piece = stream.push([token(0, ord("a")), token(1, ord("b")), token(2, ord("c"), LENGTH)])
    assert (piece.text, piece.finish_reason, piece.stop_reason) == ("abc", "length", None)


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    stream = TextStream(ByteDetokenizer(), ["b"])
    piece = stream.push([token(i, ord(letter)) for i, letter in enumerate("abc")])
    assert (piece.text, piece.finish_reason, stream.num_tokens) == ("a", "stop", 2)
