"""Replays side by side in tables, with one column per replay and as many columns as fit a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from halfmoon.replay.outcome import Spread, Summary

_NAMES_WIDTH, _COLUMN_WIDTH = 28, 21  # with borders


def report_tables(summaries: Mapping[tuple[str, str], Summary], width: int) -> Iterator[Table]:
    """Tables of summaries, each with as many columns as fit `width` characters."""
    modes = list(summaries)
    num_columns = max(1, (width - _NAMES_WIDTH) // _COLUMN_WIDTH)
    for first in range(0, len(modes), num_columns):
        yield report_table({mode: summaries[mode] for mode in modes[first : first + num_columns]})


def report_table(summaries: Mapping[tuple[str, str], Summary]) -> Table:
    """A table of summaries, by placement and admission mode."""
    table = Table("", *(f"{placement}\n{admission}" for placement, admission in summaries), highlight=False)
    columns = [_figures(result) for result in summaries.values()]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _figures(found: Summary) -> dict[str, str]:
    return {
        "requests": str(found.num_requests),
        "in time": f"{found.num_in_time} ({found.attainment:.1%})",
        "refused or wasted": str(found.num_refused_or_wasted),
        "late (of them by TTFT)": f"{found.num_late} ({found.num_late_ttft})",
        "refused": counted(found.num_refused, found.refused_by),
        "failed": counted(found.num_failed, found.failed_by),
        "goodput, requests/s": f"{found.goodput_per_s:.2f}",
        "TTFT mean, s": f"{found.ttft_s.mean:.2f}",
        "TTFT p50 / p90 / p99, s": percentiles(found.ttft_s, 1, ".2f"),
        "TBT mean, ms": f"{1000 * found.tbt_s.mean:.1f}",
        "TBT p50 / p90 / p99, ms": percentiles(found.tbt_s, 1000, ".1f"),
        "prompt tokens cached": f"{found.cached_share:.1%}",
        "sent late p99, s": f"{found.sent_late_p99_s:.2f}",
    }


def percentiles(spread: Spread, factor: float, form: str) -> str:
    """p50 / p90 / p99, each times `factor`."""
    return " / ".join(format(factor * one, form) for one in (spread.p50, spread.p90, spread.p99))


def counted(total: int, by_reason: Mapping[str, int]) -> str:
    """A number of requests, with the numbers by reason."""
    if not any(by_reason):
        return str(total)
    return f"{total} ({', '.join(f'{name} {number}' for name, number in sorted(by_reason.items()))})"
