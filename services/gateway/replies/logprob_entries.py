"""Log-probabilities of tokens, in the form of chats and responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfmoon.pb.types_pb2 import Token
from services.gateway.replies.reply_format import ReplyOptions, token_name
from services.gateway.replies.text_stream import Decodes

_REPLACEMENT = "\ufffd"


def logprob_entries(tokens: Sequence[Token], tokenizer: Decodes, options: ReplyOptions) -> list[dict[str, Any]]:
    """One entry a token, with the likeliest alternatives."""
    return [
        {
            **_entry(token.token_id, token.logprob, tokenizer, options),
            "top_logprobs": [_entry(top.token_id, top.logprob, tokenizer, options) for top in token.top_logprobs],
        }
        for token in tokens
    ]


def _entry(token_id: int, logprob: float, tokenizer: Decodes, options: ReplyOptions) -> dict[str, Any]:
    text = tokenizer.decode([token_id])
    content = tokenizer.part_bytes(token_id) if _REPLACEMENT in text else text.encode()
    name = token_name(text, token_id, options)
    return {"token": name, "logprob": logprob, "bytes": None if content is None else list(content)}
