"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from services.gateway.openai.bodies.messages import Message, RenderedChat
from services.gateway.openai.bodies.strict_model import Items, Part
from services.gateway.openai.bodies.tools import Tools

_MAX_TOKENS = 2_000_000
_MAX_MESSAGES = 10_000


class TokenizeBody(RenderedChat):
    """POST /tokenize: a prompt or messages."""

    model: str | None = Field(None, description="name of the served model; optional")
    prompt: str | None = Field(None, description="a text; alternatively send messages")
    messages: Annotated[Items[Message], Field(min_length=1, max_length=_MAX_MESSAGES)] | None = Field(
        None, description="rendered by the model's chat template"
    )
    tools: Tools | None = Field(None, description="with messages: given to the chat template")
    add_special_tokens: bool | None = Field(None, description="with a prompt: the tokenizer's special tokens around it")
    return_token_strs: bool | None = Field(None, description="adds the tokens as written in the vocabulary")


class DetokenizeBody(Part):
    """POST /detokenize."""

    model: str | None = Field(None, description="name of the served model; optional")
    tokens: Annotated[Items[int], Field(max_length=_MAX_TOKENS)] = Field(description="token ids")
