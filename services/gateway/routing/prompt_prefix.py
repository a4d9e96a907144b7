"""What of a request's prompt is known before it is read whole: how long it is at least, and who has its first blocks.

Of several prompts the first one's: should that be refused, all are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import InvalidRequest
from halfmoon.kv.keys import iter_block_keys, root_key
from halfmoon.policy.values import NOTHING_CACHED
from halfmoon.policy.view.block_index import short_keys
from services.gateway.cluster.membership import Membership
from services.gateway.openai.endpoint_bodies import AnyBody
from services.gateway.openai.prompts import each_prompt, text_of_chat
from services.gateway.openai.responses_body import ResponsesBody
from services.gateway.openai.schemas import CompletionBody
from services.gateway.openai.served_model import PromptPrefix, ServedModel
from services.gateway.openai.tool_use import tool_use_of

_MOST_TOKENS = 2_048  # read for it in one go; who needs more is read whole
_MOST_HELD_TOKENS = 8_192  # more are hashed off the event loop


class KnownTokens:
    """The beginning of a prompt that came as token ids."""

    def __init__(self, token_ids: Sequence[int], model: ServedModel) -> None:
        self.token_ids: list[int] = []
        self._all = token_ids
        self._model = model

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left."""
        return len(self.token_ids) == len(self._all)

    def read_on(self, num_tokens: int) -> None:
        """Raises InvalidRequest for ids that are not in the vocabulary."""
        begin = len(self.token_ids)
        more = self._all[begin : begin + num_tokens]
        self._model.check_token_ids(more, "prompt")
        self.token_ids += more

    def least_tokens(self) -> int:
        """All of them."""
        return len(self._all)


def prompt_prefix_of(body: AnyBody, model: ServedModel, tenant_salt: bytes) -> PromptPrefix | None:
    """None where something is wrong with it: who reads it whole says what."""
    try:
        if isinstance(body, CompletionBody):
            first = each_prompt(body.prompt)[0]
            return (
                model.tokenizer.begin(first, salt=tenant_salt) if isinstance(first, str) else KnownTokens(first, model)
            )
        chat = body.as_chat() if isinstance(body, ResponsesBody) else body
        text = text_of_chat(
            chat.messages,
            model,
            tools=tool_use_of(chat, model).rendered,
            add_generation_prompt=chat.add_generation_prompt is not False,
            template_kwargs=chat.chat_template_kwargs,
        )
    except InvalidRequest:
        return None
    return model.tokenizer.begin(text, with_special=False, salt=tenant_salt)


def held_blocks(beginning: PromptPrefix, membership: Membership, tenant_salt: bytes) -> NDArray[np.int64] | None:
    """How many of the prompt's leading blocks each holder has, as `BlockIndex.match` says it of the whole prompt.

    That counts from the first block to the first one that is missing: once everybody lacks one of those that were read,
    the rest does not matter. None where that takes reading too much.
    """
    layout = membership.kv_layout
    if layout is None:
        return NOTHING_CACHED
    root, num_tokens = root_key(membership.model_fingerprint, layout, tenant_salt), layout.block_tokens
    named: list[bytes] = []  # blocks
    while num_tokens <= _MOST_TOKENS and len(beginning.token_ids) <= _MOST_HELD_TOKENS:
        num_before = len(beginning.token_ids)
        beginning.read_on(num_tokens)
        more = beginning.token_ids[len(named) * layout.block_tokens :]
        named += iter_block_keys(named[-1] if named else root, more, layout.block_tokens)
        keys = short_keys(named)
        depths = membership.index.match(keys)
        if beginning.is_whole or depths.max() < len(keys):
            return np.minimum(depths, (beginning.least_tokens() - 1) // layout.block_tokens)
        if len(beginning.token_ids) == num_before:
            return None
        num_tokens *= 2
    return None
