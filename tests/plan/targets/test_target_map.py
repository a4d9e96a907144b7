"""A whole map of a small problem, its figures, and how they are shown."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from halfmoon.cli.terminal.map_table import print_map
from halfmoon.errors import InvalidRequest
from halfmoon.plan.plot import write_plot
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.targets.map_plot import lead_text, map_spec
from halfmoon.plan.targets.map_summary import map_summary
from halfmoon.plan.targets.target_map import TargetMap, confidence_of, make_map, winner_of
from halfmoon.sim.latency_sources.roofline import Efficiency

REQUEST = PlanRequest(
    "llama-3-8b", "h100", "in=1024,out=32", 1.0, 1.0, num_nodes=1, gpus_per_node=2, num_requests=40, seed=3
)
TTFTS_S, TPOTS_S = (0.01, 0.1, 0.5), (0.008, 0.03)


@pytest.fixture(scope="module")
def found() -> TargetMap:
    return make_map(REQUEST, TTFTS_S, TPOTS_S, num_processes=1)


def test_every_pair_of_targets_has_a_cell(found: TargetMap) -> None:
    assert [(cell.ttft_s, cell.tpot_s) for cell in found.cells] == [(a, b) for a in TTFTS_S for b in TPOTS_S]
    assert [cell.winner for cell in found.cells[:2]] == ["none", "none"]  # no prompt is done within 10 ms
    for cell in found.cells[2:]:
        assert cell.winner != "none"
        assert cell.gain_low <= cell.gain_high
    best = found.cells[-1].colocated
    assert best is not None
    assert "both" in best.text
    assert "chunks of" in best.text
    separate = found.cells[-1].disaggregated
    assert separate is not None
    assert separate.text == "1 prefill TP1 + 1 decode TP1, paired"


def test_the_error_of_the_times_is_the_source_s(found: TargetMap) -> None:
    assert (found.error_prefill, found.error_step) == Efficiency().error
    assert found.source == "roofline of llama-3-8b on h100"


def test_a_map_does_not_depend_on_the_number_of_processes(found: TargetMap) -> None:
    assert make_map(REQUEST, TTFTS_S, TPOTS_S, num_processes=2) == found


@pytest.mark.parametrize(
    ("gain", "seeds", "all_gains", "winner", "confidence"),
    [
        (1.5, [1.4, 1.6], [1.2], "disaggregated", "sure"),
        (1.5, [1.4, 1.6], [0.9], "disaggregated", "by the times"),
        (1.5, [0.9, 2.1], [1.2], "disaggregated", "open"),
        (0.5, [0.4, 0.6], [0.7], "colocated", "sure"),
        (1.02, [1.0, 1.04], [0.99], "even", "sure"),
        (1.02, [1.0, 1.04], [1.3], "even", "by the times"),
        (math.inf, [math.inf], [math.inf], "disaggregated", "sure"),
    ],
)
def test_who_wins_and_how_sure_that_is(
    gain: float, seeds: list[float], all_gains: list[float], winner: str, confidence: str
) -> None:
    assert winner_of(gain, is_met=True) == winner
    assert confidence_of(winner_of(gain, is_met=True), seeds, [*seeds, *all_gains]) == confidence
    assert winner_of(gain, is_met=False) == "none"


def test_the_map_is_json_a_table_and_a_picture(found: TargetMap, tmp_path: Path) -> None:
    summary = json.loads(json.dumps(map_summary(found), allow_nan=False))
    assert "pairs of targets" in summary["sentence"]
    out = io.StringIO()
    print_map(summary, Console(file=out, width=100))
    assert "llama-3-8b, in=1024,out=32, 2 x h100" in out.getvalue()
    assert "TTFT\\TPOT" in out.getvalue()
    assert "median fit error: prefill 27.0%, step 43.0%" in out.getvalue()
    spec = map_spec(summary)
    assert len(spec["data"]["values"]) == len(found.cells)
    pytest.importorskip("vl_convert")
    write_plot(tmp_path / "map.png", spec)
    write_plot(tmp_path / "map.html", spec)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_seven_columns_are_whole_in_a_terminal_of_80_characters() -> None:
    times_s = (0.037, 0.058, 0.092, 0.15, 0.23, 1.36, 15.57)
    cell = {"winner": "disaggregated", "gain": 1.996, "confidence": "by the times"}
    summary = {
        "model": "llama-3-8b",
        "workload": "chat",
        "gpu": "8 x h100",
        "attainment_asked": 0.9,
        "sentence": "",
        "ttfts_s": times_s,
        "tpots_s": times_s,
        "error_prefill": None,
        "error_step": None,
        "source": "",
        "notes": [],
        "cells": [{**cell, "ttft_s": ttft_s, "tpot_s": tpot_s} for ttft_s in times_s for tpot_s in times_s],
    }
    out = io.StringIO()
    print_map(summary, Console(file=out, width=80))
    rows = [line.split() for line in out.getvalue().splitlines() if line.count("S +100%~") == 7]
    assert [row[0] for row in rows] == ["15570", "1360", "230", "150", "92", "58", "37"]


def test_a_lead_is_a_few_characters() -> None:
    cell = {"winner": "disaggregated", "gain": 1.234, "confidence": "sure"}
    assert lead_text(cell) == "+23%"
    assert lead_text({**cell, "gain": 1 / 3, "winner": "colocated", "confidence": "open"}) == "3.0x?"
    assert lead_text({**cell, "gain": None}) == "only"
    assert lead_text({**cell, "winner": "even", "confidence": "by the times"}) == "=~"
    assert lead_text({**cell, "winner": "none"}) == "-"


@pytest.mark.parametrize(
    ("request_", "ttfts_s", "problem"),
    [
        (replace(REQUEST, gpu="h100:1x2,l40s:1x2"), (), "one kind of GPU"),
        (REQUEST, (-1.0,), "above 0"),
        (replace(REQUEST, model="llama-3-70b", gpus_per_node=1), (), "fit"),
    ],
)
def test_what_has_no_map_is_refused(request_: PlanRequest, ttfts_s: tuple[float, ...], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        make_map(request_, ttfts_s, num_processes=1)
