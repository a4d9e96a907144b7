"""What a gateway can be told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from halfmoon.config.section import Section, off_is_a_word
from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.policy.wait_limits import WaitLimits


class HandoverConfig(Section):
    """How KV travels; the same for all workers of a system."""

    handover_codec: Literal["raw", "int8", "int4", "fp8"] = Field(
        "raw",
        description="encoding of KV on its way from prefill to decode: raw is exact; int8 and fp8 take half of 16 "
        "bits, int4 less than a third, and each changes a little of what is generated (int8 least, int4 most)",
    )


class GatewayConfig(Section):
    """HTTP, placement, admission and time limits. Seconds are in names that end in `_s`."""

    host: str = Field("127.0.0.1", description="address where HTTP listens; 0.0.0.0 is every interface")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 picks a free one")
    placement: PlacementMode = Field(
        "kvcache-centric",
        description="how workers are chosen: kvcache-centric and cache-aware by predicted times and cached prefixes "
        "(the first also brings prefixes from other workers where those can be fetched), least-loaded, random",
    )
    balancing_threshold: float = Field(
        2.0, ge=1, description="kvcache-centric: best prefix / own prefix above which the best one is fetched"
    )
    admission: Annotated[AdmissionMode, BeforeValidator(off_is_a_word)] = Field(
        "predicted",
        description="when a class's targets would be missed: refuse by predicted decode load, by present load, or "
        "never (off); what the control API sets later wins",
    )
    slo: Annotated[Literal["default", "off"], BeforeValidator(off_is_a_word)] = Field(
        "default",
        description="default: a class called default exists from the start (a first token within 30 s, 1 s between "
        "tokens), and requests that would wait far longer get 429 with Retry-After; off: there is no such class",
    )
    request_deadline_s: float = Field(600.0, gt=0, description="total time of one request")
    failover_wait_s: float = Field(
        WaitLimits().failover_s, ge=0, description="how long a request whose worker is lost waits for another one"
    )
    return_wait_s: float = Field(
        WaitLimits().return_s, ge=0, description="how long a new request waits for a worker to come back"
    )
    heartbeat_interval_s: float = Field(1.0, gt=0, description="workers report at least this often; 3 missed is dead")
    shutdown_grace_s: float = Field(2.0, ge=0, description="how long running requests may go on after SIGTERM")
    ledger_poll_s: float = Field(
        1.0, gt=0, description="how often to look for edits of classes that other gateways made"
    )
    ledger_keep_days: float = Field(
        90.0, ge=0, lt=100_000, description="how long the ledger keeps requests; 0 keeps them for ever"
    )
    max_body_bytes: int = Field(16 << 20, gt=0, description="largest accepted HTTP body")
    max_header_bytes: int = Field(8_190, ge=256, description="longest accepted request line, and header of a request")
    max_headers: int = Field(100, ge=8, description="most headers of a request")
    allowed_origins: tuple[str, ...] = Field((), description="origins whose pages browsers let use the API; * is all")
