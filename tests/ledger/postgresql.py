"""A PostgreSQL server of a test's own, in a directory of its own, reached through a Unix socket."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

_START_S = 60.0
_AS_USER = "import os, sys; os.setuid(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
"""Python, to become somebody and then another program. Popen's own `user` would fork this process, and gRPC, whose
threads run, has crashed such children before they became the program."""
_SETTINGS = ("fsync=off", "full_page_writes=off", "listen_addresses=", "max_connections=60")


def find_programs() -> Path | None:
    """Where `initdb` and `postgres` are; None where PostgreSQL is not installed."""
    on_path = shutil.which("initdb")
    if on_path is not None:
        return Path(on_path).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return installed[-1].parent if installed else None


class PostgresqlServer:
    """Owns one server process; databases in it are made as they are needed."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self._directory = directory
        self._user = _unprivileged_user()
        shutil.chown(directory, self._user)
        data = str(directory / "data")
        self._run([programs / "initdb", "-D", data, "-U", "halfmoon", "-A", "trust", "-N", "-E", "UTF8"])
        self._command = [str(programs / "postgres"), "-D", data]
        self._command += [
            part for setting in (*_SETTINGS, f"unix_socket_directories={directory}") for part in ("-c", setting)
        ]
        self.process = self._started()

    def start(self) -> None:
        """Again, after `stop`, with what is in it."""
        self.process = self._started()
        self.until_ready()

    def _started(self) -> subprocess.Popen[bytes]:
        with (self._directory / "log").open("ab") as output:
            return subprocess.Popen(
                self._as_user(self._command),
                cwd=self._directory,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def new_database(self, options: str = "") -> str:
        """The URL of an empty database. `options`: of CREATE DATABASE."""
        name = f"d{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self._conninfo(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} {options}".encode())
        return f"postgresql://halfmoon@/{name}?host={self._directory}"

    def signal(self, number: signal.Signals) -> None:
        """To the server and all its processes, such as SIGSTOP."""
        for pid in (self.process.pid, *_children(self.process.pid)):
            os.kill(pid, number)

    def until_ready(self) -> None:
        """Raises when it does not answer in time."""
        give_up_s = time.monotonic() + _START_S
        while True:
            try:
                psycopg.connect(self._conninfo()).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > give_up_s or self.process.poll() is not None:
                    said = (self._directory / "log").read_text()
                    raise RuntimeError(f"its exit status is {self.process.poll()}; {said}") from None
                time.sleep(0.05)

    def stop(self) -> None:
        """At once, whoever is connected. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait(_START_S)

    def _conninfo(self) -> str:
        return f"host={self._directory} user=halfmoon dbname=postgres"

    def _run(self, command: list[str | Path]) -> None:
        subprocess.run(self._as_user(command), cwd=self._directory, check=True, stdout=subprocess.DEVNULL)

    def _as_user(self, command: Sequence[str | Path]) -> list[str]:
        return [sys.executable, "-S", "-c", _AS_USER, str(self._user), *map(str, command)]


@contextmanager
def running_postgresql(programs: Path) -> Iterator[PostgresqlServer]:
    """A server that answers; gone with the block."""
    directory = Path(tempfile.mkdtemp(prefix="halfmoon-pg-"))
    try:
        server = PostgresqlServer(programs, directory)
        try:
            server.until_ready()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory)


def installed_postgresql() -> Iterator[PostgresqlServer]:
    """What a fixture yields: a server, or the test is skipped where none is installed."""
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with running_postgresql(programs) as server:
        yield server


def _unprivileged_user() -> int:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return os.getuid()
    return Path("/var/lib/postgresql").stat().st_uid if Path("/var/lib/postgresql").exists() else 65534


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
