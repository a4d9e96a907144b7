"""`python -m services.planner`: answers planning questions until told to stop."""

from __future__ import annotations

import asyncio
import logging

from halfmoon.rpc.server import advertised_address, running_server, until_told_to_stop
from halfmoon.rpc.service import metrics_endpoint, service_main
from services.planner.metrics import PlannerMetrics
from services.planner.model import read_model_config
from services.planner.servicer import PlannerServicer
from services.planner.settings import PlannerSettings

log = logging.getLogger(__name__)


async def serve(settings: PlannerSettings) -> None:
    """Runs the planner until it is told to stop. Raises InvalidRequest if it cannot listen."""
    stopping = asyncio.create_task(until_told_to_stop())  # from here on SIGTERM is heard
    metrics = PlannerMetrics()
    servicer = PlannerServicer(read_model_config)
    async with running_server(settings.listen, [servicer.register], metrics.rpc) as server:
        with metrics_endpoint(settings.metrics_port, metrics.registry):
            await server.set_serving()
            address = advertised_address(settings.listen, server.port, settings.advertise)
            log.info("service.ready", extra={"address": address})
            await stopping


if __name__ == "__main__":
    service_main("planner", PlannerSettings, serve)
