"""Ten maps over targets on one sheet, and a table with a sentence for each: where separate workers pay.

python -m benchmarks.planner.maps --sheet docs/images/target_maps.png
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from halfmoon.plan.plot import write_plot
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.targets.map_plot import map_spec
from halfmoon.plan.targets.map_summary import map_summary
from halfmoon.plan.targets.target_map import make_map

_SQUARE_PX = 44
_IN_A_ROW = 2

CASES = (
    ("llama-3-8b", "h100", "chat"),
    ("llama-3-8b", "h100", "in=4096,out=64"),
    ("llama-3-8b", "h100", "in=512,out=512"),
    ("llama-3-70b", "h100", "chat"),
    ("llama-3-8b", "l40s", "chat"),
    ("llama-3-70b", "h200", "summarization"),
    ("qwen2.5-32b", "a100-80g", "code"),
    ("llama-3-8b", "h100", "code"),
    ("llama-3-8b", "h100", "summarization"),
    ("llama-3-70b", "b200", "chat"),
)


def main() -> None:
    """Prints the table as Markdown and draws the sheet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sheet", type=Path, help="a .png or .html file")
    parser.add_argument("--figures", type=Path, help="a folder for the figures of each map, which are not made again")
    parser.add_argument("--case", type=int, action="append", help="number of a case, from 1 on; all by default")
    parser.add_argument("--jobs", type=int)
    args = parser.parse_args()
    found = []
    print("| | model, GPUs, workload | what the map says | layouts | s |\n|---|---|---|---|---|")
    for number, case in enumerate(CASES, start=1):
        if args.case is None or number in args.case:
            begun_s = time.perf_counter()
            summary = _map(case, args.figures, args.jobs)
            found.append(summary)
            took_s = time.perf_counter() - begun_s
            of = f"{summary['model']}, {summary['gpu']}, {summary['workload']}"
            print(f"| {number} | {of} | {summary['sentence']} | {summary['num_layouts']} | {took_s:.0f} |", flush=True)
    if args.sheet is not None:
        write_plot(args.sheet, _sheet(found))


def _map(case: tuple[str, str, str], folder: Path | None, jobs: int | None) -> dict[str, Any]:
    path = None if folder is None else folder / f"{'-'.join(case).replace('=', '').replace(',', '-')}.json"
    if path is not None and path.is_file():
        known: dict[str, Any] = json.loads(path.read_text())
        return known
    model, gpu, workload = case
    summary = map_summary(make_map(PlanRequest(model, gpu, workload, 1.0, 1.0), num_processes=jobs))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(summary))
    return summary


def _sheet(found: list[dict[str, Any]]) -> dict[str, Any]:
    specs = []
    for number, summary in enumerate(found, start=1):
        spec = map_spec(summary, _SQUARE_PX, has_legend=False)
        outer = {name: spec.pop(name) for name in ("$schema", "config", "padding")}
        spec["title"]["text"] = f"{number}. {spec['title']['text']}"
        specs.append(spec)
    return {**outer, "concat": specs, "columns": _IN_A_ROW, "spacing": 24}


if __name__ == "__main__":
    main()
