"""Settings of simulated workers."""

from __future__ import annotations

from pydantic import Field

from halfmoon.config.section import Section
from halfmoon.sim.answer_model import LengthKind, TextKind
from halfmoon.sim.latency_sources.worker_profile import DEFAULT_PROFILE, PROFILES


class SimulationConfig(Section):
    """Latencies and answers of simulated workers."""

    profile: str = Field(
        DEFAULT_PROFILE,
        description=f"latencies of simulated workers: {', '.join(PROFILES)}, a JSON file, or ledger:NAME for one that "
        "`halfmoon profile` measured",
    )
    time_scale: float = Field(1.0, gt=0, description="speeds up everything simulated workers do by this factor")
    text: TextKind = Field("random", description="answers: 'random' words, or an 'echo' of the prompt")
    length: LengthKind = Field(
        "drawn", description="lengths of answers: 'drawn' at random from the seed, or 'seed': the seed is the length"
    )
    median_tokens: int = Field(200, ge=1, description="median of drawn lengths, in tokens")
