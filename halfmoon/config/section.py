"""The base class of configuration sections."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A frozen part of the configuration. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def off_is_a_word(written: Any) -> Any:
    """Converts false back to "off", because YAML reads a bare `off` as false."""
    return "off" if written is False else written


def _one_or_more(written: Any) -> Any:
    return written if written is None or isinstance(written, list | tuple) else [written]


Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_one_or_more)]
"""Several texts, none of them empty; one alone needs no list."""
