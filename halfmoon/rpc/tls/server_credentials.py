"""Mutual TLS on the server's side: clients need a certificate of a known authority, and their role is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc

from halfmoon.rpc.tls.identity_files import IdentityFiles, TlsIdentity
from halfmoon.rpc.tls.names import role_and_name


def server_credentials(files: IdentityFiles) -> grpc.ServerCredentials:
    """Credentials of a listening port. Each handshake uses the newest certificate; running connections stay."""
    offered = files.current

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal offered
        newest = files.current
        if newest is offered:
            return None
        offered = newest
        return _configuration(newest)

    return grpc.dynamic_ssl_server_credentials(_configuration(offered), changed, require_client_authentication=True)


def caller_role(auth_context: Mapping[str, Sequence[bytes]]) -> str:
    """Role in the certificate of a call's sender; "" without TLS, or if the certificate is not a service's."""
    uris = (uri.decode(errors="replace") for uri in auth_context.get("peer_uri", ()))
    return role_and_name(uris)[0]


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.cert)], identity.ca)
