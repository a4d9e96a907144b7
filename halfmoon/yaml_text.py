"""Parses YAML, strictly: a key that is written twice in one mapping is an error. Keys such as `on` are text."""

from __future__ import annotations

from typing import Any, NamedTuple

import yaml

_BOOL, _TEXT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:str"


class Parsed(NamedTuple):
    """The parsed text, and its nodes, which know their lines."""

    value: Any
    root: yaml.Node | None


class _StrictLoader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if key.tag == _BOOL:
                key.tag = _TEXT
            line, written = key.start_mark.line + 1, (key.tag, str(key.value))
            if written in lines:
                raise yaml.YAMLError(f"line {line}: {key.value} was already written on line {lines[written]}")
            lines[written] = line
        return node


def parsed_yaml(text: str) -> Parsed:
    """Parses a text of one document. Raises yaml.YAMLError."""
    loader = _StrictLoader(text)
    try:
        root = loader.get_single_node()
        return Parsed(None if root is None else loader.construct_document(root), root)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except ValueError as error:  # such as a date that does not exist
        raise yaml.YAMLError(str(error)) from error
    except (AttributeError, LookupError) as error:  # PyYAML's, for `!!timestamp x` and `!!bool x`
        raise yaml.YAMLError("a value does not fit its tag: leave the tag out") from error
    finally:
        loader.dispose()
