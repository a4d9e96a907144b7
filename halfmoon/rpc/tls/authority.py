"""A development authority: a directory with a key that issues certificates to the services of one cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from halfmoon.errors import AlreadyHere, InvalidRequest, NotFound
from halfmoon.rpc.processes.private_files import write_private
from halfmoon.rpc.tls.certificates import belongs_to, certificates_in, summary_of, utc_now
from halfmoon.rpc.tls.identity_files import paths_in
from halfmoon.rpc.tls.names import server_name, spiffe_id

CA_CERT, CA_KEY = "ca.crt", "ca.key"

_AUTHORITY_DAYS = 3650
_CLOCK_SKEW = timedelta(minutes=5)  # between hosts: a new certificate is valid everywhere at once
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")


class IssuedCertificate(NamedTuple):
    """Files of one service, in PEM."""

    cert: bytes
    key: bytes
    ca: bytes

    def write(self, directory: Path) -> None:
        """Writes tls.crt, tls.key and ca.crt, each at once. A running service takes them over.

        Raises InvalidRequest if they cannot be written.
        """
        _make_private(directory)
        paths = paths_in(directory)
        _write(paths.key, self.key)
        _write(paths.cert, self.cert, mode=0o644)
        _write(paths.ca, self.ca, mode=0o644)


class Authority:
    """Owns the authority's key while it issues certificates."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def create(cls, directory: Path, days: int = _AUTHORITY_DAYS) -> Self:
        """Makes an authority and writes its two files. Raises AlreadyHere if the directory has one."""
        if os.path.exists(directory / CA_KEY) or os.path.exists(directory / CA_CERT):
            raise AlreadyHere(f"{directory} already has an authority: use it, or name another directory")
        _make_private(directory)
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"Halfmoon development authority {os.urandom(4).hex()}")
        usage = _usage(key_cert_sign=True, crl_sign=True)
        builder = _builder(name, name, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        authority = cls(builder.sign(key, SHA256()), key)
        _write(directory / CA_KEY, _key_pem(key))
        _write(directory / CA_CERT, authority.pem, mode=0o644)
        return authority

    @classmethod
    def kept(cls, directory: Path) -> Self:
        """Reads the directory's authority, which is made at the first call. Raises InvalidRequest."""
        return cls.open(directory) if (directory / CA_KEY).exists() else cls.create(directory)

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Reads an authority. Raises NotFound without one, InvalidRequest for files that cannot be used."""
        try:
            cert_pem, key_pem = (directory / CA_CERT).read_bytes(), (directory / CA_KEY).read_bytes()
        except FileNotFoundError as error:
            raise NotFound(
                f"{directory} has no {CA_CERT} and {CA_KEY}: make them with `halfmoon certs init --dir {directory}`"
            ) from error
        except OSError as error:
            raise InvalidRequest(f"{error.filename} cannot be read: {error.strerror}") from error
        certificate = certificates_in(cert_pem, str(directory / CA_CERT))[0]
        if not belongs_to(key_pem, certificate, str(directory / CA_KEY)):
            raise InvalidRequest(f"{CA_KEY} in {directory} is not the key of {CA_CERT}")
        key = load_pem_private_key(key_pem, password=None)
        summary = summary_of(certificate)
        if not summary.is_authority or not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InvalidRequest(f"{directory / CA_CERT} is not an authority of `halfmoon certs init`")
        if summary.is_expired(utc_now()):
            raise InvalidRequest(f"the authority in {directory} expired on {summary.expires_at:%Y-%m-%d}: make another")
        return cls(certificate, key)

    @property
    def pem(self) -> bytes:
        """The authority's own certificate."""
        return self._certificate.public_bytes(Encoding.PEM)

    def issue(self, role: str, name: str, hosts: Iterable[str] = (), days: float = 365) -> IssuedCertificate:
        """Issues a certificate for a service of `role`; it ends with the authority at the latest.

        `hosts` are DNS names and addresses for those who know the service by these. Raises InvalidRequest for a name,
        a host or a number of days that cannot be in a certificate.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"{name!r} cannot be a service's name: use letters, digits, '.', '_' and '-'")
        if days <= 0:
            raise InvalidRequest("a certificate must be valid for at least a day")
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [
            x509.UniformResourceIdentifier(spiffe_id(role, name)),
            *(x509.DNSName(server_name(known)) for known in (role, None)),
            *(_host(host) for host in dict.fromkeys(hosts)),
        ]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        last = self._certificate.not_valid_after_utc
        builder = _builder(_name(f"{role} {name}"), self._certificate.subject, key.public_key(), days, last)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(digital_signature=True), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        above = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(above, critical=False)
        return IssuedCertificate(builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM), _key_pem(key), self.pem)


def _write(file: Path, content: bytes, mode: int = 0o600) -> None:
    try:
        write_private(file, content, mode)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be written: {error.strerror}") from error


def _make_private(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"{directory} cannot be made: {error.strerror}") from error


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float, last: datetime | None = None
) -> x509.CertificateBuilder:
    now = utc_now()
    end = now + timedelta(days=days)
    builder = x509.CertificateBuilder(issuer_name=issuer, subject_name=subject, public_key=key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _CLOCK_SKEW).not_valid_after(min(end, last or end))


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        pass
    try:
        return x509.DNSName(text)
    except ValueError as error:
        raise InvalidRequest(f"--host {text!r} is neither a host name nor an address: {error}") from error


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
