"""`python -m halfmoon.worker.joined_rank`: one rank of a worker that is on another host.

It ends with that worker's process. Under a supervisor it is then forked again, and joins the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from uuid import uuid4

from pydantic import Field
from pydantic_settings import BaseSettings

from halfmoon.config.observability import ObservedConfig
from halfmoon.engine.parallel.follower import follow_to_the_end
from halfmoon.engine.parallel.joined_ranks import JoinedRank, join
from halfmoon.errors import HalfmoonError
from halfmoon.kv.staged_shards import StagedShards
from halfmoon.rpc.addresses.towards import address_towards
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.credential import rank_key
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.server import StopReason, running_server, until_told_to_stop
from halfmoon.rpc.service import service_config, service_main
from halfmoon.rpc.transport.rank_fetches import RankFetches, RankKVServicer
from halfmoon.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

_AGAIN_S = 1.0  # after a worker that does not listen


class RankSettings(ObservedConfig, BaseSettings):
    """Environment (`HALFMOON_RANK_…`) and command line, read once."""

    model_config = service_config("rank")

    worker: str = Field(description="host:port where the worker awaits its ranks (its rank_listen)")
    model: str = Field("demo", description="'demo', a directory, a .gguf file or a Hugging Face id; the worker's")
    host: str = Field(description="a name that the ranks of this host share, and no others")
    index: int = Field(0, ge=0, description="the number of this rank among those of its host")


async def serve(settings: RankSettings) -> None:
    """Joins the worker and computes until that ends or this is told to stop."""
    credential = own_credential("worker")
    key = rank_key(credential)
    log.info("service.ready", extra={"worker": settings.worker})
    stopping = asyncio.create_task(until_told_to_stop())
    staged = StagedShards()
    kv = RankKVServicer(staged, RankFetches(staged, credential))
    own = await _address_towards(settings.worker, stopping)
    metrics, access = WorkerMetrics().rpc, CallAccess(credential)
    async with running_server(f"{own}:0", kv.registrations(), metrics, access=access) as server:
        await server.set_serving()
        joining = asyncio.create_task(_joined(settings, key, f"{own}:{server.port}"))
        await asyncio.wait({stopping, joining}, return_when=asyncio.FIRST_COMPLETED)
        if joining.done():
            rank = await joining
            log.info("registration.welcome", extra={"gateway_id": settings.worker})
            threading.Thread(target=_end_after, args=(rank,), name="life", daemon=True).start()
            arguments = (rank.steps, rank.copies, rank.address_here, settings.model, staged)
            threading.Thread(target=follow_to_the_end, args=arguments, name="follower", daemon=True).start()
            await stopping
        os._exit(0)  # a thread that waits for others cannot be stopped in any other way


async def _address_towards(worker: str, stopping: asyncio.Task[StopReason]) -> str:
    """This host's address, once there is a way to the worker."""
    while True:
        try:
            return await asyncio.to_thread(address_towards, worker)
        except OSError as error:
            log.warning("registration.lost", extra={"gateway": worker, "reason": str(error)})
        await asyncio.wait({stopping}, timeout=_AGAIN_S)
        if stopping.done():
            os._exit(0)


async def _joined(settings: RankSettings, key: bytes, kv_address: str) -> JoinedRank:
    who = (settings.host, uuid4().hex, settings.index, kv_address)
    while True:
        try:
            return await asyncio.to_thread(join, settings.worker, key, *who)
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            log.warning("registration.lost", extra={"gateway": settings.worker, "reason": reason})
        except HalfmoonError as error:
            log.warning("registration.refused", extra={"gateway": settings.worker, "reason": error.message})
        await asyncio.sleep(_AGAIN_S)


def _end_after(rank: JoinedRank) -> None:
    try:
        rank.life.recv()
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    service_main("rank", RankSettings, serve)
