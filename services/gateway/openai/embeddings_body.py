"""The body of /v1/embeddings, and the completion that computes the same prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from halfmoon.pb.types_pb2 import LAST_TOKEN, MEAN, Pooling
from services.gateway.openai.generation_request import GenerationRequest, completion_request, with_own_names
from services.gateway.openai.schemas import CompletionBody, ComputedBody, Prompt, TokenizedBody
from services.gateway.openai.served_model import ServedModel
from services.gateway.replies.embeddings_format import EmbeddingOptions

_SAME = (*ComputedBody.model_fields, *TokenizedBody.model_fields, "user")
_POOLINGS: dict[str, Pooling.ValueType] = {"last": LAST_TOKEN, "mean": MEAN}


class EmbeddingsBody(ComputedBody, TokenizedBody):
    """POST /v1/embeddings."""

    input: Prompt = Field(description="text or token ids, one input or several")
    pooling: Literal["last", "mean"] | None = Field(
        None, description="what is taken of the last layer: that of the last token (default), or the mean of all"
    )
    normalize: bool | None = Field(None, description="false: the vector's length is not made 1")
    dimensions: int | None = Field(None, ge=1, le=65_536, description="only so many leading values, then normalized")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of the values as float32, little-endian"
    )
    user: str | None = Field(None, description="a label for the log")


def embeddings_request(body: EmbeddingsBody, model: ServedModel, context_tokens: int, salt: bytes) -> GenerationRequest:
    """Tokenizes the inputs. Raises InvalidRequest or ContextLengthExceeded with this endpoint's parameter names."""
    same = {name: getattr(body, name) for name in _SAME}
    completion = CompletionBody.model_construct(prompt=body.input, max_tokens=1, temperature=0.0, **same)
    with with_own_names({"prompt": "input"}):
        generation = completion_request(completion, model, context_tokens, salt)
    generation.sampling.pooling = _POOLINGS[body.pooling or "last"]
    options = EmbeddingOptions(body.normalize is not False, body.dimensions, body.encoding_format == "base64")
    return replace(generation, only_prompt=True, embedding=options)
