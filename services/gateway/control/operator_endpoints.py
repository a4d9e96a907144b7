"""What vLLM offers to operators under its own paths: /reset_prefix_cache and /server_info."""

from __future__ import annotations

import asyncio
import platform
import sys
from typing import Any

from aiohttp import web

from halfmoon import __version__
from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.host_limits import num_cores
from halfmoon.pb.decode_pb2 import EmptyCacheRequest
from services.gateway.cluster.cluster import Cluster
from services.gateway.control.store_view import StoreView
from services.gateway.openai.served_model import ServedModel
from services.gateway.settings import GatewaySettings

_DEADLINE_S = 10.0
_TRUTHS = {"": False, "false": False, "0": False, "true": True, "1": True}


class OperatorEndpoints:
    """Serves them. Owns nothing."""

    def __init__(self, model: ServedModel, cluster: Cluster, stores: StoreView, settings: GatewaySettings) -> None:
        self._model = model
        self._cluster = cluster
        self._stores = stores
        self._settings = settings

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """POST /reset_prefix_cache?reset_external=false: empties the workers' prefix caches, and stores if asked to.

        Raises InvalidRequest. `success` is false while blocks are left: those that running requests use.
        """
        if _truth(request, "reset_running_requests"):
            why = "reset_running_requests: running requests keep their blocks; cancel them, or wait"
            raise InvalidRequest(why, param="reset_running_requests")
        with_stores = _truth(request, "reset_external")
        members = self._cluster.membership.members()
        workers = await asyncio.gather(*(self._empty(member.worker_id) for member in members))
        stores = await self._stores.empty() if with_stores else []
        is_empty = all(one.get("num_left") == 0 for one in workers) and not any("error" in one for one in stores)
        return web.json_response({"success": is_empty, "workers": workers, "stores": stores})

    async def server_info(self, request: web.Request) -> web.Response:
        """GET /server_info: what this gateway was started with, without secrets."""
        model = self._model
        return web.json_response(
            {
                "version": __version__,
                "model": {
                    "name": model.name,
                    "checkpoint": model.checkpoint_name,
                    "fingerprint": model.fingerprint,
                    "vocab_size": model.vocab_size,
                    "context_tokens": self._cluster.membership.context_tokens(model.context_tokens),
                    "tool_format": model.tool_format,
                    "splits_reasoning": model.reasons,
                },
                "settings": self._settings.as_logged(),
                "system_env": {
                    "python": sys.version.split()[0],
                    "platform": platform.platform(),
                    "cpus": num_cores(),
                },
            }
        )

    async def _empty(self, worker_id: str) -> dict[str, Any]:
        try:
            worker = self._cluster.worker(worker_id)
            answer = await worker.peer.call(worker.decode.EmptyCache, EmptyCacheRequest(), deadline_s=_DEADLINE_S)
        except HalfmoonError as error:
            return {"worker_id": worker_id, "error": error.message}
        return {"worker_id": worker_id, "num_left": answer.num_left}


def _truth(request: web.Request, name: str) -> bool:
    value = request.query.get(name, "").lower()
    if value not in _TRUTHS:
        raise InvalidRequest(f"{name} is true or false", param=name)
    return _TRUTHS[value]
