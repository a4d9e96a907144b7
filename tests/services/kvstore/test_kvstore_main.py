"""Settings from both sources, and the program as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.service import read_settings
from services.kvstore import assembly
from services.kvstore.settings import KVStoreSettings


def settings(*arguments: str) -> KVStoreSettings:
    return read_settings(KVStoreSettings, arguments)


def test_defaults() -> None:
    assert settings().dram_bytes == 512 << 20
    assert settings().listen == "127.0.0.1:0"


@pytest.mark.parametrize("text", ["536870912", "512MiB"])
def test_sizes_have_units_or_are_bytes(text: str) -> None:
    assert settings("--dram-bytes", text).dram_bytes == 512 << 20


def test_the_command_line_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFMOON_KVSTORE_DRAM_BYTES", "1MiB")
    monkeypatch.setenv("HALFMOON_KVSTORE_METRICS_PORT", "9")
    assert settings().dram_bytes == 1 << 20
    got = settings("--dram-bytes", "2MiB")
    assert (got.dram_bytes, got.metrics_port) == (2 << 20, 9)


def test_unknown_flags_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings("--dram", "1")
    assert "--dram" in capsys.readouterr().err


def test_settings_do_not_change_and_are_checked() -> None:
    with pytest.raises(ValidationError):
        settings().listen = "x"  # type: ignore[misc]
    for bad in (["--dram-bytes", "0"], ["--log-level", "LOUD"], ["--lease-s", "-1"]):
        with pytest.raises(InvalidRequest):
            settings(*bad)


@pytest.mark.parametrize("free_bytes", [1 << 20, (1 << 20) - 1])
async def test_more_memory_than_there_is_is_warned_of(
    free_bytes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(assembly, "free_memory_bytes", lambda: free_bytes)
    async with assembly.running_store(settings("--dram-bytes", "1MiB")):
        pass
    assert ("arena.exceeds_memory" in caplog.text) == (free_bytes < 1 << 20)


def test_tiers_have_policies_and_codecs() -> None:
    options = settings("--disk-policy", "lru", "--cold-codec", "int8+zstd", "--ttl-s", "60").pool_options()
    assert (options.dram_policy, options.disk_policy, str(options.cold_codec)) == ("cost-aware", "lru", "int8+zstd")
    assert (str(options.disk_codec), options.ttl_s) == ("raw", 60)
    with pytest.raises(InvalidRequest):
        settings("--disk-policy", "random")
    with pytest.raises(InvalidRequest, match="int8"):
        settings("--disk-codec", "gzip").pool_options()


def test_a_password_is_not_logged() -> None:
    shown = settings("--cold-url", "redis://me:secret@host:1/0").as_logged()
    assert shown["cold_url"] == "redis://***@host:1/0"
    assert "hush" not in str(settings("--cold-url", "s3://b?secret_access_key=hush").as_logged())


def test_a_variable_that_names_no_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFMOON_KVSTORE_DRAM_BITES", "1MiB")
    with pytest.raises(InvalidRequest, match="HALFMOON_KVSTORE_DRAM_BITES"):
        settings()


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.kvstore", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


def test_the_program_says_ready_and_stops_cleanly() -> None:
    with _start("--advertise", "store:7003", "--metrics-port", "0") as process:
        assert process.stderr is not None
        try:
            events = [json.loads(process.stderr.readline()) for _ in range(2)]
        finally:
            process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert [event["event"] for event in events] == ["service.settings", "service.ready"]
    assert events[1]["address"] == "store:7003"
    assert (process.returncode, rest) == (0, "")


def test_what_it_makes_is_its_owners_alone(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    with _start("--disk-dir", str(tmp_path / "disk"), "--cold-url", f"file://{tmp_path}/cold") as process:
        assert process.stderr is not None
        try:
            while json.loads(process.stderr.readline())["event"] != "service.ready":
                continue
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        finally:
            process.send_signal(signal.SIGTERM)
    assert modes == {"disk": 0o700, "cold": 0o700}


def test_what_cannot_start_says_why() -> None:
    with _start("--listen", "256.0.0.1:1") as process:
        assert process.stderr is not None
        last = json.loads(process.stderr.read().splitlines()[-1])
    assert process.returncode == 1
    assert last["event"] == "service.failed"
    assert "256.0.0.1:1" in last["reason"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(("--disk-dir", "/dev/null/x"), "/dev/null/x"), (("--cold-url", "ftp://x"), "ftp://x")],
)
def test_a_tier_that_cannot_be_had_is_said(arguments: tuple[str, ...], reason: str) -> None:
    with _start(*arguments) as process:
        assert process.stderr is not None
        last = json.loads(process.stderr.read().splitlines()[-1])
    assert (process.returncode, last["event"]) == (1, "service.failed")
    assert reason in last["reason"]
