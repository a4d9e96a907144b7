"""The gateway's life: starts ledger, cluster, RPC server and HTTP server, and stops them in the opposite order."""

from __future__ import annotations

import asyncio
import random
import secrets
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web

from halfmoon.background import logged, running
from halfmoon.errors import InvalidRequest
from halfmoon.ledger.ledger import open_ledger
from halfmoon.pb.gateway_pb2_grpc import add_ClusterServicer_to_server
from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.placement.device_rules import DeviceRule
from halfmoon.policy.placement.place import PlacementRules
from halfmoon.policy.wait_limits import WaitLimits
from halfmoon.rpc.addresses.towards import bracketed, reachable
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.credentials.operator_token import kept_token
from halfmoon.rpc.server import RunningServer, advertised_address, running_server
from halfmoon.rpc.telemetry.spans import NO_TRACER, Tracer
from halfmoon.rpc.tls.http_context import server_context
from services.gateway.app import Access, Endpoints, make_app
from services.gateway.batches.batch_endpoints import BatchEndpoints
from services.gateway.batches.batch_runner import BatchRunner
from services.gateway.batches.file_endpoints import FileEndpoints
from services.gateway.cluster.cluster import Cluster, running_cluster
from services.gateway.cluster.held_answers import HeldAnswers
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.prefix_replication import PrefixCopies
from services.gateway.cluster.store_watch import StoreWatch
from services.gateway.control.active_admission import ActiveAdmission, AdmissionEndpoint
from services.gateway.control.active_classes import ActiveClasses, declarations_of
from services.gateway.control.active_tenants import ActiveTenants, declared_tenants
from services.gateway.control.autopilot_endpoints import AutopilotEndpoints
from services.gateway.control.class_endpoints import ClassEndpoints
from services.gateway.control.console_endpoints import ConsoleEndpoints
from services.gateway.control.known_rows import KnownRows
from services.gateway.control.ledger_sync import LedgerSync
from services.gateway.control.live_workload import WorkloadEndpoint
from services.gateway.control.operator_endpoints import OperatorEndpoints
from services.gateway.control.status_endpoints import ControlEndpoints
from services.gateway.control.store_view import StoreView
from services.gateway.control.tenant_endpoints import TenantEndpoints
from services.gateway.control.worker_endpoints import WorkerEndpoints
from services.gateway.detached import DetachedRuns
from services.gateway.generation import Generation
from services.gateway.generation_endpoints import GenerationEndpoints
from services.gateway.http.api_keys import ApiKeys
from services.gateway.http.browser_guard import BrowserGuard
from services.gateway.http.connection_guard import ConnectionGuard, guard_connections
from services.gateway.http.cors import Cors
from services.gateway.http.drain_gate import DrainGate
from services.gateway.http.listeners import listen
from services.gateway.http.operator_access import OperatorAccess
from services.gateway.http.rate_limits import RateLimits
from services.gateway.http.sibling_backlog import SiblingBacklog
from services.gateway.openai.served_model import ServedModel
from services.gateway.openai.tokenizer_endpoints import TokenizerEndpoints
from services.gateway.openai.tokenizer_threads import TokenizerThreads
from services.gateway.peers.offering import PeerSettings, peer_gateways
from services.gateway.responses.background import BackgroundResponses
from services.gateway.responses.conversations import Conversations
from services.gateway.responses.response_endpoints import ResponseEndpoints
from services.gateway.routing.early_rejection import EarlyRejection
from services.gateway.routing.handover_codec import HandoverCodec
from services.gateway.routing.hot_spots import HotSpotWatch
from services.gateway.routing.relay import Relay
from services.gateway.routing.routing_context import RoutingContext
from services.gateway.running_repeats import RunningRepeats
from services.gateway.sandbox.constraint_checker import ConstraintChecker
from services.gateway.sandbox.request_templates import RequestTemplates
from services.gateway.sandbox.sandbox import Sandbox
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry.label_digests import LabelDigests, label_key
from services.gateway.telemetry.load_header import LoadHeader
from services.gateway.telemetry.metrics import GatewayMetrics
from services.gateway.telemetry.recent_telemetry import RecentTelemetry
from services.gateway.telemetry.request_record import RequestRecorder

