"""A map as JSON, with one sentence that sums it up: what `halfmoon plan --map --json` prints."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from halfmoon.plan.targets.target_map import Best, Cell, TargetMap


def map_summary(of: TargetMap) -> dict[str, Any]:
    """Plain values; times in seconds, goodputs for each GPU. A gain is null where only one kind meets the targets."""
    return {
        "model": of.request.model,
        "gpu": of.fleet,
        "workload": of.request.workload,
        "criterion": of.request.criterion,
        "attainment_asked": of.request.attainment,
        "ttfts_s": list(of.grid.ttfts_s),
        "tpots_s": list(of.grid.tpots_s),
        "cells": [_cell(cell) for cell in of.cells],
        "sentence": sentence(of),
        "source": of.source,
        "error_prefill": of.error_prefill,
        "error_step": of.error_step,
        "num_layouts": of.num_layouts,
        "notes": list(of.notes),
    }


def sentence(of: TargetMap) -> str:
    """Which layout wins, over how many of the targets that are met at all, and by how much."""
    met = [cell for cell in of.cells if cell.winner != "none"]
    if not met:
        return "No layout meets any of these targets."
    parts = [text for text in (_won(met, "disaggregated"), _won(met, "colocated")) if text]
    num_even = sum(cell.winner == "even" for cell in met)
    parts += [f"{num_even} are even"] if num_even else []
    unsure = sum(cell.confidence != "sure" for cell in met)
    sure = "every answer holds" if not unsure else f"{len(met) - unsure} answers hold"
    return (
        f"Of {len(met)} pairs of targets that some layout meets, {', '.join(parts)}; {sure} for all seeds and errors."
    )


def _won(met: list[Cell], winner: str) -> str:
    won = [cell for cell in met if cell.winner == winner]
    if not won:
        return ""
    name = "separate workers" if winner == "disaggregated" else "colocated ones"
    most = max((_lead(cell) for cell in won if math.isfinite(_lead(cell))), default=None)
    alone = sum(not math.isfinite(_lead(cell)) for cell in won)
    by = "" if most is None else f" by up to {most - 1:.0%}"
    return f"{name} win {len(won)}{by}" + (f" (only they meet {alone})" if alone else "")


def _lead(cell: Cell) -> float:
    """The winner's goodput over the other one's; infinite if the other one has none."""
    return cell.gain if cell.winner == "disaggregated" else math.inf if not cell.gain else 1 / cell.gain


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        **asdict(cell),
        **{name: _best(getattr(cell, name)) for name in ("disaggregated", "colocated")},
        **{name: _finite(getattr(cell, name)) for name in ("gain", "gain_low", "gain_high")},
    }


def _best(best: Best | None) -> dict[str, Any] | None:
    return None if best is None else {"layout": best.text, "goodput_per_s_per_gpu": best.per_gpu}


def _finite(gain: float) -> float | None:
    return gain if 0 < gain < math.inf else None
