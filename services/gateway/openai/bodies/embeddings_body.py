"""The body of /v1/embeddings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.gateway.openai.bodies.schemas import ComputedBody, Prompt, TokenizedBody


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
