"""`python -m services.kvstore`: serves blocks until told to stop. At SIGTERM they are forgotten: it is a cache."""

from __future__ import annotations

from halfmoon.rpc.service import serve_until_told_to_stop, service_main
from services.kvstore.metrics import KVStoreMetrics
from services.kvstore.servicer import KVStoreServicer
from services.kvstore.settings import KVStoreSettings
from services.kvstore.store import BlockStore


async def serve(settings: KVStoreSettings) -> None:
    """Runs the store until it is told to stop. Raises InvalidRequest if it cannot listen."""
    store = BlockStore(int(settings.dram_bytes))
    metrics = KVStoreMetrics(store.stats)
    services = KVStoreServicer(store, settings.lease_s).registrations()
    await serve_until_told_to_stop(settings, services, metrics)


if __name__ == "__main__":
    service_main("kvstore", KVStoreSettings, serve)
