"""The base class of configuration sections."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of the configuration. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def off_is_a_word(written: Any) -> Any:
    """Converts false back to "off", because YAML reads a bare `off` as false."""
    return "off" if written is False else written
