"""Reads a configuration file, applies flags to it, and reports each mistake with its place and a remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from halfmoon.errors import InvalidRequest
from halfmoon.policy.view.worker_view import ROLES
from halfmoon.up.config.system_config import SystemConfig
from halfmoon.yaml_text import parsed_yaml

Loc = Sequence[int | str]

_MESSAGES: Mapping[str, str] = {  # by pydantic's type of mistake, where its own words name Python's types
    "string_type": "must be a text",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "byte_size": "must be a size, such as 512MiB or 2GiB",
    "byte_size_unit": "must be a size, such as 512MiB or 2GiB",
}


class Override(NamedTuple):
    """One value that replaces the file's."""

    path: str  # such as gateway.port
    value: Any
    source: str  # such as --port


def read_config(path: Path | None, overrides: Sequence[Override] = ()) -> SystemConfig:
    """Reads the file and applies the overrides; without a file it starts from the defaults.

    Raises InvalidRequest with a line for each mistake.
    """
    text = "" if path is None else _read(path)
    return parse_config(text, "the configuration" if path is None else str(path), overrides)


def parse_config(text: str, name: str, overrides: Sequence[Override] = ()) -> SystemConfig:
    """Parses a file's text; `name` appears in errors. Raises InvalidRequest."""
    try:
        written, root = parsed_yaml(text)
    except yaml.YAMLError as error:
        raise InvalidRequest(f"{name} is not YAML: {error}", param="config") from error
    if written is None:
        written = {}
    if not isinstance(written, dict):
        raise InvalidRequest(f"{name} has to be a mapping, such as `model: demo`", param="config")
    for override in overrides:
        _put(written, override)
    try:
        return SystemConfig.model_validate(written)
    except ValidationError as error:
        sources = {override.path: override.source for override in overrides}
        raise InvalidRequest("\n".join(_mistakes(error, name, root, sources)), param="config") from error


def dotted(loc: Loc) -> str:
    """Formats a place in the file, such as workers.prefill[0].device."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the configuration {path} cannot be read: {error}", param="config") from error


def _put(written: dict[str, Any], override: Override) -> None:
    *parents, last = override.path.split(".")
    section = written
    for name in parents:
        inner = section.get(name)
        if name == "model" and isinstance(inner, str):
            inner = {"path": inner}
        section[name] = inner = {} if inner is None else inner
        if not isinstance(inner, dict):
            raise InvalidRequest(
                f"{override.source} cannot be applied to {name!r}, which is not a mapping", param="config"
            )
        section = inner
    if parents == ["workers", "all"]:
        _drop_from_roles(written["workers"], last)
    section[last] = override.value


def _drop_from_roles(workers: dict[str, Any], name: str) -> None:
    """Removes a field from the roles, because a flag for all workers overrides the file's value for some."""
    for role in ROLES:
        groups = workers.get(role)
        for group in [groups] if isinstance(groups, dict) else groups or ():
            if isinstance(group, dict):
                group.pop(name, None)


def _mistakes(error: ValidationError, name: str, root: yaml.Node | None, sources: Mapping[str, str]) -> Iterator[str]:
    for problem in error.errors():
        loc = problem["loc"]
        place = dotted(loc)
        message = _MESSAGES.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = f"unknown field; {_known_names(loc)}"
        line = _line(root, loc)
        source = _source(place, message, sources, line is not None)
        where = name if line is None else f"{name}:{line}"
        yield f"{source}: {message}" if source else ": ".join(part for part in (where, place, message) if part)


def _source(place: str, message: str, sources: Mapping[str, str], is_in_file: bool) -> str | None:
    """Returns what wrote the value at a place, or its parts (those that the message names); None for the file."""
    for path, source in sources.items():
        if place == path or place.startswith(f"{path}["):
            return source
        if place.startswith(f"{path}."):
            return f"{source}: {place}"
    if not place or is_in_file:
        return None
    parts = {path.rpartition(".")[2]: source for path, source in sources.items() if path.startswith(f"{place}.")}
    named = [source for name, source in parts.items() if re.search(rf"\b{name}\b", message)]
    return f"{', '.join(named or parts.values())}: {place}" if parts else None


def _known_names(loc: Loc) -> str:
    names = list(_section(loc[:-1]).model_fields)
    close = difflib.get_close_matches(str(loc[-1]), names, 1)
    return f"did you mean {close[0]}?" if close else f"known fields: {', '.join(names)}"


def _section(loc: Loc) -> type[BaseModel]:
    """Returns the model whose fields are at a place of the file."""
    section: type[BaseModel] = SystemConfig
    for part in loc:
        if isinstance(part, str) and part in section.model_fields:
            section = _model_in(section.model_fields[part].annotation) or section
    return section


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the model in an annotation: itself, or the items of its list, mapping or option."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    is_wrapped = get_origin(annotation) in (Annotated, Union, UnionType, tuple, list, dict)
    inner = get_args(annotation) if is_wrapped else ()
    return next((model for model in map(_model_in, inner) if model is not None), None)


def _line(node: yaml.Node | None, loc: Loc) -> int | None:
    """Returns the line of a field, counted from 1; for a missing field, the line where its section begins."""
    line = None
    for part in loc:
        if isinstance(node, yaml.MappingNode) and isinstance(part, str):
            entry = next((entry for entry in node.value if entry[0].value == part), None)
            if entry is None:
                break
            line, node = entry[0].start_mark.line + 1, entry[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line
