"""What is known of a prompt before it is tokenized as a whole: a lower bound of its length, and which workers have its
first blocks.

With several prompts, the first one is looked at: if it is refused, all are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import InvalidRequest
from halfmoon.policy.values import NOTHING_CACHED
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.prompt_keys import PromptKeys
from services.gateway.openai.bodies.anthropic_body import MessagesBody
from services.gateway.openai.bodies.embeddings_body import EmbeddingsBody
from services.gateway.openai.bodies.responses_body import ResponsesBody
from services.gateway.openai.bodies.schemas import ChatBody, CompletionBody
from services.gateway.openai.endpoint_bodies import AnyBody
from services.gateway.openai.prompts import each_prompt, text_of_chat
from services.gateway.openai.served_model import PromptPrefix, ServedModel
from services.gateway.openai.tooling.tool_use import tool_use_of

_MAX_READ_TOKENS = 2_048  # read in one go; a prompt that needs more is tokenized as a whole
_MAX_PREFIX_TOKENS = 8_192  # a longer prefix would have to be hashed off the event loop


class KnownTokens:
    """The prefix of a prompt that came as token ids."""

    def __init__(self, token_ids: Sequence[int], model: ServedModel) -> None:
        self.token_ids: list[int] = []
        self._all = token_ids
        self._model = model

    @property
    def is_whole(self) -> bool:
        """Whether all tokens have been read."""
        return len(self.token_ids) == len(self._all)

    def read_on(self, num_tokens: int) -> None:
        """Reads more tokens. Raises InvalidRequest for ids outside the vocabulary."""
        start = len(self.token_ids)
        more = self._all[start : start + num_tokens]
        self._model.check_token_ids(more, "prompt")
        self.token_ids += more

    def least_tokens(self) -> int:
        """The length of the prompt, which is known."""
        return len(self._all)


def prompt_prefix_of(body: AnyBody, model: ServedModel, tenant_salt: bytes) -> PromptPrefix | None:
    """The prefix of a body's first prompt; None if it may be cut, or takes long.

    Also None for one that is invalid, which tokenization reports.
    """
    if isinstance(body, EmbeddingsBody):
        return None
    body = body.as_chat() if isinstance(body, ResponsesBody | MessagesBody) else body
    if body.truncate_prompt_tokens is not None or (isinstance(body, ChatBody) and body.chat_template is not None):
        return None
    begin = partial(model.tokenizer.begin, salt=tenant_salt)
    try:
        if isinstance(body, CompletionBody):
            first = each_prompt(body.prompt)[0]
            if not isinstance(first, str):
                return KnownTokens(first, model)
            return begin(first, with_special=body.add_special_tokens is not False)
        use = tool_use_of(body, model)
        text = text_of_chat(body, use.messages, model, use.rendered)
    except InvalidRequest:
        return None
    return begin(text, with_special=bool(body.add_special_tokens))


def held_blocks(prefix: PromptPrefix, membership: Membership, tenant_salt: bytes) -> NDArray[np.int64] | None:
    """How many of the prompt's leading blocks each holder has: what `BlockIndex.match` returns for the whole prompt.

    A match ends at the first missing block: once every holder lacks a block that was read, the rest does not matter.
    None if too much would have to be read.
    """
    layouts = membership.kv_layouts
    if not layouts:
        return NOTHING_CACHED
    named = PromptKeys(membership.model_fingerprint, layouts, tenant_salt)
    num_tokens = block_tokens = layouts[0].block_tokens
    while num_tokens <= _MAX_READ_TOKENS and len(prefix.token_ids) <= _MAX_PREFIX_TOKENS:
        num_before = len(prefix.token_ids)
        prefix.read_on(num_tokens)
        named.extend(prefix.token_ids)
        cached_blocks = named.held(membership.index)
        if prefix.is_whole or cached_blocks.max() < len(prefix.token_ids) // block_tokens:
            return np.minimum(cached_blocks, (prefix.least_tokens() - 1) // block_tokens)
        if len(prefix.token_ids) == num_before:
            return None
        num_tokens *= 2
    return None
