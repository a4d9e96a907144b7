"""Elements of drawings as SVG text. Names from outside are escaped; text takes the page's colour."""

from __future__ import annotations

from html import escape
from typing import Literal, NamedTuple

Anchor = Literal["start", "middle", "end"]


class Place(NamedTuple):
    """A rectangle of a drawing."""

    x: float
    y: float
    width: float
    height: float


def drawing(body: str, width: float, height: float, title: str, least_px: int = 0) -> str:
    """Wraps shapes in the SVG element: as wide as its container, but at least `least_px`, with fixed proportions."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="100%" role="img" '
        f'aria-label="{escaped(title)}" style="display:block;min-width:{least_px}px;font-family:inherit">{body}</svg>'
    )


def text(
    x: float, y: float, line: str, size: float, *, weight: int = 400, opacity: float = 1.0, anchor: Anchor = "start",
) -> str:  # fmt: skip
    """One line of text on the base line `y`."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="currentColor" '
        f'fill-opacity="{opacity}" text-anchor="{anchor}">{escaped(line)}</text>'
    )


def tip(message: str) -> str:
    """Tooltip of the surrounding element."""
    return f"<title>{escaped(message)}</title>" if message else ""


def bar(place: Place, share: float, colour: str) -> str:
    """A rounded bar filled to `share`."""
    x, y, width, height = place
    frame = f'x="{x:.1f}" y="{y:.1f}" height="{height}" rx="{height / 2}"'
    return (
        f'<rect {frame} width="{width:.1f}" fill="currentColor" fill-opacity="0.12"/>'
        f'<rect {frame} width="{width * min(share, 1.0):.1f}" fill="{colour}"/>'
    )


def escaped(message: str) -> str:
    """Escapes for XML, in one line."""
    return escape(" ".join(message.split()))
