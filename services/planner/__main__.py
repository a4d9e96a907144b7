"""`python -m services.planner`: answers planning questions until told to stop."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import ExitStack

from prometheus_client import start_http_server

from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.rpc.logs import configure_logs
from halfmoon.rpc.server import advertised_address, run_service, running_server, until_told_to_stop
from services.planner.metrics import PlannerMetrics
from services.planner.model import read_model_config
from services.planner.servicer import PlannerServicer
from services.planner.settings import PlannerSettings, read_settings

log = logging.getLogger(__name__)


async def serve(settings: PlannerSettings) -> None:
    """Runs the planner until it is told to stop. Raises InvalidRequest if it cannot listen."""
    stopping = asyncio.create_task(until_told_to_stop())  # from here on SIGTERM is heard
    metrics = PlannerMetrics()
    servicer = PlannerServicer(read_model_config)
    async with running_server(settings.listen, [servicer.register], metrics.rpc) as server:
        with ExitStack() as stack:
            if settings.metrics_port is not None:
                http, _ = start_http_server(settings.metrics_port, registry=metrics.registry)
                stack.callback(http.server_close)
                stack.callback(http.shutdown)
            await server.set_serving()
            address = advertised_address(settings.listen, server.port, settings.advertise)
            log.info("service.ready", extra={"address": address})
            await stopping


def main() -> None:
    """Exits with 1 and one clear line when the service cannot start."""
    try:
        settings = read_settings(sys.argv[1:])
    except InvalidRequest as err:
        sys.exit(err.message)
    configure_logs("planner", settings.log_level)
    log.info("service.settings", extra={"settings": settings.model_dump(mode="json")})
    try:
        run_service(lambda: serve(settings))
    except HalfmoonError as err:
        log.error("service.failed", extra={"reason": err.message})
        sys.exit(1)


if __name__ == "__main__":
    main()
