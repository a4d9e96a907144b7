"""The base class of configuration sections."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationInfo, field_validator


class Section(BaseModel):
    """A frozen part of the configuration. An unknown field is an error, and so is true where a number belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_for_a_number(cls, written: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(written, bool) and field is not None and _is_numeric(field.annotation):
            raise ValueError(f"must be a number, not {str(written).lower()}")
        return written


def _is_numeric(annotation: Any) -> bool:
    """Whether numbers are among what a field takes: they would take true for 1."""
    is_wrapped = get_origin(annotation) in (Annotated, Union, UnionType)
    return annotation in (int, float, ByteSize) or (is_wrapped and any(map(_is_numeric, get_args(annotation))))


def off_is_a_word(written: Any) -> Any:
    """Converts false back to "off", because YAML reads a bare `off` as false."""
    return "off" if written is False else written


def _one_or_more(written: Any) -> Any:
    return written if written is None or isinstance(written, list | tuple) else [written]


Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_one_or_more)]
"""Several texts, none of them empty; one alone needs no list."""
