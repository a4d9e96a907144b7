"""Prints a map over targets: one cell for each pair, coloured by the layout that wins."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfmoon.plan.targets.map_plot import lead_text

_STYLES = {"disaggregated": "bold dark_orange", "colocated": "bold blue", "even": "", "none": "dim"}
_LETTERS = {"disaggregated": "S ", "colocated": "C "}  # seven columns have to fit 80 characters


def print_map(summary: dict[str, Any], console: Console) -> None:
    """Prints who wins, by how much and how sure that is, for each TTFT (rows) and TPOT (columns)."""
    console.print(
        f"[bold]{summary['model']}, {summary['workload']}, {summary['gpu']}[/bold]: goodput for each GPU at "
        f"{summary['attainment_asked']:.0%} of the requests in time",
        highlight=False,
    )
    table = Table("TTFT\\TPOT", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    for tpot_s in summary["tpots_s"]:
        table.add_column(f"{1000 * tpot_s:g}", justify="right", no_wrap=True)
    cells = {(cell["ttft_s"], cell["tpot_s"]): cell for cell in summary["cells"]}
    for ttft_s in reversed(summary["ttfts_s"]):
        row = [cells[ttft_s, tpot_s] for tpot_s in summary["tpots_s"]]
        table.add_row(f"{1000 * ttft_s:g}", *map(_text, row))
    console.print(table)
    console.print("targets in ms; S: separate prefill and decode workers win; C: colocated ones with chunked prompts")
    console.print("+23% or 2.3x: the winner's lead; only: the other kind does not meet the targets; =: even")
    console.print("~: for every seed, if the times are right; ?: not for every seed; -: no layout meets the targets")
    console.print(summary["sentence"], highlight=False)
    errors = [(name, summary[f"error_{name}"]) for name in ("prefill", "step")]
    known = ", ".join(f"{name} {error:.1%}" for name, error in errors if error is not None)
    console.print(f"times: {summary['source']}; median fit error: {known or 'not known'}", highlight=False)
    for note in summary["notes"]:
        console.print(f"note: {note}", highlight=False)


def _text(cell: dict[str, Any]) -> Text:
    return Text(_LETTERS.get(cell["winner"], "") + lead_text(cell), style=_STYLES[cell["winner"]])
