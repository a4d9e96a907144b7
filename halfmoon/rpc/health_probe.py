"""`python -m halfmoon.rpc.health_probe HOST:PORT`: exits with 0 if the service is SERVING, else 1 and the reason."""

from __future__ import annotations

import asyncio
import os
import sys

from grpc_health.v1 import health_pb2, health_pb2_grpc

from halfmoon.errors import HalfmoonError
from halfmoon.rpc.credentials.credential import credential_of_certificate
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.tls.identity_files import environment_paths, identity_files

_DEADLINE_S = 3.0


async def probe(address: str, deadline_s: float = _DEADLINE_S) -> str:
    """The name of the health status; a service on mutual TLS is asked with its own certificate.

    Raises Unavailable or DeadlineExceeded without an answer.
    """
    paths = environment_paths(os.environ)
    credential = None if paths is None else credential_of_certificate(identity_files(paths, None))
    async with Peer(address, credential) as peer:
        check = health_pb2_grpc.HealthStub(peer.channel).Check
        response = await peer.call(check, health_pb2.HealthCheckRequest(), deadline_s=deadline_s)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main() -> None:
    """Reads the address from the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m halfmoon.rpc.health_probe HOST:PORT")
    try:
        status = asyncio.run(probe(sys.argv[1]))
    except HalfmoonError as err:
        sys.exit(f"{sys.argv[1]}: {err.message}")
    if status != "SERVING":
        sys.exit(f"{sys.argv[1]}: {status}")


if __name__ == "__main__":
    main()
