"""Settings of a worker. `services.prefill` and `services.decode` change only the default role."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from halfmoon.config.observability import ObservedConfig
from halfmoon.config.quantization import QuantizationConfig
from halfmoon.config.section import Texts
from halfmoon.config.worker import WorkerConfig
from halfmoon.policy.view.worker_view import Role
from halfmoon.rpc.addresses.resolved import check_dialled

Dialled = Annotated[str, AfterValidator(check_dialled)]


class WorkerSettings(WorkerConfig, QuantizationConfig, ObservedConfig, BaseSettings):
    """Environment (`HALFMOON_<SERVICE>_…`) and command line (`--kebab-case`), read once."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    role: Role = Field(description="the phases this worker serves")
    gateway: Dialled = Field(description="host:port of the gateway's cluster service; several separated by commas")
    listen: str = Field("127.0.0.1:0", description="host:port of this worker's own services; port 0 picks one")
    advertise: str | None = Field(
        None,
        description="host:port where others reach this worker; default: --listen, or for 0.0.0.0 the address towards "
        "the gateway",
    )
    host_name: str | None = Field(None, description="this host's name for operators; default: its hostname")
    unit: str = Field(
        "",
        description="paired unit of a plan that this worker belongs to: its prefill workers hand KV over to its decode "
        "workers while there are any",
    )
    model: str = Field("demo", description="'demo', a directory, a .gguf file or a Hugging Face id")
    model_name: str | None = Field(None, description="name under which the model is served; default: its own")
    lora: Texts = Field(
        (), description="adapter that requests call by its name, as NAME=PATH; vLLM computes it; repeat it"
    )
    kv_store: Dialled | None = Field(None, description="host:port of the KV store; default: no store")
    metrics_port: int | None = Field(None, ge=0, description="serve Prometheus metrics on this port")
    state_dir: Path = Field(Path(".halfmoon"), description="directory in which a service may keep files")
