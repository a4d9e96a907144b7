"""`python -m services.kvstore`: serves blocks until told to stop. Blocks held only in memory are then lost."""

from __future__ import annotations

import os

from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.service import serve_until_told_to_stop, service_main
from services.kvstore.assembly import running_store
from services.kvstore.metrics import KVStoreMetrics
from services.kvstore.settings import KVStoreSettings


async def serve(settings: KVStoreSettings) -> None:
    """Runs the store until told to stop. Raises InvalidRequest if it cannot listen or a tier cannot be opened."""
    credential = own_credential("store")
    async with running_store(settings, credential) as store:
        metrics, access = KVStoreMetrics(store.pool), CallAccess(credential)
        await serve_until_told_to_stop("kvstore", settings, store.registrations, metrics, access)


if __name__ == "__main__":
    os.umask(0o077)  # blocks are their owner's alone, also in a folder that is the cold tier
    service_main("kvstore", KVStoreSettings, serve)
