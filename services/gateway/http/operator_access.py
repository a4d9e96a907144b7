"""Access to the control API, `/halfmoon/...`: with the operator token, or from this machine."""

from __future__ import annotations

from aiohttp import web

from halfmoon.rpc.operator_token import OperatorToken
from services.gateway.http.api_keys import WrongKey

CONTROL_PREFIX = "/halfmoon/"
_SECRETS_PREFIX = "/halfmoon/v1/tenants"  # who may make keys could let anybody in


class OperatorAccess:
    """Owns the operator token. Without one, only a gateway bound to loopback has a control API."""

    def __init__(self, token: str | None, host: str) -> None:
        self._token = OperatorToken(token, host)

    def governs(self, request: web.Request) -> bool:
        """Whether this class checks the request, instead of the API keys."""
        is_open = self._token.is_open and not request.path.startswith(_SECRETS_PREFIX)
        return request.path.startswith(CONTROL_PREFIX) and not is_open

    def check(self, request: web.Request) -> None:
        """Raises WrongKey."""
        if self._token.is_open:
            raise WrongKey(
                "tenants and keys are for operators only, and this gateway has no operator token: start it with "
                "HALFMOON_OPERATOR_TOKEN, or use `halfmoon keys` on its host"
            )
        if not self._token.is_known:
            raise WrongKey(
                "the control API is closed: this gateway listens beyond loopback and has no operator token; "
                "start it with --operator-token, or HALFMOON_GATEWAY_OPERATOR_TOKEN"
            )
        if not self._token.is_in(request.headers.get("Authorization", "")):
            raise WrongKey("the operator token is needed: send the header 'Authorization: Bearer <token>'")
