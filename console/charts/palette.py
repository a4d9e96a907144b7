"""Colours and their meanings on every page: Okabe and Ito's palette, safe for all kinds of colour vision."""

from __future__ import annotations

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"  # vermilion; never the only mark: red elements also have a word or a cross
SKY = "#56B4E9"
PURPLE = "#CC79A7"
GREY = "#8A8F98"

ROLES = {"prefill": BLUE, "decode": ORANGE, "both": GREEN}
PERCENTILES = {"p50": SKY, "p90": BLUE, "p99": PURPLE}
OUTCOMES = {"good": GREEN, "late": ORANGE, "refused": GREY, "failed": RED}
TTFT_PARTS = {"queue": GREY, "restore": SKY, "compute": BLUE}
SPANS = {
    "admission": GREY,
    "queue": SKY,
    "prefill": BLUE,
    "chunk": SKY,
    "restore": GREEN,
    "transfer": PURPLE,
    "first token": PURPLE,
    "decode": ORANGE,
}
TOKENS = {"cached": GREEN, "loaded": SKY, "computed": BLUE}
TIERS = {"workers": GREEN, "dram": BLUE, "disk": SKY, "cold": PURPLE}
SERIES = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY)  # for series without a fixed colour, in order
