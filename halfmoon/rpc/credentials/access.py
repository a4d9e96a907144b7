"""Decides whether a call may reach its handler, from its method and metadata alone."""

from __future__ import annotations

from collections.abc import Iterable

from halfmoon.errors import HalfmoonError, Unauthenticated
from halfmoon.rpc.credentials.credential import CREDENTIAL_KEY, Credential
from halfmoon.rpc.credentials.refusals import stranger, wrong_role
from halfmoon.rpc.credentials.roles import is_open, may_call
from halfmoon.rpc.operator_token import AUTHORIZATION_KEY, OperatorToken


class CallAccess:
    """Knows the credential of this process. Without one, and without an operator token, every call is let in.

    `operators`: callers with this token may do what the role operator may.
    """

    def __init__(self, credential: Credential | None = None, operators: OperatorToken | None = None) -> None:
        self.credential = credential
        self._operators = operators if operators is not None and operators.is_known else None

    def refusal(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> HalfmoonError | None:
        """Why the call is refused; None if it may go on."""
        if (self.credential is None and self._operators is None) or is_open(method):
            return None
        given = {key: value for key, value in metadata if isinstance(value, str)}
        role = self.credential.role_of(given.get(CREDENTIAL_KEY, "")) if self.credential else None
        if role is None and self._operators is not None and self._operators.is_in(given.get(AUTHORIZATION_KEY, "")):
            role = "operator"
        if role is not None:
            return None if may_call(role, method) else wrong_role(role, method)
        if self.credential is None:
            return Unauthenticated("the operator token is needed: send the metadata 'authorization: Bearer <token>'")
        return stranger()


OPEN_ACCESS = CallAccess()
