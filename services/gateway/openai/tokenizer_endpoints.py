"""/tokenize and /detokenize: the model's tokenizer on texts, messages and token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from halfmoon.errors import InvalidRequest
from halfmoon.policy.admission.tenants import kv_salt
from halfmoon.policy.placement.place import ContextLengthExceeded
from services.gateway.cluster.membership import Membership
from services.gateway.http.api_keys import tenant_of
from services.gateway.http.rate_limits import RateLimits
from services.gateway.http.received_request import receive_body
from services.gateway.openai.bodies.anthropic_body import CountedBody
from services.gateway.openai.bodies.messages import RenderedChat
from services.gateway.openai.bodies.parse_body import parse_request
from services.gateway.openai.bodies.tokenizer_bodies import DetokenizeBody, TokenizeBody
from services.gateway.openai.generation_request import max_values
from services.gateway.openai.prompts import chat_prompt, refuse_hopeless, text_of_chat
from services.gateway.openai.served_model import ServedModel
from services.gateway.openai.tokenizer_threads import TokenizerThreads
from services.gateway.openai.tooling.tool_use import tool_format_of, tool_use_of, with_tools_shown

Body = TypeVar("Body", TokenizeBody, CountedBody, DetokenizeBody)

_SLOW_BODY_BYTES = 4_096  # longer bodies are handled off the event loop
_MOST_CONTEXTS = 2  # as long as a text may be


class TokenizerEndpoints:
    """Serves the tokenizer. Owns nothing."""

    def __init__(
        self,
        model: ServedModel,
        membership: Membership,
        threads: TokenizerThreads,
        limits: RateLimits,
        *,
        is_cache_shared: bool,
    ) -> None:
        self._model = model
        self._membership = membership
        self._threads = threads
        self._limits = limits
        self._is_cache_shared = is_cache_shared  # among tenants

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize. Raises InvalidRequest or UnknownModel."""
        salt = kv_salt(tenant_of(request), None, is_shared=self._is_cache_shared)
        return await self._respond(request, TokenizeBody, partial(self._tokenized, salt=salt))

    async def count(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens. Raises InvalidRequest or UnknownModel."""
        salt = kv_salt(tenant_of(request), None, is_shared=self._is_cache_shared)
        return await self._respond(request, CountedBody, partial(self._counted, salt=salt))

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize. Raises InvalidRequest or UnknownModel."""
        return await self._respond(request, DetokenizeBody, self._detokenized)

    async def info(self, request: web.Request) -> web.Response:
        """GET /tokenizer_info, as of vLLM: the checkpoint's tokenizer_config.json, and the chat template."""
        return web.json_response(self._model.tokenizer_config)

    async def _respond(
        self, request: web.Request, schema: type[Body], handle: Callable[[Body, ServedModel], dict[str, Any]]
    ) -> web.Response:
        self._limits.take_request(tenant_of(request))
        raw = await receive_body(request)
        model = replace(self._model, tenant=tenant_of(request).name)

        def parse(model: ServedModel) -> Body:
            return parse_request(schema, raw, max_values(self._context_tokens)).body

        is_long, threads = len(raw) > _SLOW_BODY_BYTES, self._threads
        body = await threads.run(parse, model, len(raw)) if is_long else parse(model)
        self._check_name(body.model)
        waits = isinstance(body, TokenizeBody) and body.chat_template is not None
        if is_long or waits:
            return web.json_response(await threads.run(partial(handle, body), model, len(raw), waits=waits))
        return web.json_response(handle(body, model))

    def _tokenized(self, body: TokenizeBody, model: ServedModel, *, salt: bytes) -> dict[str, Any]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        if body.prompt is not None:
            _refuse_with_prompt(body)
            text, param, with_special = body.prompt, "prompt", body.add_special_tokens is not False
        else:
            text, param, with_special = _text_of_chat(body, model), "messages", False
        encode = partial(model.tokenizer.encode, salt=salt)
        refuse_hopeless(text, encode, self._context_tokens, param)
        token_ids = encode(text, with_special=with_special)
        names = [model.tokenizer.token_name(token_id) for token_id in token_ids] if body.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": self._context_tokens,
            "tokens": token_ids,
            "token_strs": names,
        }

    def _counted(self, body: CountedBody, model: ServedModel, *, salt: bytes) -> dict[str, Any]:
        chat = body.as_chat()
        use = tool_use_of(chat, model)
        prompt = chat_prompt(chat, use.messages, model, self._context_tokens, salt=salt, tools=use.rendered)
        return {"input_tokens": len(prompt.token_ids)}

    def _detokenized(self, body: DetokenizeBody, model: ServedModel) -> dict[str, Any]:
        if len(body.tokens) > _MOST_CONTEXTS * self._context_tokens:
            message = f"the context length is {self._context_tokens} tokens, there are {len(body.tokens)}; send fewer"
            raise ContextLengthExceeded(message, param="tokens")
        model.check_token_ids(body.tokens, "tokens")
        return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    def _check_name(self, name: str | None) -> None:
        if name is not None:
            self._model.check_name(name)

    @property
    def _context_tokens(self) -> int:
        return self._membership.context_tokens(self._model.context_tokens)


def _text_of_chat(body: TokenizeBody, model: ServedModel) -> str:
    if body.add_special_tokens:
        message = "add_special_tokens: the chat template writes all special tokens; leave it out with messages"
        raise InvalidRequest(message, param="add_special_tokens")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    shown = with_tools_shown(body.messages or (), tools, tool_format_of(body, model))
    return text_of_chat(body, shown.messages, model, shown.rendered)


def _refuse_with_prompt(body: TokenizeBody) -> None:
    for name in (*RenderedChat.model_fields, "tools"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} goes with messages; leave it out with a prompt", param=name)
