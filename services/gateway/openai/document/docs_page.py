"""The page at /docs: the OpenAPI document as HTML, made here, so that it needs neither scripts nor other hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title} {version}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
summary {{ cursor: pointer; padding: .3rem 0 }} code, pre {{ font-family: ui-monospace, monospace }}
table {{ border-collapse: collapse; width: 100% }} td {{ border-top: 1px solid #8884; padding: .2rem .5rem }}
td {{ vertical-align: top; overflow-wrap: anywhere }} pre {{ overflow-x: auto }}
</style></head><body><h1>{title} {version}</h1>
<p>{description}. For programs: <a href="openapi.json">openapi.json</a>.</p>
"""


def docs_page(document: Mapping[str, Any]) -> str:
    """The whole page."""
    head = _HEAD.format(**{name: escape(text) for name, text in document["info"].items()})
    schemas = document["components"]["schemas"]
    operations = (
        _operation(path, method, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    return f"{head}{''.join(operations)}</body></html>\n"


def _operation(path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    title = f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'].splitlines()[0])}"
    parts = [_table("Parameters", ((one["name"], "", one["description"]) for one in operation.get("parameters", ())))]
    if "requestBody" in operation:
        (content,) = operation["requestBody"]["content"].values()
        schema = content["schema"]
        parts.append(_table("Body", _fields(schemas[_name_of(schema)] if "$ref" in schema else schema)))
    parts.append(_table("Answers", ((code, "", said["description"]) for code, said in operation["responses"].items())))
    return f"<details><summary>{title}</summary>{''.join(parts)}</details>\n"


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        kind = _kind(field) + (", required" if name in required else "")
        yield name, kind, field.get("description", "")


def _kind(field: Mapping[str, Any]) -> str:
    """A field's types, as a reader wants them."""
    if "$ref" in field:
        return _name_of(field)
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(one) for one in field["anyOf"] if one.get("type") != "null"))
    if "const" in field or "enum" in field:
        return " or ".join(map(repr, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))


def _name_of(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _table(title: str, rows: Iterator[tuple[str, str, str]]) -> str:
    lines = [
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(kind)}</td><td>{escape(text)}</td></tr>"
        for name, kind, text in rows
    ]
    return f"<h4>{title}</h4><table>{''.join(lines)}</table>" if lines else ""
