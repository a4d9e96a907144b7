"""Settings of the simulation."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings

from halfmoon.config.observability import ObservedConfig
from halfmoon.config.simulation import SimulationConfig
from halfmoon.rpc.service import service_config


class SimulationSettings(SimulationConfig, ObservedConfig, BaseSettings):
    """Environment (`HALFMOON_SIMULATION_…`) and command line (`--kebab-case`), read once."""

    model_config = service_config("simulation")

    gateway: str = Field(description="host:port of the gateway's cluster service; several separated by commas")
    host: str = Field("127.0.0.1", description="address of the workers, each of which takes a free port")
    model: str = Field("demo", description="whose vocabulary and name are used; its weights are never read")
    model_name: str | None = Field(None, description="the name the model is served under; default: its own")
    prefill: int = Field(0, ge=0, description="workers that prefill")
    decode: int = Field(0, ge=0, description="workers that decode")
    both: int = Field(0, ge=0, description="workers that do both")
    block_tokens: int = Field(64, ge=1, description="tokens in a KV block")
    lease_s: float = Field(10.0, ge=5, description="a KV reservation ends when its sender is silent for this long")
    drain_s: float = Field(2.0, ge=0, description="at SIGTERM, time that running requests get to finish")
