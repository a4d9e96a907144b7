"""`python -m services.planner`: answers planning questions until told to stop."""

from __future__ import annotations

from halfmoon.rpc.service import serve_until_told_to_stop, service_main
from services.planner.metrics import PlannerMetrics
from services.planner.model import read_model_config
from services.planner.servicer import PlannerServicer
from services.planner.settings import PlannerSettings


async def serve(settings: PlannerSettings) -> None:
    """Runs the planner until it is told to stop. Raises InvalidRequest if it cannot listen."""
    servicer = PlannerServicer(read_model_config)
    await serve_until_told_to_stop(settings, [servicer.register], PlannerMetrics())


if __name__ == "__main__":
    service_main("planner", PlannerSettings, serve)
