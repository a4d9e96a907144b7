"""Hides the secrets of a URL, for logs and for `halfmoon config show`."""

from __future__ import annotations

HIDDEN = "***"


def masked_url(url: str) -> str:
    """Returns the URL without its user, its password and the values of its query; other texts are hidden whole.

    A password may itself contain `?`, and a value of the query `@`: what cannot be told apart is hidden, too.
    """
    scheme, sign, rest = url.partition("://")
    user, at, after = rest.rpartition("@")
    if not sign or "?" in user:
        return f"{scheme}://{HIDDEN}" if sign else HIDDEN
    place, question, query = after.partition("?")
    shown = "&".join(_masked_value(part) for part in query.split("&")) if query else ""
    return f"{scheme}://{HIDDEN if at else ''}{at}{place}{question}{shown}"


def _masked_value(part: str) -> str:
    name, equals, _ = part.partition("=")
    return f"{name}={HIDDEN}" if equals else HIDDEN
