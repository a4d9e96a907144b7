"""Settings of access: API keys, the operator token, the cluster secret and certificates."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from halfmoon.config.section import Section, Texts
from halfmoon.rpc.credentials.api_keys import DeclaredKey, declared_key, keys_of_file, secret_of_file


class OperatorConfig(Section):
    """The secret that operators send."""

    operator_token: str | None = Field(
        None,
        min_length=1,
        description="secret that console and control API require; none: that of the state directory, which "
        "`halfmoon up` makes, and which is required beyond loopback or where there are API keys",
    )
    operator_token_file: Path | None = Field(None, description="file that holds the operator token")

    def operator_secret(self) -> str | None:
        """Returns the operator token, wherever it is. Raises InvalidRequest."""
        if self.operator_token is not None or self.operator_token_file is None:
            return self.operator_token
        return secret_of_file(self.operator_token_file, "operator_token_file")


class SecurityConfig(OperatorConfig):
    """Secrets that clients and operators send."""

    api_key: Texts = Field(
        (),
        description="key that clients must send, each a tenant of its own; repeat it for more; other users of the host "
        "see command lines, so prefer the environment or a file; without any key none is needed",
    )
    api_keys_file: Path | None = Field(
        None, description="file with a key a line, KEY or TENANT KEY, read at the start; # begins a comment"
    )

    def declared_keys(self) -> list[DeclaredKey]:
        """Returns the keys of the settings and of the file. Raises InvalidRequest."""
        of_file = [] if self.api_keys_file is None else keys_of_file(self.api_keys_file)
        return [declared_key(key) for key in self.api_key] + of_file

    def console_key(self) -> str | None:
        """Returns the key with which the console tries requests: the first one. Raises InvalidRequest."""
        if self.api_key or self.api_keys_file is None:
            return next(iter(self.api_key), None)
        return next((key.written for key in keys_of_file(self.api_keys_file)), None)


class ClusterSecretConfig(Section):
    """The secret by which the services of a cluster know each other. Services read it from their environment."""

    cluster_secret: str | None = Field(
        None,
        min_length=1,
        description="secret of the services of a cluster, at least 32 bytes (HALFMOON_CLUSTER_SECRET); none: "
        "`halfmoon up` makes one in the state directory, and a service alone is open and must listen on loopback",
    )
    cluster_secret_file: Path | None = Field(
        None, description="file that holds the cluster secret (HALFMOON_CLUSTER_SECRET_FILE)"
    )


class MutualTlsConfig(Section):
    """Certificates by which the services of a cluster know each other. Services read them from their environment."""

    tls_cert: Path | None = Field(
        None,
        description="a service's certificate for mutual TLS with other services, with its role in it "
        "(HALFMOON_TLS_CERT); see `halfmoon certs`",
    )
    tls_key: Path | None = Field(None, description="private key of tls_cert (HALFMOON_TLS_KEY)")
    tls_ca: Path | None = Field(None, description="authorities whose certificates a service trusts (HALFMOON_TLS_CA)")
    tls_dir: Path | None = Field(
        None,
        description="directory of `halfmoon certs init`: `halfmoon up` issues its services certificates from there, "
        "and they use mutual TLS; none: plain text on loopback, with the cluster secret",
    )
