"""What a certificate says: the role of a service, its hosts, its last day, and whether an authority issued it.

The role is in the certificate, as a SPIFFE id (spiffe://halfmoon.internal/<role>/<name>) that servers read and as a DNS
name (<role>.halfmoon.internal) that clients check, whatever host and port the server has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.tls.names import role_and_name

EXPIRES_SOON = timedelta(days=14)

_MOST_INTERMEDIATES = 8


@dataclass(frozen=True, slots=True)
class CertificateSummary:
    """A certificate's content. `role` and `name` are empty if it is not a service's."""

    subject: str
    role: str
    name: str
    hosts: tuple[str, ...]
    expires_at: datetime  # UTC
    is_authority: bool

    def is_expired(self, now: datetime) -> bool:
        """Whether its last moment has passed."""
        return now >= self.expires_at

    def expires_soon(self, now: datetime) -> bool:
        """Whether it expires within two weeks and has not yet."""
        return not self.is_expired(now) and now >= self.expires_at - EXPIRES_SOON


def certificates_in(pem: bytes, what: str) -> Sequence[x509.Certificate]:
    """Reads all certificates of a file. Raises InvalidRequest, which names the file as `what`."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise InvalidRequest(f"{what} is not a certificate in PEM: {error}") from error


def summary_of(certificate: x509.Certificate) -> CertificateSummary:
    """Reads subject, role, hosts and expiry."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    role, name = role_and_name(_alternatives(certificate, x509.UniformResourceIdentifier))
    addresses = (str(address) for address in _alternatives(certificate, x509.IPAddress))
    return CertificateSummary(
        str(names[0].value) if names else certificate.subject.rfc4514_string(),
        role,
        name,
        (*(str(host) for host in _alternatives(certificate, x509.DNSName)), *addresses),
        certificate.not_valid_after_utc,
        _is_authority(certificate),
    )


def chains_to(chain: Sequence[x509.Certificate], authorities: Collection[x509.Certificate]) -> bool:
    """Whether the first certificate was issued by an authority, or by intermediates that follow it in the chain.

    Checks signatures and names, not the time.
    """
    certificate = chain[0]
    for _ in range(_MOST_INTERMEDIATES):
        if any(_issued(issuer, certificate) for issuer in authorities):
            return True
        above = next((issuer for issuer in chain[1:] if _issued(issuer, certificate)), None)
        if above is None or above == certificate:
            return False
        certificate = above
    return False


def belongs_to(key_pem: bytes, certificate: x509.Certificate, what: str) -> bool:
    """Whether the private key is the certificate's. Raises InvalidRequest for what is no key, naming it as `what`."""
    try:
        key = load_pem_private_key(key_pem, password=None)
    except (TypeError, ValueError) as error:  # TypeError: it is encrypted
        raise InvalidRequest(f"{what} is not a private key in PEM without a password: {error}") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return key.public_key().public_bytes(*form) == certificate.public_key().public_bytes(*form)


def utc_now() -> datetime:
    """The present time."""
    return datetime.now(UTC)


def _issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, TypeError, ValueError):  # another key, an unknown kind of key, another name
        return False
    return _is_authority(issuer)


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def _alternatives(certificate: x509.Certificate, kind: type[x509.GeneralName]) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [str(name.value) for name in names if isinstance(name, kind)]
