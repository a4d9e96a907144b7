"""TLS of HTTP: a server's certificate that may change while it serves, and whom clients trust."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.addresses.loopback import is_loopback_url
from halfmoon.rpc.tls.watched_files import CHECK_S, WatchedFiles

CA_VARIABLE = "HALFMOON_HTTP_CA"
CA_HELP = "File of authorities to trust, if the URL is https:// and the system does not know them."
_UNKNOWN_AUTHORITY = (18, 19, 20, 21)  # OpenSSL's codes for certificates that sign themselves or have an unknown issuer


def server_context(cert: Path, key: Path, check_s: float = CHECK_S) -> ssl.SSLContext:
    """A server's context, TLS 1.2 or newer. Each handshake uses the newest usable certificate.

    Raises InvalidRequest if the files cannot be used.
    """
    files = WatchedFiles((cert, key), lambda: _loaded(cert, key), time.monotonic, check_s)
    context = files.current

    def choose(connection: ssl.SSLObject, name: str | None, offered: ssl.SSLContext) -> None:
        connection.context = files.current

    context.sni_callback = choose  # called at every handshake, with or without a name
    return context


def client_context(ca: Path | None, url: str) -> ssl.SSLContext | None:
    """A client's context for `url`. `ca`: file of trusted authorities or server certificates.

    None without a file: clients then trust the system's authorities by themselves. With a file, a gateway on loopback
    may have any name: a certificate rarely has 127.0.0.1 in it. Raises InvalidRequest if the file cannot be used.
    """
    if ca is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = not is_loopback_url(url)
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"{ca} has no certificates to trust: {error.strerror or error}", param="ca") from error
    return context


def unreached(error: Exception) -> str:
    """Says why a server was not reached and, where nobody knows its certificate's authority, what to do."""
    cause = getattr(error, "certificate_error", error)
    advice = f"; name its authority by --ca or {CA_VARIABLE}"
    return (str(error) or "timed out") + (advice if _is_unknown(cause) else "")


def _is_unknown(error: Exception) -> bool:
    return isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _UNKNOWN_AUTHORITY


def _loaded(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InvalidRequest(f"{cert} and {key} cannot be used for HTTP: {_reason(error)}") from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return "the key is not the certificate's" if error.reason == "KEY_VALUES_MISMATCH" else "they are not PEM"
    return str(getattr(error, "strerror", None) or error)
