"""What `halfmoon join` says before it starts anything."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.credentials.sources import FILE_VARIABLE, SECRET_VARIABLE
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES
from halfmoon.up.join import join, join_ranks
from halfmoon.up.up_options import UpOptions


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SECRET_VARIABLE, FILE_VARIABLE, *TLS_VARIABLES):
        monkeypatch.delenv(name, raising=False)


async def test_a_host_without_the_secret_is_told_how_to_get_it(tmp_path: Path) -> None:
    options = UpOptions(joins="127.0.0.1:7000", host_address="192.0.2.1", state_dir=tmp_path / "state")
    with pytest.raises(InvalidRequest, match=r"joining 127\.0\.0\.1:7000 needs .* --secrets"):
        await join(options, (), None, Console(file=io.StringIO()))
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
async def test_on_loopback_no_secret_is_needed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: object) -> bool:
        return True

    monkeypatch.setattr("halfmoon.up.join.until_stopped", start)
    options = UpOptions(joins=f"{address}:7000", host_address=address)
    assert await join(options, (), None, Console(file=io.StringIO()))


async def test_ranks_need_the_secret_itself_also_on_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TLS_VARIABLES[0], "a certificate alone")
    options = UpOptions(joins="127.0.0.1:7100", state_dir=tmp_path / "state")
    with pytest.raises(InvalidRequest, match="--secrets"):
        await join_ranks(options, 1, None, Console(file=io.StringIO()))
