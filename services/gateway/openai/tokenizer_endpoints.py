"""/tokenize and /detokenize: the model's tokenizer on texts, messages and token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from halfmoon.errors import InvalidRequest
from halfmoon.policy.admission.tenants import kv_salt
from services.gateway.cluster.membership import Membership
from services.gateway.http.api_keys import tenant_of
from services.gateway.http.received_request import receive_body
from services.gateway.openai.generation_request import max_values
from services.gateway.openai.messages import Message, TemplateKwargs
from services.gateway.openai.parse_body import parse_body
from services.gateway.openai.served_model import ServedModel
from services.gateway.openai.strict_model import Items, Part
from services.gateway.openai.tools import Tools

_SLOW_BODY_BYTES = 4_096  # longer bodies are handled off the event loop
_MAX_TOKENS = 2_000_000
_MAX_MESSAGES = 10_000


class TokenizeBody(Part):
    """POST /tokenize: a prompt or messages."""

    model: str | None = Field(None, description="name of the served model; optional")
    prompt: str | None = Field(None, description="a text; alternatively send messages")
    messages: Annotated[Items[Message], Field(min_length=1, max_length=_MAX_MESSAGES)] | None = Field(
        None, description="rendered by the model's chat template"
    )
    tools: Tools | None = Field(None, description="with messages: given to the chat template")
    add_special_tokens: bool | None = Field(None, description="with a prompt: the tokenizer's special tokens around it")
    add_generation_prompt: bool | None = Field(
        None, description="with messages: the assistant's header at the end; default true"
    )
    chat_template_kwargs: TemplateKwargs | None = Field(None, description="variables of the chat template")
    return_token_strs: bool | None = Field(None, description="adds the tokens as written in the vocabulary")


class DetokenizeBody(Part):
    """POST /detokenize."""

    model: str | None = Field(None, description="name of the served model; optional")
    tokens: Annotated[Items[int], Field(max_length=_MAX_TOKENS)] = Field(description="token ids")


class TokenizerEndpoints:
    """Serves the tokenizer. Owns nothing."""

    def __init__(self, model: ServedModel, membership: Membership, *, is_cache_shared: bool) -> None:
        self._model = model
        self._membership = membership
        self._is_cache_shared = is_cache_shared  # among tenants

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize. Raises InvalidRequest or UnknownModel."""
        salt = kv_salt(tenant_of(request), None, is_shared=self._is_cache_shared)
        return await self._respond(request, partial(self._tokenized, salt=salt))

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize. Raises InvalidRequest or UnknownModel."""
        return await self._respond(request, self._detokenized)

    async def _respond(self, request: web.Request, handle: Callable[[bytes], dict[str, Any]]) -> web.Response:
        raw = await receive_body(request)
        slow = len(raw) > _SLOW_BODY_BYTES
        return web.json_response(await asyncio.to_thread(handle, raw) if slow else handle(raw))

    def _tokenized(self, raw: bytes, salt: bytes) -> dict[str, Any]:
        body = parse_body(TokenizeBody, raw, max_values(self._context_tokens))
        self._check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        tokenizer = self._model.tokenizer
        if body.prompt is not None:
            _refuse_with_prompt(body)
            token_ids = tokenizer.encode(body.prompt, with_special=body.add_special_tokens is not False, salt=salt)
        else:
            token_ids = self._chat_tokens(body, salt)
        names = [tokenizer.token_name(token_id) for token_id in token_ids] if body.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": self._context_tokens,
            "tokens": token_ids,
            "token_strs": names,
        }

    def _chat_tokens(self, body: TokenizeBody, salt: bytes) -> list[int]:
        if body.add_special_tokens:
            message = "add_special_tokens: the chat template writes all special tokens; leave it out with messages"
            raise InvalidRequest(message, param="add_special_tokens")
        text = self._model.tokenizer.render_chat(
            [message.for_template() for message in body.messages or ()],
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None,
            add_generation_prompt=body.add_generation_prompt is not False,
            template_kwargs=body.chat_template_kwargs,
        )
        return self._model.tokenizer.encode(text, with_special=False, salt=salt)

    def _detokenized(self, raw: bytes) -> dict[str, Any]:
        body = parse_body(DetokenizeBody, raw, _MAX_TOKENS + max_values(0))
        self._check_name(body.model)
        self._model.check_token_ids(body.tokens, "tokens")
        return {"prompt": self._model.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    def _check_name(self, name: str | None) -> None:
        if name is not None:
            self._model.check_name(name)

    @property
    def _context_tokens(self) -> int:
        return self._membership.context_tokens(self._model.context_tokens)


def _refuse_with_prompt(body: TokenizeBody) -> None:
    for name in ("add_generation_prompt", "chat_template_kwargs", "tools"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} goes with messages; leave it out with a prompt", param=name)