_GOODBYE_S = 0.5  # for error events to reach their clients, after the drain


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that is listening."""

    http: str  # http://host:port, or https
    address: str  # host:port where workers register
    cluster: Cluster
    routing: RoutingContext
    keys: ApiKeys
    drain_gate: DrainGate


@asynccontextmanager
async def running_gateway(
    settings: GatewaySettings,
    model: ServedModel,
    tracer: Tracer = NO_TRACER,
    credential: Credential | None = None,
) -> AsyncIterator[RunningGateway]:
    """A gateway that serves `model`; leaving the block stops it within `drain_s` and about a second.

    Raises InvalidRequest for an address that cannot be bound, or certificates that cannot be used.
    """
    tls = _tls(settings)
    membership = Membership(model.fingerprint, settings.heartbeat_interval_s, settings.kv_store, model.adapters)
    drain_gate = DrainGate(settings.drain_s)
    gateway_id, telemetry = f"gateway-{secrets.token_hex(4)}", RecentTelemetry()
    async with (
        open_ledger(settings.ledger, gateway_id, may_be_away=True) as ledger,
        running_cluster(gateway_id, membership, credential=credential) as cluster,
        Sandbox() as sandbox,
        TokenizerThreads() as threads,
        peer_gateways(_peers(settings), gateway_id, telemetry, cluster.clock) as peers,
    ):
        if settings.trust_request_chat_template:
            model = replace(model, render_template=RequestTemplates(sandbox, asyncio.get_running_loop()).render)
        routing = _routing(settings, cluster, credential, telemetry)
        metrics = GatewayMetrics(membership, ledger, telemetry, routing.copies, model.name)
        hot_spots = HotSpotWatch(routing)
        relay = _relay(settings, cluster, routing, hot_spots)
        stores = StoreView(lambda: membership.stores.addresses, credential)
        known_classes = KnownRows(settings.state_dir, "classes", settings.ledger)
        known_tenants = KnownRows(settings.state_dir, "tenants", settings.ledger)
        keys, limits = ApiKeys(), RateLimits(settings.num_gateways)
        labels = LabelDigests(label_key(settings.state_dir))
        recorder = RequestRecorder(model.name, ledger, metrics, telemetry, tracer, limits, labels)
        tenants = ActiveTenants(
            ledger.tenants, keys, routing.admission.shares, known_tenants, declared_tenants(settings)
        )
        classes = ActiveClasses(ledger.classes, routing.admission, known_classes, declarations_of(settings))
        admission = ActiveAdmission(ledger.admission, routing.admission, settings.admission)
        sync = LedgerSync(ledger, classes, tenants, admission, routing.admission.lengths, membership, gateway_id)
        await sync.load(settings.host)
        generation = Generation(
            model,
            membership,
            EarlyRejection(routing),
            relay,
            ConstraintChecker(sandbox).check,
            threads,
            limits,
            HeldAnswers(cluster, settings.join_wait_s, settings.request_deadline_s),
            is_cache_shared=settings.shared_cache,
        )
        conversations = Conversations(ledger.responses, settings.store_responses, settings.responses_keep_days)
        detached = DetachedRuns(generation, conversations, recorder, drain_gate)
        background = BackgroundResponses(
            ledger.responses,
            conversations,
            detached.run,
            lambda name: routing.admission.classes.named(name),
            lambda name: keys.table.tenant(name),
            gateway_id,
            settings.background_concurrency,
        )
        batches = BatchRunner(
            ledger.batches,
            ledger.files,
            detached.run,
            lambda: routing.admission.classes.of_batches,
            lambda name: keys.table.tenant(name),
            gateway_id,
            settings.batch_concurrency,
            settings.max_body_bytes,
            settings.files_keep_days,
        )
        files = FileEndpoints(
            ledger.files, limits, settings.file_max_bytes, settings.files_max_bytes, settings.files_keep_days
        )
        kept_responses = ResponseEndpoints(ledger.responses, background)
        endpoints = Endpoints(
            GenerationEndpoints(
                generation,
                recorder,
                drain_gate,
                limits,
                RunningRepeats(settings.disconnect_grace_s),
                conversations,
                background,
                kept_responses,
                peers,
            ),
            kept_responses,
            files,
            BatchEndpoints(ledger.batches, batches, limits, is_open=settings.batch_concurrency > 0),
            TokenizerEndpoints(model, membership, threads, limits, is_cache_shared=settings.shared_cache),
            ControlEndpoints(model, cluster, ledger, metrics, drain_gate, telemetry, peers),
            OperatorEndpoints(model, cluster, stores, settings),
            WorkerEndpoints(cluster, ledger.worker_changes, settings.role_dwell_s),
            ClassEndpoints(classes),
            TenantEndpoints(ledger, tenants, stores),
            AdmissionEndpoint(admission),
            AutopilotEndpoints(cluster, ledger, telemetry.traffic, settings.num_gateways),
            ConsoleEndpoints(cluster, ledger, classes, telemetry, stores),
            WorkloadEndpoint(ledger),
            LoadHeader(membership),
        )
        add = partial(add_ClusterServicer_to_server, cluster)
        async with AsyncExitStack() as stack:  # 19 nested blocks crash the compilers of Python 3.12.0 and 3.12.1
            server = await stack.enter_async_context(
                running_server(
                    settings.cluster_listen,
                    [add],
                    metrics.rpc,
                    grace_s=0.2,
                    tracer=tracer,
                    access=CallAccess(credential),
                )
            )
            followers: list[Coroutine[Any, Any, object]] = [
                logged(routing.copies.ask_all()),
                logged(StoreWatch(cluster, credential).follow_members()),
                sync.follow(settings.ledger_poll_s),
                ledger.retention.keep(settings.ledger_keep_days),
                ledger.responses.keep(settings.responses_max_bytes),
                ledger.files.keep(),
                ledger.batches.keep(settings.files_keep_days),
                logged(background.tasks.follow()),
                logged(batches.tasks.follow()),
                logged(telemetry.follow(membership, cluster.clock)),
            ]
            if settings.hot_spots:
                followers.append(logged(hot_spots.follow()))
            for follower in followers:
                await stack.enter_async_context(running(follower))
            runner = await _runner(endpoints, keys, limits, settings, metrics)
            siblings = SiblingBacklog(runner, settings.sibling_descriptors, tls, settings.header_timeout_s)
            try:
                port = await listen(runner, settings, tls)
                if not settings.first_workers_wait_s:
                    await server.set_serving()
                address = advertised_address(settings.cluster_listen, server.port, settings.advertise_cluster)
                health = _set_serving(server, cluster, settings.first_workers_wait_s)
                async with running(logged(siblings.accept())), running(logged(health)):
                    await asyncio.sleep(0)  # all tasks begin, even if this gateway is told to stop already
                    yield RunningGateway(_url(settings, port), address, cluster, routing, keys, drain_gate)
            finally:
                await _stop(drain_gate, cluster, server, runner)
                await stores.close()


def _routing(
    settings: GatewaySettings, cluster: Cluster, credential: Credential | None, telemetry: RecentTelemetry
) -> RoutingContext:
    devices = tuple(map(DeviceRule.parse, settings.prefill_devices))
    rules = PlacementRules(
        settings.placement,
        settings.balancing_threshold,
        settings.conditional_disaggregation,
        devices,
        settings.max_prefill_degree,
    )
    admission = AdmissionController(settings.admission, rules, random.Random(), is_alone=settings.num_gateways == 1)
    copies_bytes_per_s = settings.replica_mbps * 1e6 if settings.placement == "kvcache-centric" else 0.0
    copies = PrefixCopies(cluster.membership, copies_bytes_per_s, credential)
    return RoutingContext(admission, cluster.membership, cluster.clock, telemetry, copies)


def _peers(settings: GatewaySettings) -> PeerSettings:
    deadline_s = settings.request_deadline_s
    return PeerSettings(settings.peer, settings.peer_key, settings.peer_ca, settings.peer_wait_s, deadline_s)


def _relay(settings: GatewaySettings, cluster: Cluster, routing: RoutingContext, hot_spots: HotSpotWatch) -> Relay:
    codec = HandoverCodec.parse(settings.handover_codec)
    wait_limits = WaitLimits(settings.failover_wait_s, settings.return_wait_s)
    return Relay(cluster, routing, settings.request_deadline_s, wait_limits, codec, hot_spots)


async def _runner(
    endpoints: Endpoints, keys: ApiKeys, limits: RateLimits, settings: GatewaySettings, metrics: GatewayMetrics
) -> web.AppRunner:
    """The application, set up and not listening yet."""
    access = Access(
        keys,
        limits,
        OperatorAccess(keys, settings.host, settings.operator_secret(), kept_token(settings.state_dir)),
        Cors(settings.allowed_origins),
        BrowserGuard(settings.host, settings.allowed_hosts, settings.allowed_origins),
        settings.max_body_bytes,
    )
    runner = web.AppRunner(
        make_app(endpoints, access),
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=settings.keepalive_timeout_s,
        shutdown_timeout=_GOODBYE_S,
        auto_decompress=False,  # receive_body does it
        max_line_size=settings.max_header_bytes,
        max_field_size=settings.max_header_bytes,
        max_headers=settings.max_headers,
    )
    await runner.setup()
    assert runner.server is not None
    guard = ConnectionGuard(
        settings.max_connections,
        settings.max_connections_per_client,
        settings.header_timeout_s,
        metrics.note_connections_full,
    )
    guard_connections(runner.server, guard)
    metrics.connections.set_function(lambda: len(guard.open))
    return runner


def _tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    cert, key = settings.http_tls_cert, settings.http_tls_key
    if (cert is None) != (key is None):
        raise InvalidRequest("TLS of HTTP needs both --http-tls-cert and --http-tls-key", param="http_tls_cert")
    return None if cert is None or key is None else server_context(cert, key)


def _url(settings: GatewaySettings, port: int) -> str:
    scheme = "http" if settings.http_tls_cert is None else "https"
    return f"{scheme}://{bracketed(reachable(settings.host))}:{port}"


async def _set_serving(server: RunningServer, cluster: Cluster, wait_s: float) -> None:
    """Sets health to SERVING once a request can be placed, after `wait_s` in any case."""
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while cluster.membership.view().missing:
                await cluster.until_changed()
    await server.set_serving()


async def _stop(drain_gate: DrainGate, cluster: Cluster, server: RunningServer, runner: web.AppRunner) -> None:
    """Refuses new work, lets running requests drain, ends the rest with an error, then ends the memberships."""
    drain_gate.close()
    drain_s = drain_gate.drain_s
    rpc_end = asyncio.ensure_future(server.stop(drain_s + _GOODBYE_S + 1))  # registrations outlive the requests
    if not await drain_gate.until_empty(drain_s):
        cluster.router.stop()
        await drain_gate.until_empty(_GOODBYE_S)
    await runner.cleanup()
    await cluster.close(grace_s=0.5)
    await rpc_end
