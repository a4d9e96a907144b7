"""The base of all body schemas: strict ("5" is not 5, true is not 1, but 5.0 is), and without floods of errors."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

_MAX_NAMES = 96

Item = TypeVar("Item")
Items: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
"""A list that reports only its first invalid item: a body may have a million items."""


class Part(BaseModel):
    """A JSON object in a body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    ignored_names: ClassVar[frozenset[str]] = frozenset()  # which other servers take, and which change no answer

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, value: Any) -> Any:
        """Drops what changes nothing: ignored names, and unknown ones that are null. Takes 16.0 for 16.

        Limits the number of names, since each unknown one would become an error of its own.
        """
        if not isinstance(value, dict):
            return value
        known = cls.model_fields
        if len(value) > _MAX_NAMES:
            first = next(name for name in value if name not in known)
            raise PydanticCustomError("too_many_names", "too many names", {"name": first})
        dropped = [
            name for name, inner in value.items() if name not in known and (inner is None or name in cls.ignored_names)
        ]
        whole = {name: int(inner) for name, inner in value.items() if type(inner) is float and inner.is_integer()}
        return {name: inner for name, inner in (value | whole).items() if name not in dropped}


def at_most_entries(limit: int, value: Any) -> Any:
    """Limits a dict's entries up front: pydantic counts them after collecting the errors of them all."""
    if isinstance(value, dict) and len(value) > limit:
        raise PydanticCustomError("too_long", "at most {max_length}", {"max_length": limit})
    return value


def misplaced(name: str, why: str) -> PydanticCustomError:
    """The error for a field `name` that does not go with the other fields of its object."""
    return PydanticCustomError("misplaced", "{why}", {"name": name, "why": why})
