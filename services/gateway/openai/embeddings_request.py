"""From a body of /v1/embeddings to what is to be computed: the prompts of a completion without an output."""

from __future__ import annotations

from dataclasses import replace

from halfmoon.pb.types_pb2 import LAST_TOKEN, MEAN, Pooling
from services.gateway.openai.bodies.embeddings_body import EmbeddingsBody
from services.gateway.openai.bodies.schemas import CompletionBody, ComputedBody, TokenizedBody
from services.gateway.openai.generation_request import GenerationRequest, completion_request, with_own_names
from services.gateway.openai.served_model import ServedModel
from services.gateway.replies.embeddings_format import EmbeddingOptions

_SAME = (*ComputedBody.model_fields, *TokenizedBody.model_fields, "user")
_POOLINGS: dict[str, Pooling.ValueType] = {"last": LAST_TOKEN, "mean": MEAN}


def embeddings_request(body: EmbeddingsBody, model: ServedModel, context_tokens: int, salt: bytes) -> GenerationRequest:
    """Tokenizes the inputs. Raises InvalidRequest or ContextLengthExceeded with this endpoint's parameter names."""
    same = {name: getattr(body, name) for name in _SAME}
    completion = CompletionBody.model_construct(prompt=body.input, max_tokens=1, temperature=0.0, **same)
    with with_own_names({"prompt": "input"}):
        generation = completion_request(completion, model, context_tokens, salt)
    generation.sampling.pooling = _POOLINGS[body.pooling or "last"]
    options = EmbeddingOptions(body.normalize is not False, body.dimensions, body.encoding_format == "base64")
    return replace(generation, only_prompt=True, embedding=options)
