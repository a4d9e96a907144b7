"""`python -m services.kvstore`: serves blocks until told to stop. At SIGTERM they are forgotten: it is a cache."""

from __future__ import annotations

import asyncio
import logging

from halfmoon.rpc.server import advertised_address, running_server, until_told_to_stop
from halfmoon.rpc.service import metrics_endpoint, service_main
from services.kvstore.metrics import KVStoreMetrics
from services.kvstore.servicer import KVStoreServicer
from services.kvstore.settings import KVStoreSettings
from services.kvstore.store import BlockStore

log = logging.getLogger(__name__)


async def serve(settings: KVStoreSettings) -> None:
    """Runs the store until it is told to stop. Raises InvalidRequest if it cannot listen."""
    stopping = asyncio.create_task(until_told_to_stop())  # from here on SIGTERM is heard
    store = BlockStore(int(settings.dram_bytes))
    metrics = KVStoreMetrics(store.stats)
    services = KVStoreServicer(store, settings.lease_s).registrations()
    async with running_server(settings.listen, services, metrics.rpc) as server:
        with metrics_endpoint(settings.metrics_port, metrics.registry):
            await server.set_serving()
            address = advertised_address(settings.listen, server.port, settings.advertise)
            log.info("service.ready", extra={"address": address})
            await stopping


if __name__ == "__main__":
    service_main("kvstore", KVStoreSettings, serve)
