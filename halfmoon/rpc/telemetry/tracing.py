"""Whether this process traces: only with an OTLP endpoint, from a setting or OpenTelemetry's own variables."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.telemetry.spans import NO_TRACER, Tracer

log = logging.getLogger(__name__)

OTLP_HELP = "http://host:port of an OTLP (gRPC) receiver of traces; default: OTEL_EXPORTER_OTLP_ENDPOINT, or none"

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_NOT_INSTALLED = "tracing needs OpenTelemetry: pip install 'halfmoon[tracing]'"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@contextmanager
def tracing(service: str, endpoint: str | None, environment: Mapping[str, str] = os.environ) -> Iterator[Tracer]:
    """The tracer of `service`. `endpoint` is http(s)://host:port of an OTLP receiver (gRPC); None: the environment's.

    Without one nothing is traced, and OpenTelemetry is not imported. Raises InvalidRequest for an unusable `endpoint`;
    unusable environment variables, perhaps meant for other programs, cost at most a log line.
    """
    check_endpoint(endpoint)
    if not is_wanted(endpoint, environment):
        yield NO_TRACER
        return
    problem = None if endpoint else _problem(environment)
    if problem is not None:
        log.warning("tracing.off", extra={"reason": problem})
        yield NO_TRACER
        return
    from halfmoon.rpc.telemetry.otlp import exporting_tracer

    with exporting_tracer(service, endpoint) as tracer:
        yield tracer


def check_endpoint(endpoint: str | None) -> None:
    """Raises InvalidRequest if `endpoint` is not a URL or OpenTelemetry is not installed."""
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"--otlp-endpoint must be http://host:port, or https:// with TLS, not {endpoint!r}", param="otlp_endpoint"
        )
    if endpoint is not None and not _is_installed():
        raise InvalidRequest(_NOT_INSTALLED, param="otlp_endpoint")


def is_wanted(endpoint: str | None, environment: Mapping[str, str]) -> bool:
    """Whether tracing is enabled, by the rules of OpenTelemetry's specification."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    return endpoint is not None or any(environment.get(name) for name in _ENDPOINTS)


def _problem(environment: Mapping[str, str]) -> str | None:
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "grpc")
    if protocol != "grpc":
        return f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}, and traces are exported over grpc: set --otlp-endpoint"
    return None if _is_installed() else _NOT_INSTALLED


def _is_installed() -> bool:
    try:
        return None not in (find_spec("opentelemetry.sdk"), find_spec("opentelemetry.exporter.otlp.proto.grpc"))
    except ModuleNotFoundError:  # raised for a parent package
        return False
