"""What drawings are made of, as SVG text. All that others have named is escaped; text takes the page's colour."""

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


def drawing(body: str, width: float, height: float, title: str) -> str:
    """The element itself, as wide as there is room; it keeps its proportions."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="100%" role="img" '
        f'aria-label="{escaped(title)}" style="display:block;font-family:inherit">{body}</svg>'
    )


def text(
    x: float, y: float, said: str, size: float, colour: str = "currentColor",
    *, weight: int = 400, opacity: float = 1.0, anchor: Anchor = "start",
) -> str:  # fmt: skip
    """One line, on the base line y."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'fill-opacity="{opacity}" text-anchor="{anchor}">{escaped(said)}</text>'
    )


def tip(said: str) -> str:
    """What is told of the element around it when a pointer rests there."""
    return f"<title>{escaped(said)}</title>" if said else ""


def bar(place: Place, share: float, colour: str) -> str:
    """A rounded one that is full to a share."""
    x, y, width, height = place
    frame = f'x="{x:.1f}" y="{y:.1f}" height="{height}" rx="{height / 2}"'
    return (
        f'<rect {frame} width="{width:.1f}" fill="currentColor" fill-opacity="0.12"/>'
        f'<rect {frame} width="{width * min(share, 1.0):.1f}" fill="{colour}"/>'
    )


def escaped(said: str) -> str:
    """In one line."""
    return escape(" ".join(said.split()))
