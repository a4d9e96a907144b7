"""The configuration file's schema. A plan of `halfmoon plan` is also such a file."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ByteSize, Field, field_validator, model_validator

from halfmoon.config.gateway import GatewayConfig, HandoverConfig
from halfmoon.config.hosts import HostsConfig
from halfmoon.config.observability import ObservedConfig
from halfmoon.config.planner import PlannerConfig
from halfmoon.config.qos_classes import DEFAULT_TARGETS, ClassConfig, ClassesConfig, check_classes
from halfmoon.config.quantization import QuantizationConfig
from halfmoon.config.section import Section, Texts
from halfmoon.config.security import ClusterSecretConfig, MutualTlsConfig, SecurityConfig
from halfmoon.config.simulation import SimulationConfig
from halfmoon.config.state import StateConfig
from halfmoon.config.stores import StoreConfig
from halfmoon.config.tenants import DeclaredTenant, TenantsConfig, check_tenant_classes, check_tenants
from halfmoon.config.worker import WorkerConfig
from halfmoon.errors import InvalidRequest
from halfmoon.plan.plan_file import PlannedLayout
from halfmoon.policy.admission.qos_classes import DEFAULT_CLASS
from halfmoon.policy.view.worker_view import Role
from halfmoon.up.supervision.log_files import DEFAULT_LOG_BYTES, DEFAULT_LOG_FILES


def _list_of_one(written: Any) -> Any:
    return [written] if isinstance(written, dict) else written


def _without_empty(written: Any) -> Any:
    """Leaves out what is named but empty, such as a section all of whose lines are comments: it has its default."""
    return (
        {name: value for name, value in written.items() if value is not None} if isinstance(written, dict) else written
    )


def _mapping(written: Any, name: str) -> dict[str, Any]:
    """A section as it is written; empty if it is not there, or is no mapping, which is reported elsewhere."""
    section = written.get(name) if isinstance(written, dict) else None
    return section if isinstance(section, dict) else {}


def _model_by_path(written: Any) -> Any:
    return {"path": written} if isinstance(written, str) else written


class ModelConfig(QuantizationConfig):
    """The served model. A plain text in its place is the path."""

    path: str = Field("demo", description="'demo', a directory, a .gguf file or a Hugging Face id")
    name: str | None = Field(None, description="name under which the model is served; none: the model's own")
    alias: Texts = Field((), description="further names by which requests may call the model")
    lora: Texts = Field(
        (), description="LoRA adapters for vLLM as NAME=PATH; requests call each by its name, as they call a model"
    )


class WorkerGroup(WorkerConfig):
    """Identical workers of one role."""

    count: int = Field(1, ge=0, le=4096, description="number of workers in the group")


Groups = Annotated[tuple[WorkerGroup, ...], BeforeValidator(_list_of_one)]


class WorkersConfig(Section):
    """Workers by role. Without a worker of role both there is at least one prefill and one decode worker."""

    _empty = model_validator(mode="before")(_without_empty)

    all: WorkerConfig = Field(default_factory=WorkerConfig, description="settings of every worker")
    prefill: Groups = Field((), description="groups of workers that compute prompts")
    decode: Groups = Field((), description="groups of workers that generate answers")
    both: Groups = Field((), description="groups of workers that do both on one engine")

    def groups(self, role: Role) -> tuple[WorkerGroup, ...]:
        """Returns a role's groups. A role without groups has one worker, unless there are workers of role both."""
        if role == "both":
            return self.both
        named = self.prefill if role == "prefill" else self.decode
        has_both = any(group.count for group in self.both)
        return named if named or has_both else (WorkerGroup(),)


class UpGatewayConfig(GatewayConfig):
    """Identical gateways."""

    replicas: int = Field(1, ge=1, le=64, description="gateways that share the HTTP port")


class UpStoresConfig(StoreConfig):
    """Identical KV stores."""

    count: int = Field(
        1, ge=1, le=64, description="number of KV stores; they are assigned to the workers of each role in turn"
    )


class UpObservedConfig(ObservedConfig):
    """Metrics, traces and logs."""

    metrics_port: int | None = Field(
        0,
        ge=0,
        le=65000,
        description="first of the successive ports where stores, planner and workers serve Prometheus metrics; 0 picks "
        "free ports and lists them in the state directory; null opens none",
    )
    log_bytes: ByteSize = Field(
        ByteSize(DEFAULT_LOG_BYTES), ge=1 << 16, description="size at which `halfmoon up` begins a new log file"
    )
    log_files: int = Field(
        DEFAULT_LOG_FILES, ge=1, le=1000, description="log files that `halfmoon up` keeps of each service"
    )


