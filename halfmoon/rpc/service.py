"""The common part of every service's `__main__`: reads settings, sets up logs, runs, and logs one line on failure."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
from prometheus_client import CollectorRegistry, start_http_server
from pydantic import ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from halfmoon.errors import HalfmoonError, InvalidRequest, leaf_errors
from halfmoon.rpc.addresses.masked_url import masked_url
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.processes.descriptors import raise_descriptor_limit
from halfmoon.rpc.processes.private_files import PRIVATE_UMASK, make_private
from halfmoon.rpc.processes.template_process import fork_service, is_template
from halfmoon.rpc.server import (
    MAX_MESSAGE_BYTES,
    SUPERVISED_ENV,
    advertised_address,
    run_service,
    running_server,
    until_told_to_stop,
)
from halfmoon.rpc.telemetry.logs import configure_logs
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.telemetry.tracing import tracing

log = logging.getLogger(__name__)

Settings = TypeVar("Settings", bound=BaseSettings)


class ListensForRpc(Protocol):
    """Settings of every service with RPCs."""

    @property
    def listen(self) -> str: ...
    @property
    def advertise(self) -> str | None: ...
    @property
    def metrics_port(self) -> int | None: ...
    @property
    def otlp_endpoint(self) -> str | None: ...


class ServiceMetrics(Protocol):
    """A service's metrics."""

    @property
    def registry(self) -> CollectorRegistry: ...
    @property
    def rpc(self) -> RpcMetrics: ...


def service_config(service: str) -> SettingsConfigDict:
    """Configures where settings come from: environment `HALFMOON_<SERVICE>_…` and command line `--kebab-case`."""
    return SettingsConfigDict(
        env_prefix=_prefix(service),
        cli_prog_name=f"python -m services.{service}",
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        env_ignore_empty=True,
    )


def read_settings(settings_class: type[Settings], arguments: Sequence[str]) -> Settings:
    """Reads environment and command line. Raises InvalidRequest for a wrong value or an unknown variable.

    A wrong command line exits with the usage text, as argparse does.
    """
    prefix = settings_class.model_config["env_prefix"]
    known = {prefix + name.upper() for name in settings_class.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(prefix) and name not in known)
    if unknown:
        raise InvalidRequest(f"unknown settings in the environment: {', '.join(unknown)}")
    try:
        return CliApp.run(settings_class, cli_args=list(arguments))
    except SettingsError as err:  # a variable whose value has to be JSON
        raise InvalidRequest(f"{prefix}…: {err}: {err.__cause__}") from err
    except ValidationError as err:
        raise InvalidRequest("; ".join(_explained(problem, prefix) for problem in err.errors())) from err


def service_main(
    service: str,
    settings_class: type[Settings],
    serve: Callable[..., Coroutine[Any, Any, None]],
    load: Callable[[Settings], Any] | None = None,
) -> None:
    """Runs `serve(settings)` to its end. On a HalfmoonError, logs one line and exits with 1.

    Under a supervisor it runs in a child of this process (`template_process`). `load`, which must leave no thread
    behind, makes what a killed child's successor need not load again: the second argument of `serve`, else None.
    """
    os.umask(PRIVATE_UMASK)
    configure_logs(service)
    raise_descriptor_limit()
    try:
        settings = read_settings(settings_class, sys.argv[1:])
        configure_logs(service, getattr(settings, "log_level", "INFO"))
        log.info("service.settings", extra={"settings": _as_logged(settings)})
        _make_private(getattr(settings, "state_dir", None))
        loaded = None
        if is_template():
            loaded = None if load is None else load(settings)
            fork_service()
        run_service(lambda: serve(settings) if load is None else serve(settings, loaded))
    except (HalfmoonError, BaseExceptionGroup) as err:
        leaves = leaf_errors(err)
        if not all(isinstance(leaf, HalfmoonError) for leaf in leaves):
            raise
        log.error("service.failed", extra={"reason": "; ".join(str(leaf) for leaf in leaves)})
        sys.exit(1)


async def serve_until_told_to_stop(
    service: str,
    settings: ListensForRpc,
    add_services: Sequence[Callable[[grpc.aio.Server], None]],
    metrics: ServiceMetrics,
    access: CallAccess,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> None:
    """Runs a service that has only RPCs, from start to end. Raises InvalidRequest if it cannot listen."""
    stopping = asyncio.create_task(until_told_to_stop())  # SIGTERM is handled from here on
    with tracing(service, settings.otlp_endpoint) as tracer:
        async with running_server(
            settings.listen,
            add_services,
            metrics.rpc,
            tracer=tracer,
            max_message_bytes=max_message_bytes,
            access=access,
        ) as server:
            with metrics_endpoint(settings.listen, settings.metrics_port, metrics.registry):
                await server.set_serving()
                address = advertised_address(settings.listen, server.port, settings.advertise)
                log.info("service.ready", extra={"address": address})
                await stopping


@contextmanager
def metrics_endpoint(listen: str, port: int | None, registry: CollectorRegistry) -> Iterator[None]:
    """Serves `registry` over HTTP on `port` of the host in `listen`, if there is a port. Raises InvalidRequest."""
    if port is None:
        yield
        return
    host = listen.rpartition(":")[0].strip("[]")
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise InvalidRequest(
            f"cannot serve metrics on {host}:{port}: {error.strerror}", param="metrics_port"
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _explained(problem: Any, prefix: str) -> str:
    """Words one of pydantic's errors for a user of the command line."""
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"--{name.replace('_', '-')} (or {prefix}{name.upper()}) is required"
    return f"--{name.replace('_', '-')}: {problem['msg'].removeprefix('Value error, ')}"


def _make_private(state_dir: Path | None) -> None:
    if state_dir is None or not os.path.isdir(state_dir) or os.environ.get(SUPERVISED_ENV):
        return  # under a supervisor it is done
    num_changed = make_private(state_dir)
    if num_changed:
        log.warning("state.made_private", extra={"directory": str(state_dir), "num_changed": num_changed})


def _prefix(service: str) -> str:
    return f"HALFMOON_{service.upper()}_"


def _as_logged(settings: BaseSettings) -> dict[str, Any]:
    """Returns the settings to log: the class's own selection if it has secrets, else all; no URL's secrets."""
    own: Callable[[], dict[str, Any]] | None = getattr(settings, "as_logged", None)
    shown = own() if own is not None else settings.model_dump(mode="json")
    endpoint = shown.get("otlp_endpoint")
    return {**shown, "otlp_endpoint": masked_url(endpoint)} if endpoint else shown
