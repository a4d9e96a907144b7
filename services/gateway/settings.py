"""The gateway's settings: environment (`HALFMOON_GATEWAY_...`) and command line from one class."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings

from halfmoon.config.gateway import GatewayConfig, HandoverConfig
from halfmoon.config.observability import ObservedConfig
from halfmoon.config.qos_classes import ClassesConfig
from halfmoon.config.quantization import QuantizationConfig
from halfmoon.config.section import Texts
from halfmoon.config.security import SecurityConfig
from halfmoon.config.state import StateConfig
from halfmoon.config.tenants import TenantsConfig
from halfmoon.rpc.addresses.masked_url import HIDDEN, masked_url
from halfmoon.rpc.service import service_config


class GatewaySettings(
    GatewayConfig,
    HandoverConfig,
    ClassesConfig,
    TenantsConfig,
    SecurityConfig,
    StateConfig,
    QuantizationConfig,
    ObservedConfig,
    BaseSettings,
):
    """The settings, read once in `__main__`. Names that end in `_s` are in seconds."""

    model_config = service_config("gateway")

    reuse_port: bool = Field(False, description="let several gateways on one host share the HTTP port (SO_REUSEPORT)")
    http_descriptors: tuple[int, ...] = Field((), description="inherited listening sockets, instead of host and port")
    sibling_descriptors: tuple[int, ...] = Field(
        (), description="inherited listening sockets of other gateways: what they leave waiting is accepted here"
    )
    num_gateways: int = Field(
        1, ge=1, description="gateways that share the ledger; each allows an even share of every tenant's rates"
    )
    cluster_listen: str = Field("127.0.0.1:0", description="host:port where workers register (gRPC)")
    advertise_cluster: str | None = Field(None, description="host:port that workers dial, if not cluster_listen")
    model: str = Field("demo", description="model whose tokenizer and chat template are used")
    model_name: str | None = Field(None, description="name under which the model is served; None: its own")
    model_alias: tuple[str, ...] = Field(
        (), description="another name for the model in requests, such as one that a class matches; repeat it"
    )
    lora: Texts = Field((), description="adapter that requests call by its name, as NAME=PATH; repeat it")
    kv_store: Texts = Field(
        (), description="host:port of a store of the pool, beside those that workers say they use; repeat it"
    )

    def as_logged(self) -> dict[str, Any]:
        """Every setting, without the ledger's password and the keys, which the rules of classes hold, too."""
        keys = [HIDDEN] * len(self.api_key)
        token = None if self.operator_token is None else HIDDEN
        peers = [HIDDEN] * len(self.peer_key)
        masked = {
            "ledger_url": masked_url(self.ledger), "api_key": keys, "operator_token": token, "peer_key": peers
        }  # fmt: skip
        return {**self.model_dump(mode="json"), **masked, "classes": list(self.classes), "tenants": list(self.tenants)}