class UpSimulationConfig(SimulationConfig):
    """Simulated workers."""

    processes: int = Field(1, ge=1, le=256, description="processes that share the simulated workers")


class UpSecurityConfig(SecurityConfig, ClusterSecretConfig, MutualTlsConfig):
    """Secrets of clients, operators and services."""


class ConsoleConfig(Section):
    """The console, pages for operators."""

    enabled: bool = Field(True, description="start the Streamlit console, if it is installed")
    port: int = Field(8501, ge=1, le=65535, description="port of the console")


class SystemConfig(ClassesConfig, TenantsConfig, HandoverConfig, StateConfig):
    """The whole system."""

    _empty = model_validator(mode="before")(_without_empty)

    model: Annotated[ModelConfig, BeforeValidator(_model_by_path)] = Field(default_factory=ModelConfig)
    engine: Literal["real", "vllm", "sim"] = Field(
        "real",
        description="real: the workers' own `engine`; vllm: vLLM for all that name none; sim: simulated workers, which "
        "need neither weights nor torch",
    )
    workers: WorkersConfig = Field(default_factory=WorkersConfig)
    hosts: HostsConfig = Field(default_factory=HostsConfig)
    gateway: UpGatewayConfig = Field(default_factory=UpGatewayConfig)
    stores: UpStoresConfig = Field(default_factory=UpStoresConfig)
    security: UpSecurityConfig = Field(default_factory=UpSecurityConfig)
    observability: UpObservedConfig = Field(default_factory=UpObservedConfig)
    planner: PlannerConfig = Field(default_factory=PlannerConfig)
    console: ConsoleConfig = Field(default_factory=ConsoleConfig)
    simulation: UpSimulationConfig = Field(default_factory=UpSimulationConfig)
    cluster: PlannedLayout | None = Field(None, description="workers of a plan, as `halfmoon plan` writes them")
    layout: str | None = Field(None, description="a plan's own description; has no effect")
    expected: dict[str, float] | None = Field(None, description="performance that a plan expects; has no effect")

    @model_validator(mode="before")
    @classmethod
    def _keeps_what_its_plan_counts_on(cls, written: Any) -> Any:
        """Gives the KV policy of a plan to all classes that say nothing of one, and to requests of no other class."""
        cluster, classes = _mapping(written, "cluster"), _mapping(written, "classes")
        policy = cluster.get("kv_policy")
        if policy is None or not isinstance(written.get("classes") or {}, dict):
            return written
        has_targets = _mapping(written, "gateway").get("slo", "default") == "default"
        others = DEFAULT_TARGETS.model_dump(mode="json", exclude_unset=True) if has_targets else {}
        every = {DEFAULT_CLASS: others} | classes
        kept = {name: {"kv_policy": policy} | one if isinstance(one, dict) else one for name, one in every.items()}
        return written | {"classes": kept}

    @field_validator("classes")
    @classmethod
    def _are_classes(cls, written: dict[str, ClassConfig]) -> dict[str, ClassConfig]:
        try:
            check_classes(written)
        except InvalidRequest as error:
            raise ValueError(error.message) from error
        return written

    @field_validator("tenants")
    @classmethod
    def _are_tenants(cls, written: dict[str, DeclaredTenant]) -> dict[str, DeclaredTenant]:
        try:
            check_tenants(written)
        except InvalidRequest as error:
            raise ValueError(error.message) from error
        return written

    @model_validator(mode="after")
    def _names_classes_that_there_are(self) -> Self:
        try:
            for name, tenant in self.tenants.items():
                check_tenant_classes(name, tenant, self.classes)
        except InvalidRequest as error:
            raise ValueError(error.message) from error
        return self

    @model_validator(mode="after")
    def _names_workers_once(self) -> Self:
        roles = (self.workers.prefill, self.workers.decode, self.workers.both)
        if self.cluster is not None and any(roles):
            raise ValueError(
                "the plan's cluster says how many workers there are: leave the roles of workers "
                "(--prefill, --decode and --both) out, or delete the cluster"
            )
        return self

    @model_validator(mode="after")
    def _has_one_port_each(self) -> Self:
        if self.console.enabled and self.console.port == self.gateway.port:
            raise ValueError(
                f"gateway.port and console.port are both {self.console.port}: change one (--port, --console-port)"
            )
        return self
