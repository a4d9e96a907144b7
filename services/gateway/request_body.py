"""From bytes to a body that is right in itself. Everything wrong is an InvalidRequest that names the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from halfmoon.errors import InvalidRequest
from services.gateway.schemas import NEUTRAL_VALUES

Body = TypeVar("Body", bound=BaseModel)

_TYPE_TAGS = frozenset({"str", "int", "float", "bool", "none"})  # pydantic's names for a union's branches


def parse_body(schema: type[Body], raw: bytes) -> Body:
    """The body of a request. Raises InvalidRequest."""
    try:
        found = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest("the body must be a JSON object")
    supported = {name: value for name, value in found.items() if not _is_neutral(name, value)}
    try:
        return schema.model_validate(supported)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_input=False)) from error


def _is_neutral(name: str, value: Any) -> bool:
    if name not in NEUTRAL_VALUES:
        return False
    neutral = NEUTRAL_VALUES[name]
    if value is None or any(type(value) is type(one) and value == one for one in neutral):
        return True
    only = f" (only {', '.join(map(repr, neutral))})" if neutral else ""
    raise InvalidRequest(f"{name}: this value is not supported{only}", param=name)


def _invalid(errors: Sequence[ErrorDetails]) -> InvalidRequest:
    """Of several errors the first; of a union's branches the one that got furthest into the value."""
    same = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    error = max(same, key=lambda one: len(_path(one["loc"])))
    param = _path(error["loc"])
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in param).lstrip(".")
    match error["type"]:
        case "extra_forbidden":
            message = f"unknown parameter: {name}"
        case "missing":
            message = f"missing parameter: {name}"
        case _:
            message = f"{name}: {error['msg'][:1].lower()}{error['msg'][1:]}"
    return InvalidRequest(message, param=name or None)


def _path(location: Sequence[int | str]) -> list[int | str]:
    return [part for part in location if isinstance(part, int) or (part.isidentifier() and part not in _TYPE_TAGS)]
