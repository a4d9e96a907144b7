"""Which edits follow from the classes that a configuration declares. Pure.

A class is written when its text in the configuration is new or has changed since the last start, and removed when the
text is gone and no operator has edited it. What operators edit or remove later stays until the text changes again. The
built-in class is more modest: it never replaces anything that an operator wrote or removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

Definition: TypeAlias = dict[str, Any]


class Declaration(NamedTuple):
    """A class of a configuration, or one that is built in."""

    definition: Definition
    is_built_in: bool = False


class ClassChange(NamedTuple):
    """What becomes of one class: its new definition, or None to remove it."""

    name: str
    definition: Definition | None


@dataclass(frozen=True, slots=True)
class ClassHistory:
    """What the ledger knows."""

    declared: Mapping[str, Definition | None]  # by the configuration before this one; None: withdrawn by it
    present: Mapping[str, Definition]
    ever_edited: frozenset[str]  # names

    def changes(self, declarations: Mapping[str, Declaration]) -> Iterator[ClassChange]:
        """The edits, in the order in which they keep reservations below 1: removals first."""
        for name in sorted(self.declared.keys() - declarations.keys()):
            if name in self.present and self._is_untouched(name):
                yield ClassChange(name, None)
        for name, declaration in sorted(declarations.items()):
            if declaration.definition in (self.declared.get(name), self.present.get(name)):
                continue
            if declaration.is_built_in and not self._is_free(name):
                continue
            yield ClassChange(name, declaration.definition)

    def remembered(self, declarations: Mapping[str, Declaration]) -> dict[str, Definition | None]:
        """`declared` of the next start."""
        withdrawn = [name for name in self.declared.keys() - declarations.keys() if self._is_untouched(name)]
        declared = {name: declaration.definition for name, declaration in declarations.items()}
        return dict.fromkeys(withdrawn) | declared

    def _is_untouched(self, name: str) -> bool:
        """Whether the class is as the configuration left it."""
        return name in self.declared and self.present.get(name) == self.declared[name]

    def _is_free(self, name: str) -> bool:
        return self._is_untouched(name) if name in self.declared else name not in self.ever_edited
