"""The gateway's settings: environment (`HALFMOON_GATEWAY_...`) and command line from one class."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from halfmoon.ledger.database import mask_password
from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.policy.wait_limits import WaitLimits
from halfmoon.rpc.service import service_config
from halfmoon.rpc.tracing import OTLP_HELP


class GatewaySettings(BaseSettings):
    """Read once in `__main__`. Seconds are in names that end in `_s`."""

    model_config = service_config("gateway")

    host: str = Field("127.0.0.1", description="where HTTP listens")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 picks one")
    reuse_port: bool = Field(False, description="several gateways of one host share the HTTP port (SO_REUSEPORT)")
    cluster_listen: str = Field("127.0.0.1:0", description="host:port where workers register (gRPC)")
    advertise_cluster: str | None = Field(None, description="host:port that workers dial, if not cluster_listen")
    model: str = Field("demo", description="model whose tokenizer and chat template are used")
    model_name: str | None = Field(None, description="name under which the model is served; None: its own")
    model_alias: tuple[str, ...] = Field(
        (), description="another name that requests may give the model, such as one that a class goes by; repeat it"
    )
    state_dir: Path = Field(Path(".halfmoon"), description="where the default ledger is kept")
    ledger_url: str | None = Field(
        None,
        description="sqlite:///file or postgresql://user:password@host/database, which several gateways may share; "
        "None: SQLite in state_dir",
    )
    ledger_poll_s: float = Field(
        1.0, gt=0, description="how often to look for edits of classes that other gateways made"
    )
    ledger_keep_days: float = Field(
        90.0, ge=0, lt=100_000, description="how long the ledger keeps requests; 0 keeps them for ever"
    )
    kv_store: str | None = Field(None, description="host:port of the store, whose figures the console shows")
    otlp_endpoint: str | None = Field(None, description=OTLP_HELP)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    heartbeat_interval_s: float = Field(1.0, gt=0, description="workers report at least this often; 3 missed is dead")
    request_deadline_s: float = Field(600.0, gt=0, description="total time of one request")
    failover_wait_s: float = Field(
        WaitLimits().failover_s, ge=0, description="how long a request whose worker is lost waits for another one"
    )
    return_wait_s: float = Field(
        WaitLimits().return_s, ge=0, description="how long a new request waits for a worker to come back"
    )
    handover_codec: Literal["raw", "int8", "int4", "fp8"] = Field(
        "raw",
        description="how KV travels from prefill to decode: raw as it is; int8 and fp8 in half of 16 bits, int4 in "
        "less than a third, each of which changes a little of what is generated (int8 least, int4 most)",
    )
    placement: PlacementMode = Field(
        "kvcache-centric",
        description="how workers are chosen: kvcache-centric and cache-aware by predicted times and cached prefixes "
        "(the first also brings prefixes from other workers where those can be fetched), least-loaded, random",
    )
    balancing_threshold: float = Field(
        2.0, ge=1, description="kvcache-centric: best prefix / own prefix above which the best one is fetched"
    )
    admission: AdmissionMode = Field(
        "predicted",
        description="when a class's targets would be missed: refuse by predicted decode load, by present load, or off; "
        "what the control API sets goes before",
    )
    shutdown_grace_s: float = Field(2.0, ge=0, description="how long running requests may go on after SIGTERM")
    max_body_bytes: int = Field(16 << 20, gt=0, description="largest accepted HTTP body")
    max_header_bytes: int = Field(8_190, ge=256, description="longest accepted request line, and header of a request")
    max_headers: int = Field(100, ge=8, description="most headers of a request")
    api_key: tuple[str, ...] = Field((), description="a key that clients may use; repeat it for more; none: no key")
    operator_token: str | None = Field(
        None,
        description="what the control API asks for; None: nothing on a loopback host, and no control API elsewhere",
    )
    allowed_origins: tuple[str, ...] = Field((), description="origins whose pages browsers let use the API; * is all")

    @property
    def ledger(self) -> str:
        """The ledger's SQLAlchemy URL."""
        return self.ledger_url or f"sqlite:///{self.state_dir.resolve() / 'ledger.db'}"

    def as_logged(self) -> dict[str, Any]:
        """Every setting, without the ledger's password and the keys."""
        keys = ["***"] * len(self.api_key)
        token = None if self.operator_token is None else "***"
        masked = {"ledger_url": mask_password(self.ledger), "api_key": keys, "operator_token": token}
        return {**self.model_dump(mode="json"), **masked}
