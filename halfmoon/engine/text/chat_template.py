"""Chat templates: Jinja as the templates of checkpoints expect it (the conventions of transformers), sandboxed.

The sandbox keeps a template from objects and files, not from looping for ever or filling the memory: one that a
stranger sends is rendered in a process with limits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from halfmoon.errors import InvalidRequest


class ChatTemplate:
    """One compiled template. Immutable."""

    def __init__(self, source: str) -> None:
        """Raises InvalidRequest for a text that is no template."""
        environment = _environment()
        try:
            self.variables = frozenset(find_undeclared_variables(environment.parse(source)))
            self._template = environment.from_string(source)
        except Exception as error:
            raise InvalidRequest(_reason(error)) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Whatever fails inside is due to the variables, or to the template: InvalidRequest."""
        try:
            return self._template.render(**variables)
        except Exception as error:
            raise InvalidRequest(_reason(error)) from error


def template_source(path: Path, config: Mapping[str, Any]) -> str | None:
    """The template of a checkpoint's directory, whose tokenizer has this `config`; None if it has none.

    Raises InvalidRequest for one that is not text.
    """
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{file} is not a text in UTF-8: {error}", param="model") from error
    template = config.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):  # several, by name
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise InvalidRequest(
            f"{path / 'tokenizer_config.json'}: chat_template must be a text, or a list of objects with a name and a "
            "template",
            param="model",
        )
    return template


def _reason(error: Exception) -> str:
    """What the template itself said, or else the kind of failure, too."""
    return str(error) if type(error) is TemplateError else f"{type(error).__name__}: {error}"


class _GenerationBlocks(Extension):
    """Renders `{% generation %}`, which marks an assistant's words for training, as its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
