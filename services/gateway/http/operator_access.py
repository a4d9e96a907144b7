"""Access to the control API, `/halfmoon/...` and two paths of vLLM's: with the operator token.

It is open on loopback without API keys.
"""

from __future__ import annotations

from aiohttp import web

from halfmoon.rpc.addresses.loopback import is_loopback
from halfmoon.rpc.credentials.operator_token import OperatorToken
from services.gateway.http.api_keys import ApiKeys, WrongKey

CONTROL_PREFIX = "/halfmoon/"
VLLM_PATHS = frozenset(("/reset_prefix_cache", "/server_info"))  # of vLLM's own operators' endpoints
_SECRETS_PREFIX = "/halfmoon/v1/tenants"  # who may make keys could let anybody in


class OperatorAccess:
    """Owns the operator token. Only a gateway on loopback without API keys has an open control API.

    Where clients need keys, they are others than the operators, on this machine, too.
    """

    def __init__(self, keys: ApiKeys, host: str, token: str | None, kept_token: str | None = None) -> None:
        """`token` is always needed; `kept_token`, of the state directory, only where the API would be open without."""
        self._keys = keys
        self._token = OperatorToken(token or kept_token)
        self._is_always_needed = token is not None or not is_loopback(host)

    def governs(self, request: web.Request) -> bool:
        """Whether this class checks the request, instead of the API keys."""
        is_needed = self._is_always_needed or self._keys.table.is_needed or request.path.startswith(_SECRETS_PREFIX)
        return is_needed and (request.path.startswith(CONTROL_PREFIX) or request.path in VLLM_PATHS)

    def check(self, request: web.Request) -> None:
        """Raises WrongKey."""
        if not self._token.is_known:
            raise WrongKey(
                "the control API is closed: it is for operators only, and this gateway has no operator token; start it "
                "with HALFMOON_GATEWAY_OPERATOR_TOKEN, or by `halfmoon up`, which makes one. `halfmoon keys` on its "
                "host needs none"
            )
        if not self._token.is_in(request.headers.get("Authorization", "")):
            raise WrongKey(
                "the operator token is needed: send the header 'Authorization: Bearer <token>'; the one that `halfmoon "
                "up` made is in operator_token in its state directory"
            )
