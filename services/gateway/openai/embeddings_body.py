"""The body of /v1/embeddings, and the completion that computes the same prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from halfmoon.pb.types_pb2 import LAST_TOKEN, MEAN, Pooling
from services.gateway.openai.generation_request import GenerationRequest, completion_request, with_own_names
from services.gateway.openai.schemas import CompletionBody, Prompt
from services.gateway.openai.served_model import ServedModel
from services.gateway.openai.strict_model import Part
from services.gateway.replies.embeddings_format import EmbeddingOptions

_POOLINGS: dict[str, Pooling.ValueType] = {"last": LAST_TOKEN, "mean": MEAN}


class EmbeddingsBody(Part):
    """POST /v1/embeddings."""

    model: str | None = Field(None, description="name of the served model, as in /v1/models; optional")
    input: Prompt = Field(description="text or token ids, one input or several")
    pooling: Literal["last", "mean"] | None = Field(
        None, description="what is taken of the last layer: that of the last token (default), or the mean of all"
    )
    normalize: bool | None = Field(None, description="false: the vector's length is not made 1")
    dimensions: int | None = Field(None, ge=1, le=65_536, description="only so many leading values, then normalized")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of the values as float32, little-endian"
    )
    add_special_tokens: bool | None = Field(
        None, description="the tokenizer's special tokens around an input of text; default true"
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="a longer input is cut to this many tokens; -1: to what the context holds"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="which end of the input is cut off; default left"
    )
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="smaller goes first; default 0")
    user: str | None = Field(None, description="a label for the log")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="KV is shared only among requests of the same salt"
    )


def embeddings_request(body: EmbeddingsBody, model: ServedModel, context_tokens: int, salt: bytes) -> GenerationRequest:
    """Tokenizes the inputs. Raises InvalidRequest or ContextLengthExceeded with this endpoint's parameter names."""
    same = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side", "priority", "user")
    completion = CompletionBody.model_construct(
        prompt=body.input, max_tokens=1, temperature=0.0, **{name: getattr(body, name) for name in same}
    )
    with with_own_names({"prompt": "input"}):
        generation = completion_request(completion, model, context_tokens, salt)
    generation.sampling.pooling = _POOLINGS[body.pooling or "last"]
    options = EmbeddingOptions(body.normalize is not False, body.dimensions, body.encoding_format == "base64")
    return replace(generation, only_prompt=True, embedding=options)
