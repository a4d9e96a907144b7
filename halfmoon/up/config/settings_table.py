"""`python -m halfmoon.up.config.settings_table` prints the tables of docs/reference/settings.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from halfmoon.config.hosts import HostsConfig
from halfmoon.config.planner import PlannerConfig
from halfmoon.config.qos_classes import ClassConfig, RuleConfig
from halfmoon.config.section import Section
from halfmoon.config.tenants import DeclaredTenant
from halfmoon.up.config.human_bytes import human_bytes
from halfmoon.up.config.system_config import (
    ConsoleConfig,
    ModelConfig,
    SystemConfig,
    UpGatewayConfig,
    UpObservedConfig,
    UpSecurityConfig,
    UpSimulationConfig,
    UpStoresConfig,
    WorkerGroup,
)

SECTIONS: Mapping[str, type[BaseModel]] = {
    "model": ModelConfig,
    "workers.all, workers.prefill, workers.decode, workers.both": WorkerGroup,
    "hosts": HostsConfig,
    "gateway": UpGatewayConfig,
    "stores": UpStoresConfig,
    "classes.NAME": ClassConfig,
    "classes.NAME.rules[]": RuleConfig,
    "tenants.NAME": DeclaredTenant,
    "security": UpSecurityConfig,
    "observability": UpObservedConfig,
    "planner": PlannerConfig,
    "console": ConsoleConfig,
    "simulation": UpSimulationConfig,
}

_NAMES: Mapping[object, str] = {
    str: "text", int: "number", float: "number", bool: "`true`, `false`", Path: "path", ByteSize: "bytes",
}  # fmt: skip


def settings_table() -> str:
    """Returns Markdown with a table for each section of the file."""
    top = {name: field for name, field in SystemConfig.model_fields.items() if not _is_section(field)}
    tables = [_table("At the top", top)]
    tables += [_table(f"`{title}`", section.model_fields) for title, section in SECTIONS.items()]
    return "\n\n".join(tables) + "\n"


def _table(title: str, fields: Mapping[str, FieldInfo]) -> str:
    rows = "\n".join(_rows(fields))
    return f"### {title}\n\n| field | value | default | |\n|---|---|---|---|\n{rows}"


def _rows(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    for name, field in fields.items():
        description = (field.description or "").replace("|", "\\|")
        yield f"| `{name}` | {_kind(field.annotation)} | {_default(name, field)} | {description} |"


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _kind(annotation: Any) -> str:
    origin, inner = get_origin(annotation), [part for part in get_args(annotation) if part is not NoneType]
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType, Annotated):
        words = [_kind(part) for part in inner[1:] if get_origin(part) is Literal]
        return ", ".join([_kind(inner[0]), *words])
    if origin in (list, tuple):
        return f"list: {_kind(inner[0])}"
    is_mapping = origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel))
    return "mapping" if is_mapping else _NAMES[annotation]


def _default(name: str, field: FieldInfo) -> str:
    if name == "processes" and field.default_factory is not None:
        return "cores"
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ("", (), [], {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{human_bytes(value)}`" if isinstance(value, ByteSize) else f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(settings_table())
