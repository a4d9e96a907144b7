"""The gateway's own status: models, health, metrics, cluster and latest requests."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from halfmoon import __version__
from halfmoon.ledger.ledger import Ledger
from halfmoon.ledger.models import RequestRow
from halfmoon.policy.view.worker_view import WorkerView
from services.gateway.cluster.cluster import Cluster
from services.gateway.cluster.member import Member
from services.gateway.cluster.membership import Membership
from services.gateway.http.drain_gate import DrainGate
from services.gateway.http.received_request import query_number
from services.gateway.openai.document.docs_page import docs_page
from services.gateway.openai.document.openapi import openapi_document
from services.gateway.openai.served_model import ServedModel
from services.gateway.peers.offering import PeerGateways
from services.gateway.telemetry.host_links import hosts_of
from services.gateway.telemetry.metrics import GatewayMetrics
from services.gateway.telemetry.recent_telemetry import RecentTelemetry

_MAX_ROWS = 1_000
_MAX_LINKS = 1_000_000
_NO_SCRIPTS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_LIMITS = "step_tokens", "chunk_tokens", "max_running", "nests_steps"


class ControlEndpoints:
    """Serves the gateway's status. Owns nothing."""

    def __init__(
        self,
        model: ServedModel,
        cluster: Cluster,
        ledger: Ledger,
        metrics: GatewayMetrics,
        drain_gate: DrainGate,
        telemetry: RecentTelemetry,
        peers: PeerGateways,
    ) -> None:
        self._model = model
        self._cluster = cluster
        self._ledger = ledger
        self._metrics = metrics
        self._drain_gate = drain_gate
        self._telemetry = telemetry
        self._peers = peers
        self._started_s = cluster.clock()

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return web.json_response({"object": "list", "data": [self._model_card(name) for name in self._model.names]})

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}. Raises UnknownModel."""
        name = request.match_info["model_id"]
        self._model.check_name(name)
        return web.json_response(self._model_card(name))

    async def openapi(self, request: web.Request) -> web.Response:
        """GET /openapi.json."""
        return web.json_response(openapi_document())

    async def docs(self, request: web.Request) -> web.Response:
        """GET /docs."""
        return web.Response(text=docs_page(openapi_document()), content_type="text/html", headers=_NO_SCRIPTS)

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 only if a request could be placed now."""
        missing = list(self._cluster.membership.view().missing)
        if self._drain_gate.is_closed:
            return web.json_response({"status": "stopping", "missing": missing}, status=503)
        status = "unavailable" if missing else "ok"
        return web.json_response({"status": status, "missing": missing}, status=503 if missing else 200)

    async def version(self, request: web.Request) -> web.Response:
        """GET /version, as of vLLM."""
        return web.json_response({"version": __version__})

    async def load(self, request: web.Request) -> web.Response:
        """GET /load, as of vLLM: the requests to generate that are running in this gateway."""
        return web.json_response({"server_load": self._drain_gate.num_inside})

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        text = generate_latest(self._metrics.registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def cluster(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/cluster?max_links=36: shows links if there are at most this many, by default none.

        A link leads from each prefill worker to each decode worker: 16384 between 256 workers. Raises InvalidRequest.
        """
        max_links = query_number(request, "max_links", 0, _MAX_LINKS, least=0)
        now_s = self._cluster.clock()
        membership = self._cluster.membership
        members = list(membership.members())
        hosts = hosts_of(members, membership.stores.addresses)
        shows_links = sum(len(member.load.links) for member in members) <= max_links
        return web.json_response(
            {
                "gateway_id": self._cluster.gateway_id,
                "model": self._model.checkpoint_name,
                "model_fingerprint": self._model.fingerprint,
                "served_model": self._model.name,
                "context_tokens": membership.context_tokens(self._model.context_tokens),
                "uptime_s": now_s - self._started_s,
                "missing": list(membership.view().missing),
                "heartbeat_interval_s": membership.heartbeat_interval_s,
                "silent_after_s": membership.silent_after_s,
                "departed": self._telemetry.recently_left.shown(now_s),
                "hosts": [host._asdict() for host in hosts.hosts],
                "peers": [
                    {"url": url, "state": state, "offers": self._telemetry.offers_to(url)}
                    for url, state in self._peers.states()
                ],
                "host_links": [link._asdict() for link in hosts.links],
                "workers": [_worker(membership, member, now_s, shows_links) for member in members],
            }
        )

    async def requests(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/requests?limit=50: newest first. Raises InvalidRequest or Unavailable."""
        rows = await self._ledger.recent(query_number(request, "limit", 50, _MAX_ROWS))
        return web.json_response([_row(row) for row in rows])

    def _model_card(self, name: str) -> dict[str, Any]:
        model = self._model
        context_tokens = self._cluster.membership.context_tokens(model.context_tokens)
        card = {"id": name, "object": "model", "created": model.created, "owned_by": "halfmoon"}
        parent = None if name == model.name else model.name
        return {**card, "root": model.checkpoint_name, "parent": parent, "max_model_len": context_tokens}


def _worker(membership: Membership, member: Member, now_s: float, shows_links: bool) -> dict[str, Any]:
    identity, load, speculation = member.identity, member.load, member.latency.speculation
    decodes_s = [step.seconds for step in load.steps if not step.prefill_tokens]
    return {
        "worker_id": identity.worker_id,
        "role": member.role,
        "role_epoch": member.role_epoch,  # a change that names it fails if it is another by then
        "role_s": now_s - member.role_since_s if member.role_epoch else None,  # since the change
        "address": identity.address,
        "host": member.host,
        "unit": identity.unit or None,
        "device": identity.device,
        "model": identity.model,
        "pid": identity.pid,
        "version": identity.version,
        "age_s": now_s - member.heard_s,  # of the load report below
        "member_s": now_s - member.joined_s,
        "listening": member.listening,
        "kv_store": identity.kv_store or None,
        "context_tokens": identity.context_tokens,
        "total_blocks": identity.total_blocks,
        "layout": {field.name: getattr(identity.layout, field.name) for field in identity.layout.DESCRIPTOR.fields},
        "limits": {name: getattr(identity, name) for name in _LIMITS},
        "parallelism": {
            "tensor": identity.tensor_parallel,
            "pipeline": identity.pipeline_parallel,
            "sequence": max(identity.sequence_parallel, 1),
        },
        "load": {field.name: getattr(load, field.name) for field in load.DESCRIPTOR.fields if not field.is_repeated},
        "cached_blocks": membership.index.num_blocks(member.holder),
        "prefill_model": member.latency.prefill._asdict(),
        "step_model": member.latency.tbt._asdict(),
        "speculation": {**speculation._asdict(), "tokens_per_step": speculation.tokens_per_step},
        "prefill_free_in_s": max(_view(membership, member).prefill_free_s - now_s, 0.0),
        "predicted_step_s": _predicted_step_s(member),
        "measured_step_s": fmean(decodes_s) if decodes_s else None,
        "prediction_errors": {kind: figures._asdict() for kind, figures in member.latency.errors.items()},
        "links": [
            {"address": link.address, "bytes_per_s": link.bandwidth_bytes_per_s, "latency_s": link.latency_s}
            for link in (load.links if shows_links else ())
        ],
    }


def _view(membership: Membership, member: Member) -> WorkerView:
    row = membership.view().row(member.worker_id)
    assert row is not None
    return membership.view().worker(row)


def _predicted_step_s(member: Member) -> float | None:
    """The predicted step of the current decode batch; None without a batch or a model."""
    if member.role == "prefill":
        return None
    tokens = member.latency.speculation.tokens_per_step
    seconds = tokens * member.latency.tbt.seconds(member.load.num_running, member.load.context_tokens)
    return seconds if member.load.num_running and seconds else None


def _row(row: RequestRow) -> dict[str, Any]:
    return {**row.as_dict(), "created_at": row.created_at.isoformat()}
