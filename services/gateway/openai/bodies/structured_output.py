"""Structured output, as bodies ask for it: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from services.gateway.openai.bodies.strict_model import Items, Part, misplaced

_MAX_CHOICES = 1_000


class JsonSchema(Part):
    """`response_format.json_schema`."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="a JSON schema; without it, any object")
    strict: bool | None = Field(None, description="ignored: the output always follows the schema strictly")


class ResponseFormat(Part):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise misplaced("json_schema", "it goes with the type 'json_schema', and only with that")
        return self


class StructuredOutputs(Part):
    """vLLM's `structured_outputs`: one of the first five fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = Field(None, description="any JSON object")
    regex: str | None = Field(None, description="a regular expression (Rust's syntax) for the whole output")
    choice: Annotated[Items[str], Field(min_length=1, max_length=_MAX_CHOICES)] | None = None
    grammar: str | None = Field(None, description="Lark or GBNF")
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_fallback: bool | None = Field(None, description="there is none")
    disable_any_whitespace: bool | None = Field(None, description="true: a JSON object is written on one line")
    disable_additional_properties: bool | None = Field(
        None, description="false: objects may have properties that the schema does not name"
    )
