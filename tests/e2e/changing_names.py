"""Workers find gateways by a DNS name whose addresses change. A program of its own, for a namespace with a resolver:

python -m tests.e2e.changing_names DIRECTORY, where /etc/resolv.conf names 127.0.0.1 alone.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

NAME = "gateways.halfmoon.test"
PORT = 7000
PATIENCE_S = 100.0


class NameServer:
    """Answers DNS queries over UDP. Owns the addresses of one name; others have none."""

    def __init__(self) -> None:
        self.addresses: Sequence[str] = ()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(512)
            self._socket.sendto(self._answer(query), client)

    def _answer(self, query: bytes) -> bytes:
        end = query.index(b"\0", 12) + 1
        labels, kind = query[12:end], struct.unpack("!H", query[end : end + 2])[0]
        asked = b"".join(bytes([len(label)]) + label.encode() for label in NAME.split(".")) + b"\0"
        found = self.addresses if labels == asked and kind == 1 else ()
        status = 0x8180 if labels == asked else 0x8183  # NXDOMAIN
        header = query[:2] + struct.pack("!HHHHH", status, 1, len(found), 0, 0)
        records = b"".join(struct.pack("!HHHIH", 0xC00C, 1, 1, 0, 4) + socket.inet_aton(one) for one in found)
        return header + query[12 : end + 4] + records


class Gateway:
    """One gateway at an address of its own."""

    def __init__(self, directory: Path, address: str) -> None:
        self._log = directory / f"gateway-{address}.log"
        where = ("--host", address, "--port", "0", "--cluster-listen", f"{address}:{PORT}")
        options = (*where, "--model-name", "demo", "--state-dir", str(directory / address), "--slo", "off")
        self._process = started(self._log, "services.gateway", *options)
        until(lambda: bool(self._announced()), "gateway", self._log)
        self.url: str = self._announced()["http"]

    def _announced(self) -> dict[str, Any]:
        lines = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        return next((line for line in lines if line.get("event") == "service.ready"), {})

    def workers(self) -> int:
        """The number of its members that serve."""
        with urllib.request.urlopen(f"{self.url}/halfmoon/v1/cluster", timeout=10) as response:
            found = json.load(response)["workers"]
        return sum(worker["listening"] or worker["role"] == "prefill" for worker in found)

    def answers(self) -> None:
        """Asks one request. Raises OSError and AssertionError."""
        body = {"model": "demo", "prompt": "Once", "max_tokens": 20, "min_tokens": 20}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 20

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait(PATIENCE_S)


def started(log: Path, module: str, *options: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        command = [sys.executable, "-m", module, *options]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file)


def until(holds: Callable[[], bool], what: str, log: Path) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > give_up_s:
            raise AssertionError(f"no {what}: {log.read_text()[-2_000:]}")
        time.sleep(0.1)


def main(directory: Path) -> None:
    """Raises AssertionError where workers do not follow the name."""
    names = NameServer()
    with ExitStack() as stack:
        first, second = (Gateway(directory, address) for address in ("127.0.0.2", "127.0.0.3"))
        stack.callback(second.stop)
        log = directory / "workers.log"
        counts = ("--prefill", "1", "--decode", "1", "--time-scale", "20", "--model-name", "demo")
        workers = started(log, "services.simulation", "--gateway", f"{NAME}:{PORT}", *counts)
        stack.callback(workers.wait, PATIENCE_S)
        stack.callback(workers.terminate)

        def joins(gateway: Gateway, number: int = 2) -> None:
            until(lambda: gateway.workers() == number, f"{number} workers", log)

        time.sleep(1.0)  # the name has no address yet
        assert workers.poll() is None
        names.addresses = ("127.0.0.2",)
        joins(first)
        first.answers()
        assert second.workers() == 0
        names.addresses = ("127.0.0.2", "127.0.0.3")
        joins(second)
        second.answers()
        names.addresses = ("127.0.0.3",)
        first.answers()  # who is no longer named is served until it ends
        first.stop()
        second.answers()
        third = Gateway(directory, "127.0.0.4")
        stack.callback(third.stop)
        names.addresses = ("127.0.0.3", "127.0.0.4")
        joins(third)
        third.answers()
        names.addresses = ()  # nobody answers for it: members stay members
        second.answers()
        third.answers()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
