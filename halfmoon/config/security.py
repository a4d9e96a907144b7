"""Who may use a system."""

from __future__ import annotations

from pydantic import Field

from halfmoon.config.section import Section


class SecurityConfig(Section):
    """Secrets that clients and operators have to show."""

    api_key: tuple[str, ...] = Field((), description="a key that clients may use; repeat it for more; none: no key")
    operator_token: str | None = Field(
        None,
        description="secret that console and control API ask for; none: nothing on a loopback host; elsewhere "
        "`halfmoon up` makes one, and a gateway by itself has no control API",
    )
