"""Settings of the simulation."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings

from halfmoon.config.observability import ObservedConfig
from halfmoon.config.section import Texts
from halfmoon.config.simulation import SimulationConfig
from halfmoon.rpc.service import service_config
from halfmoon.worker.settings import Dialled


class SimulationSettings(SimulationConfig, ObservedConfig, BaseSettings):
    """Environment (`HALFMOON_SIMULATION_…`) and command line (`--kebab-case`), read once."""

    model_config = service_config("simulation")

    gateway: Dialled = Field(description="host:port of the gateway's cluster service; several separated by commas")
    kv_store: Texts = Field(
        (), description="host:port of a KV store; several: assigned to the workers of each role in turn; none: no store"
    )
    host: str = Field("127.0.0.1", description="host on which the workers listen; each takes a free port")
    model: str = Field("demo", description="model whose vocabulary and name are used; its weights are never read")
    model_name: str | None = Field(None, description="name under which the model is served; default: its own")
    prefill: int = Field(0, ge=0, description="number of prefill workers")
    decode: int = Field(0, ge=0, description="number of decode workers")
    both: int = Field(0, ge=0, description="number of workers with role both")
    block_tokens: int = Field(64, ge=1, description="tokens in a KV block")
    max_batch_tokens: int | None = Field(None, ge=2, description="most tokens in one step; default: the profile's")
    chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="most prompt tokens in a step with running decodes; default: the profile's, or what targets leave",
    )
    max_running: int | None = Field(None, ge=1, description="most sequences in one batch; default: the profile's")
    unit: str = Field("", description="paired unit, of a plan, that the workers belong to")
    lease_s: float = Field(10.0, ge=5, description="seconds of silence after which a sender's KV reservation ends")
    drain_s: float = Field(2.0, ge=0, description="at SIGTERM, seconds that running requests get to finish")
