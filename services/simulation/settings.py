"""Settings of the simulation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from halfmoon.rpc.service import service_config
from halfmoon.rpc.tracing import OTLP_HELP
from halfmoon.sim.answer_model import LengthKind, TextKind
from halfmoon.sim.latency_sources.worker_profile import DEFAULT_PROFILE, PROFILES


class SimulationSettings(BaseSettings):
    """Environment (`HALFMOON_SIMULATION_…`) and command line (`--kebab-case`), read once."""

    model_config = service_config("simulation")

    gateway: str = Field(description="host:port of the gateway's cluster service; several separated by commas")
    host: str = Field("127.0.0.1", description="address of the workers, each of which takes a free port")
    model: str = Field("demo", description="whose vocabulary and name are used; its weights are never read")
    model_name: str | None = Field(None, description="the name the model is served under; default: its own")
    prefill: int = Field(0, ge=0, description="workers that prefill")
    decode: int = Field(0, ge=0, description="workers that decode")
    both: int = Field(0, ge=0, description="workers that do both")
    profile: str = Field(DEFAULT_PROFILE, description=f"latencies: {', '.join(PROFILES)}, or a JSON file")
    time_scale: float = Field(1.0, gt=0, description="the modelled workers are so many times as fast in everything")
    block_tokens: int = Field(64, ge=1, description="tokens in a KV block")
    text: TextKind = Field("random", description="answers: 'random' words, or 'echo' of the prompt")
    length: LengthKind = Field(
        "drawn", description="of answers: 'drawn' by the seed, or 'seed': the seed is the length"
    )
    median_tokens: int = Field(200, ge=1, description="of drawn lengths")
    lease_s: float = Field(10.0, ge=5, description="a KV reservation ends when its sender is silent for this long")
    drain_s: float = Field(2.0, ge=0, description="at SIGTERM, time that running requests get to finish")
    otlp_endpoint: str | None = Field(None, description=OTLP_HELP)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
