"""Decides whether a call may reach its handler, from its method, its metadata and its sender's certificate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from halfmoon.errors import Forbidden, HalfmoonError, Unauthenticated
from halfmoon.rpc.credentials.credential import CREDENTIAL_KEY, Credential
from halfmoon.rpc.credentials.operator_token import AUTHORIZATION_KEY, OperatorToken
from halfmoon.rpc.credentials.refusals import stranger, wrong_role
from halfmoon.rpc.credentials.roles import ClusterRole, cluster_role, is_open, may_call
from halfmoon.rpc.tls.server_credentials import caller_role

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


class CallAccess:
    """Knows the credential of this process. Without one, and without an operator token, every call is let in.

    `operators`: callers with this token may do what the role operator may.
    """

    def __init__(self, credential: Credential | None = None, operators: OperatorToken | None = None) -> None:
        self.credential = credential
        self._operators = operators if operators is not None and operators.is_known else None

    def refusal(self, method: str, metadata: Metadata) -> HalfmoonError | None:
        """Why the call is refused before its first message is read; None if it may go on."""
        if (self.credential is None and self._operators is None) or is_open(method) or self._knows_by_certificate_only:
            return None
        role = self._role(metadata)
        if role is not None:
            return None if may_call(role, method) else wrong_role(role, method)
        if self.credential is None:
            return Unauthenticated("the operator token is needed: send the metadata 'authorization: Bearer <token>'")
        return stranger()

    def certificate_refusal(
        self, method: str, metadata: Metadata, auth_context: Callable[[], Mapping[str, Sequence[bytes]]]
    ) -> HalfmoonError | None:
        """Why a call that `refusal` let pass is refused for its sender's certificate; None without mutual TLS.

        A token, where one is needed, must be of the certificate's role. `auth_context` is the call's, which is slow.
        """
        if self.credential is None or self.credential.tls is None or is_open(method):
            return None
        role = cluster_role(caller_role(auth_context()))
        if role is None:
            return Unauthenticated("the certificate names no role of a cluster: use `halfmoon certs issue --role`")
        if not self._knows_by_certificate_only and self._role(metadata) != role:
            return Forbidden("the credential and the certificate of this call are of different roles")
        return None if may_call(role, method) else wrong_role(role, method)

    @property
    def _knows_by_certificate_only(self) -> bool:
        return self.credential is not None and not self.credential.tokens

    def _role(self, metadata: Metadata) -> ClusterRole | None:
        """The role that the metadata proves."""
        given = {key: value for key, value in metadata if isinstance(value, str)}
        token = given.get(CREDENTIAL_KEY)
        role = self.credential.role_of(token) if self.credential and token is not None else None
        if role is None and self._operators is not None and self._operators.is_in(given.get(AUTHORIZATION_KEY, "")):
            return "operator"
        return role


OPEN_ACCESS = CallAccess()
