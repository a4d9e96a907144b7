"""Prints the summary of a plan as tables that fit a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def print_plan(summary: dict[str, Any], console: Console) -> None:
    """Prints the best layouts and their latencies, the best under changed traffic, and the best colocated one."""
    console.print(_layouts(summary))
    rates = {one["rate_per_s"] for one in summary["layouts"]}
    at = f"{rates.pop():.4g} req/s" if len(rates) == 1 else "the rate that each holds"
    targets = summary["targets"]
    of_tbt = "" if targets["tbt_s"] is None else f"; TBT of the {targets['tbt_of'].replace('-', ' ')}"
    console.print(f"[bold]At {at}[/bold] ({summary['criterion']} criterion{of_tbt}; times in ms, p50 / p90 / p99)")
    console.print(_fates([(f"{number}", one) for number, one in enumerate(summary["layouts"], start=1)], summary))
    console.print("[bold]What if[/bold] (layout 1)")
    console.print(_fates(list(summary["sensitivity"].items()), summary))
    if not all(one["keeps_up"] for one in (*summary["layouts"], *summary["sensitivity"].values())):
        console.print("[1] does not keep up: the longer it runs, the fewer requests are in time", markup=False)
    console.print(_comparison(summary), highlight=False)
    for one in summary["latency"]:
        console.print(f"times: {one['source']}; {_fit(one)}", highlight=False)
    for note in summary["notes"]:
        console.print(f"note: {note}", highlight=False)


def _layouts(summary: dict[str, Any]) -> Table:
    table = _table("", "layout")
    for name in ("GPUs", "$/h", "req/s", "a GPU", "a $"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, one in enumerate(summary["layouts"], start=1):
        table.add_row(
            str(number),
            "\n= ".join([one["layout"], *one["same_as"]]),
            str(one["num_gpus"]),
            f"{one['price_per_hour']:.2f}",
            f"{one['goodput_per_s']:.3g}",
            f"{one['goodput_per_s_per_gpu']:.3g}",
            f"{one['goodput_per_dollar']:.0f}",
        )
    return table


def _fates(rows: list[tuple[str, dict[str, Any]]], summary: dict[str, Any]) -> Table:
    with_tbt = summary["targets"]["tbt_s"] is not None
    names = ["ttft", "tpot", *(["tbt"] if with_tbt else [])]
    table = _table("", f"met {' '.join(['all', *names]).upper().replace('ALL', 'all')} %")
    for name in names:
        table.add_column(name.upper(), justify="right")
    for title, one in rows:
        shares = " ".join(f"{100 * one[f'attainment_{name}']:.1f}" for name in ("joint", *names))
        table.add_row(
            title if one["keeps_up"] else rf"{title} \[1]", shares, *(_quantiles(one[f"{name}_s"]) for name in names)
        )
    return table


def _table(*names: str) -> Table:
    return Table(*names, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)


def _comparison(summary: dict[str, Any]) -> str:
    colocated, separate = summary["colocated"], summary["disaggregated"]
    if colocated is None:
        return "no colocated layout meets the targets"
    if summary["layouts"][0]["layout"] == colocated["layout"]:
        best = "none meets the targets" if separate is None else _cost(separate)
        return f"the best is colocated; of layouts with separate prefill and decode workers: {best}"
    return (
        f"{summary['over_colocated']:.2f} times the goodput for each GPU of the best colocated layout, "
        f"{_cost(colocated)}"
    )


def _cost(one: dict[str, Any]) -> str:
    return (
        f"{one['layout']} ({one['num_gpus']} GPUs, {one['price_per_hour']:.2f} $/h, "
        f"{one['goodput_per_s_per_gpu']:.3g} requests/s a GPU)"
    )


def _fit(one: dict[str, Any]) -> str:
    errors = [(what, one[f"error_{what}"]) for what in ("prefill", "step")]
    known = [f"{what} {error:.1%}" for what, error in errors if error is not None]
    return f"median fit error: {', '.join(known)}" if known else "fit error not known: docs/evaluation/ has comparisons"


def _quantiles(found: dict[str, float | None]) -> str:
    shown = [found[name] for name in ("p50", "p90", "p99")]
    return " / ".join("–" if one is None else f"{1000 * one:.0f}" for one in shown)
