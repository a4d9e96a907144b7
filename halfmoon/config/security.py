"""Settings of access: API keys and the operator token."""

from __future__ import annotations

from pydantic import Field

from halfmoon.config.section import Section, Texts


class SecurityConfig(Section):
    """Secrets that clients and operators send."""

    api_key: Texts = Field((), description="key that clients must send; repeat it for more; none: no key is needed")
    operator_token: str | None = Field(
        None,
        min_length=1,
        description="secret that console and control API require; none: not required on a loopback host; elsewhere "
        "`halfmoon up` generates one, and a gateway alone has no control API",
    )
