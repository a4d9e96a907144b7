"""`python -m services.simulation`: simulated workers for one or more gateways."""

from __future__ import annotations

import asyncio
import logging

from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.errors import InvalidRequest
from halfmoon.policy.view.worker_view import Role
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.server import until_told_to_stop
from halfmoon.rpc.service import service_main
from halfmoon.rpc.telemetry.tracing import tracing
from halfmoon.sim.answer_model import AnswerModel
from halfmoon.sim.latency_sources.worker_profile import load_profile
from halfmoon.worker.simulated.simulation import SimulatedCluster, SimulatedModel, running_simulation
from services.simulation.settings import SimulationSettings

log = logging.getLogger(__name__)

_REPORT_S = 1.0  # in the workers' own time, so that gateways see reports as old as those of real workers
_LEAST_REPORT_S = 0.1


async def serve(settings: SimulationSettings) -> None:
    """Runs the workers until told to stop. Raises InvalidRequest for no workers or an unknown profile."""
    counts: dict[Role, int] = {"prefill": settings.prefill, "decode": settings.decode, "both": settings.both}
    if not any(counts.values()):
        raise InvalidRequest("nothing is simulated: give --prefill, --decode or --both a number")
    stopping = asyncio.create_task(until_told_to_stop())
    report_s = max(_REPORT_S / settings.time_scale, _LEAST_REPORT_S)
    cluster = SimulatedCluster(
        settings.gateway,
        settings.host,
        settings.lease_s,
        settings.drain_s,
        report_s,
        own_credential("worker"),
        settings.kv_store,
        settings.unit,
    )
    with tracing("simulation", settings.otlp_endpoint) as tracer:
        async with running_simulation(_model(settings), cluster, tracer) as simulation:
            for role, count in counts.items():
                for _ in range(count):
                    await simulation.start(role)
            log.info("service.ready", extra={"num_workers": sum(counts.values())})
            await stopping


def _model(settings: SimulationSettings) -> SimulatedModel:
    checkpoint = prepare_checkpoint(settings.model)
    answers = AnswerModel(checkpoint.vocab_size, settings.text, settings.length, settings.median_tokens)
    profile = load_profile(settings.profile).scaled(settings.time_scale)
    return SimulatedModel(
        settings.model_name or checkpoint.name,
        checkpoint.fingerprint,
        profile.limited(settings.max_batch_tokens, settings.chunk_tokens, settings.max_running),
        settings.block_tokens,
        answers,
    )


if __name__ == "__main__":
    service_main("simulation", SimulationSettings, serve)
