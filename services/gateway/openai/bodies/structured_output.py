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
    """OpenAI's `response_format`, and what clients of TGI, Together and llama.cpp write there."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="a JSON schema, with any type of JSON")
    value: dict[str, Any] | str | None = Field(None, description="TGI's name of a schema or a pattern")
    pattern: str | None = Field(None, description="with the type regex: the expression for the whole output")

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        given = {"json_schema": self.json_schema, "schema": self.schema_, "value": self.value, "pattern": self.pattern}
        names = [name for name, value in given.items() if value is not None]
        allowed = _FIELDS_OF_FORMATS[self.type]
        if len(names) > 1 or not set(names) <= set(allowed) or (not names and self.type in _NEEDY_FORMATS):
            name = next((name for name in names if name not in allowed), (allowed or names)[0])
            takes = f"takes {' or '.join(allowed)}, one of them" if allowed else "has nothing beside it"
            raise misplaced(name, f"the type {self.type!r} {takes}")
        if self.value is not None and isinstance(self.value, str) != (self.type == "regex"):
            raise misplaced("value", "a schema is an object, a pattern is a text")
        return self

    @property
    def any_schema(self) -> dict[str, Any] | None:
        """The JSON schema under any of its names; None: any object."""
        wrapped = None if self.json_schema is None else self.json_schema.schema_
        return next((one for one in (self.schema_, self.value, wrapped) if isinstance(one, dict)), None)

    @property
    def any_pattern(self) -> str | None:
        """The regular expression under either of its names."""
        return self.pattern if self.pattern is not None else (self.value if isinstance(self.value, str) else None)


_FIELDS_OF_FORMATS = {
    "text": (),
    "json_object": ("schema", "value"),
    "json_schema": ("json_schema", "schema"),
    "json": ("schema", "value"),
    "regex": ("pattern", "value"),
}
_NEEDY_FORMATS = ("json_schema", "json", "regex")


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
