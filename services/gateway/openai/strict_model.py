"""How every object of a body is read: strictly ("5" is not 5, true is not 1), and without floods of errors."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

_MAX_NAMES = 96

Item = TypeVar("Item")
Items: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose first wrong item is the only one reported: a body may hold a million of them."""


class Part(BaseModel):
    """An object of a body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_a_flood_of_names(cls, found: Any) -> Any:
        """Each unknown name would become an error of its own."""
        if isinstance(found, dict) and len(found) > _MAX_NAMES:
            first = next(name for name in found if name not in cls.model_fields)
            raise PydanticCustomError("too_many_names", "too many names", {"name": first})
        return found


def at_most_entries(limit: int, found: Any) -> Any:
    """pydantic itself counts a dict's entries after it has collected the errors of them all."""
    if isinstance(found, dict) and len(found) > limit:
        raise PydanticCustomError("too_long", "at most {max_length}", {"max_length": limit})
    return found


def misplaced(name: str, why: str) -> PydanticCustomError:
    """The error of a field `name` that does not go with the others of its object."""
    return PydanticCustomError("misplaced", "{why}", {"name": name, "why": why})
