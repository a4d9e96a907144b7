"""Numbers in readable form."""

from __future__ import annotations

NOTHING = "–"
_NEXT_UNIT = 0.9995  # of a unit: what three digits would show as a whole one


def seconds(value_s: float | None) -> str:
    """Three digits in a suitable unit."""
    if value_s is None:
        return NOTHING
    if value_s < _NEXT_UNIT:
        return f"{value_s * 1000:.3g} ms"
    if value_s < 120:
        return f"{value_s:.3g} s"
    for size_s, unit in ((86_400, "d"), (3_600, "h")):
        if value_s >= 2 * size_s:
            return f"{value_s / size_s:.0f} {unit}"
    return f"{value_s / 60:.0f} min"


def ago(age_s: float) -> str:
    """Age, such as "5 s ago"."""
    if age_s < 1:
        return "now"
    for size_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if age_s >= size_s:
            return f"{age_s / size_s:.0f} {unit} ago"
    return f"{age_s:.0f} s ago"


def size(num_bytes: float) -> str:
    """Bytes in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1023.95:  # what one decimal would show as 1024.0
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} PiB"


def count(value: float | None) -> str:
    """Shortened: 950, 12.3k, 4.56M."""
    if value is None:
        return NOTHING
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= _NEXT_UNIT * scale:
            return f"{value / scale:.3g}{unit}"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def share(part: float | None) -> str:
    """A fraction in per cent."""
    return NOTHING if part is None else f"{100 * part:.1f} %" if part < 0.9995 else "100 %"
