"""Groups a command's options into dataclasses, one for each panel of its `--help`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command as typer reads it: every field of an option group becomes an option.

    An option group is a parameter whose type is a dataclass. The class names its panel in `PANEL`, and its fields are
    annotated like the parameters of any typer command. Other parameters stay as they are.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    def run(**values: Any) -> None:
        built = {name: kind(**{field.name: values[field.name] for field in fields(kind)})
                 for name, kind in groups.items()}  # fmt: skip
        others = {name: values[name] for name in inspect.signature(command).parameters if name not in groups}
        command(**others, **built)

    run.__name__, run.__doc__ = command.__name__, unwrapped_doc(command)
    run.__signature__ = inspect.Signature(list(_parameters(command, hints)))  # type: ignore[attr-defined]
    return run


def unwrapped_doc(command: Callable[..., None]) -> str:
    """Returns the docstring with one line per paragraph, so that typer wraps it to the terminal."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


def _parameters(command: Callable[..., None], hints: dict[str, Any]) -> Iterator[inspect.Parameter]:
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            yield from _options(hints[name])
        else:
            yield parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)


def _options(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        annotation: Any = hints[field.name]
        option = copy(get_args(annotation)[1])
        option.rich_help_panel = group.PANEL
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        annotation = Annotated[get_args(annotation)[0], option]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
