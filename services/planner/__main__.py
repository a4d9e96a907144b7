"""`python -m services.planner` serves halfmoon.Planner until it is told to stop."""

from __future__ import annotations

from halfmoon.ledger.ledger import open_ledger
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.operator_token import OperatorToken
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.service import serve_until_told_to_stop, service_main
from services.planner.fleet import Fleet
from services.planner.job_process import run_job
from services.planner.job_queue import JobQueue
from services.planner.jobs import Jobs
from services.planner.kept_plans import PlansOfLedger
from services.planner.metrics import PlannerMetrics
from services.planner.servicer import MAX_REQUEST_BYTES, PlannerServicer
from services.planner.settings import PlannerSettings


async def serve(settings: PlannerSettings) -> None:
    """Runs the planner until told to stop. Raises InvalidRequest if it cannot listen."""
    credential = own_credential("planner")
    access = CallAccess(credential, OperatorToken(settings.operator_secret(), settings.host))
    jobs = Jobs(JobQueue(settings.max_running, settings.max_waiting), settings.deadline_s, run_job)
    async with open_ledger(settings.ledger, may_be_away=True) as ledger:
        plans, fleet = PlansOfLedger(ledger), Fleet(settings.fleet, credential)
        servicer = PlannerServicer(plans, jobs, settings.processes, fleet)
        services = [servicer.register]
        await serve_until_told_to_stop("planner", settings, services, PlannerMetrics(), access, MAX_REQUEST_BYTES)


if __name__ == "__main__":
    service_main("planner", PlannerSettings, serve)
