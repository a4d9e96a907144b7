"""A part of the configuration."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, and strict about names: an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def off_is_a_word(written: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if written is False else written
