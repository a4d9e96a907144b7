"""The certificates that `halfmoon up --tls-dir` gives its services."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from halfmoon.errors import InvalidRequest, NotFound
from halfmoon.rpc.credentials.roles import CLUSTER_ROLES
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.tls.authority import Authority
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES
from halfmoon.up.config.options import up_options
from halfmoon.up.config.service_environment import service_environment
from halfmoon.up.config.system_config import SystemConfig
from halfmoon.up.specs.service_specs import trusted
from halfmoon.up.state.certificates import RoleCertificates
from halfmoon.up.supervision.child import ServiceSpec

SECRET = "s" * 40


@pytest.fixture
def certificates(tmp_path: Path) -> RoleCertificates:
    Authority.create(tmp_path / "ca")
    made = RoleCertificates(tmp_path / "ca", tmp_path / "state")
    made.issue()
    return made


def test_each_child_gets_the_certificate_of_its_role(certificates: RoleCertificates) -> None:
    for role in CLUSTER_ROLES:
        spec = trusted(ServiceSpec("s", (), {}, cluster_role=role), SECRET, certificates)
        credential = own_credential(role, spec.environment)
        assert credential is not None
        assert credential.tls is not None
        assert (credential.tls.current.role, credential.role_of(credential.tokens[role])) == (role, role)


def test_services_take_over_what_is_issued_anew(certificates: RoleCertificates) -> None:
    first = own_credential("store", certificates.environment("store"))
    certificates.issue()
    second = own_credential("store", certificates.environment("store"))
    assert first is not None and first.tls is not None  # noqa: PT018
    assert second is not None and second.tls is not None  # noqa: PT018
    assert first.tls.current.cert != second.tls.current.cert


async def test_they_are_renewed_when_the_clock_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the process has run for so long: a suspended host does not run, and clocks are set."""
    Authority.create(tmp_path / "ca")
    start, day = datetime.now(UTC), 0
    looks = iter([9, 11, 20, 5, 6])  # those of days 11 and 5 find them due
    renewed = []

    def clock() -> datetime:
        return start + timedelta(days=day)

    made = RoleCertificates(tmp_path / "ca", tmp_path / "state", clock)

    async def look(_: float) -> None:
        nonlocal day
        try:
            day = next(looks)
        except StopIteration:
            raise asyncio.CancelledError from None

    async def on_renewed() -> None:
        renewed.append(day)

    monkeypatch.setattr(asyncio, "sleep", look)
    with pytest.raises(asyncio.CancelledError):
        await made.renew(pytest.fail, on_renewed)
    assert renewed == [11, 5]


def test_without_an_authority_old_certificates_are_removed(certificates: RoleCertificates, tmp_path: Path) -> None:
    plain = RoleCertificates(None, tmp_path / "state")
    plain.issue()
    assert not list((tmp_path / "state").iterdir())
    assert plain.environment("store") == {}


def test_a_directory_without_an_authority(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="halfmoon certs init"):
        RoleCertificates(tmp_path, tmp_path / "state").issue()


def test_settings_of_services_and_of_up_are_told_apart() -> None:
    files = {"tls_cert": "/c", "tls_key": "/k", "tls_ca": "/a"}
    config = SystemConfig.model_validate({"security": files})
    expected = dict(zip(TLS_VARIABLES, ("/c", "/k", "/a"), strict=True))
    for service in ("gateway", "prefill", "kvstore", "planner"):
        added = service_environment(config, service, (), {})
        assert added.items() >= expected.items()
        assert not [name for name in added if name.startswith("HALFMOON_GATEWAY_TLS")]
    own = service_environment(config, "kvstore", (), {"HALFMOON_TLS_CERT": "/mine"})
    assert not own.keys() & set(TLS_VARIABLES)  # of two places, one has them all
    with pytest.raises(InvalidRequest, match="tls_dir"):
        up_options(config)
    assert up_options(SystemConfig.model_validate({"security": {"tls_dir": "ca"}})).tls_dir == Path("ca").absolute()
