"""The body of /v1/batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.gateway.openai.bodies.strict_model import Part

_MOST_LABELS = 16

Label = Annotated[str, Field(max_length=512)]


class BatchBody(Part):
    """POST /v1/batches."""

    input_file_id: str = Field(max_length=128, description="a file of purpose batch: one request a line")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"] = Field(
        description="where each line goes"
    )
    completion_window: Literal["24h"] = Field(description="what is not done by then expires")
    metadata: dict[str, Label] | None = Field(None, max_length=_MOST_LABELS, description="returned as it is")
