"""`python -m services.planner` serves halfmoon.Planner until it is told to stop."""

from __future__ import annotations

from dataclasses import replace

from halfmoon.background import logged, running
from halfmoon.ledger.ledger import Ledger, open_ledger
from halfmoon.policy.scaling.autopilot import Autopilot
from halfmoon.policy.scaling.rules import ScalingRules
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.operator_token import OperatorToken
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.service import serve_until_told_to_stop, service_main
from services.planner.autopilot.actuators import running_actuators
from services.planner.autopilot.decision_log import DecisionLog
from services.planner.autopilot.gateways import open_gateways
from services.planner.autopilot.live_autopilot import LiveAutopilot
from services.planner.autopilot.slow_loop import SlowLoop
from services.planner.fleet import Fleet
from services.planner.job_process import run_job
from services.planner.job_queue import JobQueue
from services.planner.jobs import Jobs
from services.planner.kept_plans import PlansOfLedger
from services.planner.metrics import AutopilotMetrics, PlannerMetrics
from services.planner.servicer import MAX_REQUEST_BYTES, PlannerServicer
from services.planner.settings import PlannerSettings


async def serve(settings: PlannerSettings) -> None:
    """Runs the planner until told to stop. Raises InvalidRequest for settings that cannot be used."""
    rules = settings.scaling_rules()
    credential = own_credential("planner")
    access = CallAccess(credential, OperatorToken(settings.operator_secret()))
    jobs = Jobs(JobQueue(settings.max_running, settings.max_waiting), settings.deadline_s, run_job)
    async with open_ledger(settings.ledger, may_be_away=True) as ledger:
        plans, fleet = PlansOfLedger(ledger), Fleet(settings.fleet, credential)
        servicer = PlannerServicer(plans, jobs, settings.processes, fleet)
        services, metrics = [servicer.register], PlannerMetrics()
        async with running(logged(_autopilot(settings, rules, ledger, fleet, metrics.autopilot))):
            await serve_until_told_to_stop("planner", settings, services, metrics, access, MAX_REQUEST_BYTES)


async def _autopilot(
    settings: PlannerSettings, rules: ScalingRules, ledger: Ledger, fleet: Fleet, metrics: AutopilotMetrics
) -> None:
    """Runs the autopilot, if there is a gateway that it may look at."""
    if not settings.gateway:
        return
    if not fleet.can_change:
        rules = replace(rules, max_workers=0)
    token, ca = settings.operator_secret(), settings.gateway_ca
    async with (
        open_gateways(settings.gateway, token, settings.state_dir, ca, rules.window_s) as gateways,
        running_actuators(gateways, fleet) as actuators,
    ):
        policy, log, slow_loop = Autopilot(rules), DecisionLog(ledger), SlowLoop(ledger, rules)
        await LiveAutopilot(policy, settings.autopilot, gateways, actuators, log, slow_loop, metrics).run()


if __name__ == "__main__":
    service_main("planner", PlannerSettings, serve)
