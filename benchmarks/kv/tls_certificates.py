"""Certificates for benchmarks over mutual TLS, of an authority that ends with the benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.credentials.roles import ClusterRole
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.up.state.certificates import RoleCertificates


@dataclass(frozen=True, slots=True)
class BenchmarkCertificates:
    """Certificates of every role."""

    issued: RoleCertificates

    @property
    def worker(self) -> Mapping[str, str]:
        """Environment of a worker's process."""
        return self.issued.environment("worker")

    def credential(self, role: ClusterRole) -> Credential:
        """Credential of this process in a role."""
        credential = own_credential(role, self.issued.environment(role))
        assert credential is not None
        return credential


@contextmanager
def benchmark_certificates() -> Iterator[BenchmarkCertificates]:
    """Issues certificates to a directory that ends with the block."""
    from halfmoon.rpc.tls.authority import Authority

    with TemporaryDirectory(prefix="halfmoon-benchmark-") as directory:
        Authority.create(Path(directory) / "authority")
        issued = RoleCertificates(Path(directory) / "authority", Path(directory))
        issued.issue()
        yield BenchmarkCertificates(issued)
