"""Settings of a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from halfmoon.config.section import Section, Texts, off_is_a_word
from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.policy.placement.conditional import DEFAULT_MODE, ConditionalMode
from halfmoon.policy.placement.ranking import PREDICTING_MODES, PlacementMode
from halfmoon.policy.wait_limits import WaitLimits


class HandoverConfig(Section):
    """The encoding of KV in transfer, the same for all workers of a system."""

    handover_codec: Literal["raw", "lz4", "zstd", "int8", "int4", "fp8", "auto"] = Field(
        "raw",
        description="encoding of KV in transfer; lz4 and zstd are exact and a little smaller; int8 and fp8 take half "
        "of 16 bits, int4 less than a third, and are lossy: int8 changes answers least, int4 most; auto: raw or an "
        "exact one, whichever is quickest over each link, and int8 for requests that were degraded to a lower KV "
        "precision, where that is quicker still",
    )


class GatewayConfig(Section):
    """HTTP, placement, admission and time limits. Names that end in `_s` are in seconds."""

    host: str = Field("127.0.0.1", description="address where HTTP listens; 0.0.0.0 is every interface")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 picks a free one")
    http_tls_cert: Path | None = Field(
        None, description="certificate of HTTP in PEM, with its intermediates; a new file is used without a restart"
    )
    http_tls_key: Path | None = Field(None, description="private key of http_tls_cert in PEM, without a password")
    placement: PlacementMode = Field(
        "kvcache-centric",
        description="how workers are chosen: kvcache-centric and cache-aware by predicted times and cached prefixes "
        "(kvcache-centric also fetches and copies prefixes), least-loaded, random",
    )
    balancing_threshold: float = Field(
        2.0,
        ge=1,
        description="kvcache-centric: longest cached prefix / own cached prefix above which a worker "
        "may fetch it from the best holder",
    )
    conditional_disaggregation: Annotated[ConditionalMode, BeforeValidator(off_is_a_word)] = Field(
        DEFAULT_MODE,
        description="whether a decode worker may restore and compute a prompt itself, with no hand-over: auto, where "
        "the answer begins sooner and no answer there becomes slower than its class allows; failover, only that of a "
        "request that lost a worker; strict, like failover, and others only if also the uncached part fits one step "
        "and prompts take at most 5 % of the worker's time; off",
    )
    prefill_devices: Texts = Field(
        (),
        description="which prompts workers of a kind of device compute, as DEVICE [tokens<=NUMBER] "
        "[classes=NAME,NAME], such as 'cpu tokens<=512 classes=batch'; others go to other workers while there are any; "
        "repeat it; without a rule the predicted TTFT alone decides",
    )
    max_prefill_degree: int = Field(
        1,
        ge=1,
        description="most prefill workers that compute one long prompt together, each some segments of it, where its "
        "first token is predicted to come clearly sooner and the others are idle; "
        "workers of our own engine on CPUs alone; 1: always one",
    )
    hot_spots: bool = Field(
        False,
        description="running answers move off a decode worker that is busier than another where the time predicted to "
        "be saved for all answers there is more than twice what the move costs them",
    )
    replica_mbps: float = Field(
        100.0,
        ge=0,
        description="kvcache-centric: most megabytes a second of prefixes that are copied ahead of need, because they "
        "are asked for again and again: to a store near which they are missing or, without stores, to a worker less "
        "busy than those that have them; 0 copies nothing",
    )
    admission: Annotated[AdmissionMode, BeforeValidator(off_is_a_word)] = Field(
        "predicted",
        description="when a class's targets would be missed: refuse by predicted decode load, by present load, or "
        "never (off); a later change through the control API wins",
    )
    slo: Annotated[Literal["default", "off"], BeforeValidator(off_is_a_word)] = Field(
        "default",
        description="default: a class called default exists from the start (a first token within 30 s, 1 s between "
        "tokens), and requests that would wait far longer get 429 with Retry-After; off: no such class",
    )
    peer: Texts = Field(
        (),
        description="URL of a gateway of another cluster, http://HOST:PORT or https://HOST:PORT: what would be refused "
        "here is offered to it, if it predicts that it meets the class's targets; repeat it for more",
    )
    peer_key: Texts = Field(
        (),
        description="API key of this gateway at its peers: one for all, or one for each in their order; other users of "
        "the host see command lines, so prefer the environment or a file",
    )
    peer_ca: Path | None = Field(
        None, description="authorities to trust of https:// peers, in PEM; default: those of the system"
    )
    peer_wait_s: float = Field(
        0.5, gt=0, description="how long peers may take to predict; one that is slower or away costs no more than this"
    )
    generation_config: Literal["model", "neutral"] = Field(
        "model",
        description="what applies where a request names no temperature, top_p, top_k, min_p, repetition_penalty or, "
        "in a chat, max_tokens: model, what the model's own generation_config.json says; neutral, plain sampling up "
        "to the end of the context",
    )
    split_reasoning: bool = Field(
        True,
        description="what a model writes between <think> and </think>, if its chat template has such tags, is parted "
        "from the answer; false: it is a part of the text",
    )
    tool_parser: (
        Literal["hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek", "harmony"] | None
    ) = Field(
        None,
        description="how the model writes calls of tools, if its chat template has a place for them; default: as far "
        "as the template shows it",
    )
    trust_request_chat_template: bool = Field(
        False,
        description="requests may bring a `chat_template`, rendered in a process with a second or two of CPU, 192 MiB "
        "and 4 Mi characters",
    )
    shared_cache: bool = Field(
        False,
        description="tenants share cached KV, so that a tenant can find out by `cached_tokens` and by latency which "
        "prompts others have sent; false: only tenants with the same cache_pool do",
    )
    request_deadline_s: float = Field(600.0, gt=0, description="longest total time of one request")
    failover_wait_s: float = Field(
        WaitLimits().failover_s, ge=0, description="how long a request whose worker is lost waits for another"
    )
    return_wait_s: float = Field(
        WaitLimits().return_s, ge=0, description="how long a new request waits for a worker to come back"
    )
    disconnect_grace_s: float = Field(
        10.0,
        ge=0,
        description="how long an answer that has begun goes on after its client left, if the request has an id of its "
        "client; the client may come back for it, through any gateway",
    )
    join_wait_s: float = Field(
        1.5,
        ge=0,
        description="a gateway that has just started looks for the answer of a request with a client's id once no "
        "worker has joined for this long",
    )
    first_workers_wait_s: float = Field(
        0.0,
        ge=0,
        description="how long a gateway that has just started is not yet SERVING for want of workers; clients that it "
        "gets all the same have 503 meanwhile",
    )
    heartbeat_interval_s: float = Field(
        1.0, gt=0, description="workers report at least this often; a worker that misses 3 reports counts as dead"
    )
    role_dwell_s: float = Field(
        30.0, ge=0, description="least time between two changes of one worker's role, except by force"
    )
    drain_s: float = Field(
        10.0,
        ge=0,
        description="how long running requests may take to finish once the gateway is told to stop; new ones get 503",
    )
    ledger_poll_s: float = Field(1.0, gt=0, description="how often to read edits of classes by other gateways")
    ledger_keep_days: float = Field(
        90.0, ge=0, lt=100_000, description="how long the ledger keeps requests; 0: forever"
    )
    store_responses: Annotated[Literal["default", "asked", "off"], BeforeValidator(off_is_a_word)] = Field(
        "default",
        description="whether inputs and outputs of /v1/responses are kept in the ledger, for previous_response_id and "
        "background: default, unless a request says `store: false`; asked, with `store: true` only; off, never",
    )
    responses_keep_days: float = Field(
        30.0, gt=0, lt=100_000, description="how long a response is kept; a conversation that goes on keeps its turns"
    )
    responses_max_bytes: int = Field(
        1 << 30, gt=0, description="most bytes of kept responses; beyond it the oldest of whoever has most go first"
    )
    background_concurrency: int = Field(
        32, ge=1, description="most responses that a gateway runs in the background at once; others wait"
    )
    batch_concurrency: int = Field(
        16, ge=0, description="most lines of batches that a gateway runs at once; 0: it runs and accepts no batches"
    )
    file_max_bytes: int = Field(100 << 20, gt=0, description="largest file of /v1/files")
    files_max_bytes: int = Field(1 << 30, gt=0, description="most bytes of all uploaded files of a tenant")
    files_keep_days: float = Field(
        30.0, gt=0, lt=100_000, description="how long files and batches are kept, if not deleted before"
    )
    max_body_bytes: int = Field(16 << 20, gt=0, description="largest accepted HTTP body")
    max_header_bytes: int = Field(8_190, ge=256, description="longest accepted request line, and header of a request")
    max_connections: int | None = Field(
        None,
        ge=1,
        description="most HTTP connections; one more takes the place of the longest idle one, or gets 503; default: "
        "three quarters of the files that the process may open, at most 16384",
    )
    max_connections_per_client: int = Field(
        2_048, ge=0, description="most HTTP connections from one address (IPv6: /64); 0: no bound, as behind a proxy"
    )
    header_timeout_s: float = Field(
        20.0, gt=0, description="how long a new connection may take to its first request, and a request's head to come"
    )
    keepalive_timeout_s: float = Field(75.0, gt=0, description="how long a connection may be idle between requests")
    max_headers: int = Field(100, ge=8, description="largest number of headers of a request")
    allowed_hosts: Texts = Field(
        (),
        description="names under which clients may address the gateway, apart from localhost and host; none: on a "
        "loopback host those two only (a web page may rebind its name to this machine), elsewhere any; * allows all",
    )
    allowed_origins: Texts = Field((), description="origins whose pages may use the API from a browser; * allows all")

    @model_validator(mode="after")
    def _shares_prompts_by_prediction(self) -> Self:
        if self.max_prefill_degree > 1 and self.placement not in PREDICTING_MODES:
            raise ValueError(
                f"max_prefill_degree {self.max_prefill_degree} has no effect with placement {self.placement}, which "
                f"predicts no first token: take placement {' or '.join(PREDICTING_MODES)}, or leave the degree out"
            )
        return self
