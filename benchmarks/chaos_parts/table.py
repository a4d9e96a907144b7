"""Outcomes as a Markdown table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.chaos_parts.trial import Outcome

_HEAD = (
    "fault", "lost", "refused", "changed", "repeated", "longest pause s", "worst TTFT s", "missed after s",
    "back after s", "blocks leaked", "WARNING / ERROR / tracebacks", "note",
)  # fmt: skip


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A table with a row for each fault."""
    rows = [_HEAD, tuple("---" for _ in _HEAD), *map(_row, outcomes)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def write_json(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Writes the outcomes for `read_json`."""
    path.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


def read_json(path: Path) -> list[Outcome]:
    """The outcomes of a file of `write_json`."""
    return [Outcome(**fields) for fields in json.loads(path.read_text())]


def merged(earlier: Sequence[Outcome], later: Sequence[Outcome], names: Sequence[str]) -> list[Outcome]:
    """The later outcome of each fault, in the order of `names`."""
    newest = {outcome.fault: outcome for outcome in (*earlier, *later)}
    return [newest[name] for name in names if name in newest]


def _row(outcome: Outcome) -> tuple[str, ...]:
    if not outcome.num_streams:
        return (outcome.fault, *("" for _ in _HEAD[2:]), outcome.note)
    return (
        outcome.fault,
        f"{outcome.lost}/{outcome.num_streams}",
        str(outcome.refused),
        str(outcome.changed),
        str(outcome.repeated or ""),
        f"{outcome.longest_pause_s:.1f}",
        f"{outcome.worst_ttft_s:.1f}",
        _seconds(outcome.missed_after_s),
        _seconds(outcome.back_after_s),
        "" if outcome.leaked_blocks is None else str(outcome.leaked_blocks),
        f"{outcome.warnings}/{outcome.errors}/{outcome.tracebacks}",
        outcome.note.replace("|", "/").replace("\n", " "),
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
