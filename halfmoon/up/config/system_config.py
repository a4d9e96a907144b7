"""What a configuration file may say. A plan of `halfmoon plan` is such a file, too."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from halfmoon.config.gateway import GatewayConfig, HandoverConfig
from halfmoon.config.observability import ObservedConfig
from halfmoon.config.planner import PlannerConfig
from halfmoon.config.qos_classes import ClassConfig, ClassesConfig, check_classes
from halfmoon.config.section import Section
from halfmoon.config.security import SecurityConfig
from halfmoon.config.simulation import SimulationConfig
from halfmoon.config.state import StateConfig
from halfmoon.config.stores import StoreConfig
from halfmoon.config.worker import RoleName, WorkerConfig
from halfmoon.errors import InvalidRequest
from halfmoon.plan.plan_file import PlannedLayout


def _list_of_one(written: Any) -> Any:
    return [written] if isinstance(written, dict) else written


def _model_by_path(written: Any) -> Any:
    return {"path": written} if isinstance(written, str) else written


class ModelConfig(Section):
    """The model that is served. A text alone is its path."""

    path: str = Field("demo", description="'demo', a directory, a .gguf file or a Hugging Face id")
    name: str | None = Field(None, description="name under which the model is served; none: its own")
    alias: tuple[str, ...] = Field((), description="other names that requests may give the model")


class WorkerGroup(WorkerConfig):
    """Equal workers of one role."""

    count: int = Field(1, ge=0, description="how many of them")


Groups = Annotated[tuple[WorkerGroup, ...], BeforeValidator(_list_of_one)]


class WorkersConfig(Section):
    """Workers by role. Without one that does both there is at least one prefill and one decode worker."""

    all: WorkerConfig = Field(default_factory=WorkerConfig, description="what holds for every worker")
    prefill: Groups = Field((), description="groups of workers that compute prompts")
    decode: Groups = Field((), description="groups of workers that generate answers")
    both: Groups = Field((), description="groups of workers that do both on one engine")

    def groups(self, role: RoleName) -> tuple[WorkerGroup, ...]:
        """A role that is not named has one worker, unless others do both."""
        if role == "both":
            return self.both
        named = self.prefill if role == "prefill" else self.decode
        has_both = any(group.count for group in self.both)
        return named if named or has_both else (WorkerGroup(),)


class UpGatewayConfig(GatewayConfig):
    """Gateways, all alike."""

    replicas: int = Field(1, ge=1, description="gateways that share the HTTP port")


class UpStoresConfig(StoreConfig):
    """Stores of KV blocks, all alike."""

    count: int = Field(1, ge=1, description="stores of KV blocks; workers of each role use them in turns")


class UpObservedConfig(ObservedConfig):
    """Metrics, traces and logs."""

    metrics_port: int | None = Field(
        0,
        ge=0,
        le=65000,
        description="first of the ports where stores, planner and workers serve Prometheus metrics, each the next one; "
        "0 takes free ports and lists them in the state directory; null opens none",
    )


class UpSimulationConfig(SimulationConfig):
    """Simulated workers."""

    processes: int = Field(1, ge=1, description="processes that share the simulated workers")


class ConsoleConfig(Section):
    """The pages for operators."""

    enabled: bool = Field(True, description="start the Streamlit console, if it is installed")
    port: int = Field(8501, ge=1, le=65535, description="port of the console")


class SystemConfig(ClassesConfig, HandoverConfig, StateConfig):
    """The whole system."""

    model: Annotated[ModelConfig, BeforeValidator(_model_by_path)] = Field(default_factory=ModelConfig)
    engine: Literal["real", "sim"] = Field(
        "real", description="real engines, or sim: simulated workers, which need no weights and no torch"
    )
    workers: WorkersConfig = Field(default_factory=WorkersConfig)
    gateway: UpGatewayConfig = Field(default_factory=UpGatewayConfig)
    stores: UpStoresConfig = Field(default_factory=UpStoresConfig)
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    observability: UpObservedConfig = Field(default_factory=UpObservedConfig)
    planner: PlannerConfig = Field(default_factory=PlannerConfig)
    console: ConsoleConfig = Field(default_factory=ConsoleConfig)
    simulation: UpSimulationConfig = Field(default_factory=UpSimulationConfig)
    cluster: PlannedLayout | None = Field(None, description="the workers of a plan, as `halfmoon plan` writes them")
    layout: str | None = Field(None, description="what a plan says about itself; nothing follows from it")
    expected: dict[str, float] | None = Field(
        None, description="what a plan expects of its workers; nothing follows from it"
    )

    @field_validator("classes")
    @classmethod
    def _are_classes(cls, written: dict[str, ClassConfig]) -> dict[str, ClassConfig]:
        try:
            check_classes(written)
        except InvalidRequest as error:
            raise ValueError(error.message) from error
        return written

    @model_validator(mode="after")
    def _names_workers_once(self) -> Self:
        roles = (self.workers.prefill, self.workers.decode, self.workers.both)
        if self.cluster is not None and any(roles):
            raise ValueError(
                "the plan's cluster says how many workers there are: leave the roles of workers "
                "(--prefill, --decode and --both) out, or delete the cluster"
            )
        return self
