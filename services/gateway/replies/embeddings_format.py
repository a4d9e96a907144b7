"""The response of /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from halfmoon.errors import InvalidRequest
from services.gateway.replies.reply_format import Output, Usage

EmbeddingOf = Callable[[int], Sequence[float]]
"""Returns what the worker made of a prompt, once it is computed."""


class EmbeddingOptions(NamedTuple):
    """What is made of the workers' values."""

    is_normalized: bool
    dimensions: int | None  # None: all
    is_base64: bool


class EmbeddingsFormat:
    """Writes one vector for each prompt."""

    def __init__(self, head: Mapping[str, Any], options: EmbeddingOptions, embedding_of: EmbeddingOf) -> None:
        """`head`: id, time and model, as vLLM's responses have them, beside OpenAI's model."""
        self._head = head
        self._options = options
        self._embedding_of = embedding_of

    def whole(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The response. Raises InvalidRequest if more dimensions are asked for than there are."""
        data = [
            {"object": "embedding", "index": output.index, "embedding": self._shown(self._embedding_of(output.index))}
            for output in outputs
        ]
        counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return {**self._head, "object": "list", "data": data, "usage": counts}

    def _shown(self, embedding: Sequence[float]) -> str | list[float]:
        values = np.asarray(embedding, dtype="<f4")
        if self._options.dimensions is not None:
            if self._options.dimensions > len(values):
                raise InvalidRequest(f"dimensions: the model has {len(values)}", param="dimensions")
            values = values[: self._options.dimensions]
        if self._options.is_normalized:
            values = values / max(float(np.linalg.norm(values)), 1e-12)
        return base64.b64encode(values.tobytes()).decode() if self._options.is_base64 else values.tolist()
