"""An offer: what one gateway says of a request that it would refuse, in a header of the request itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from aiohttp import web
from pydantic import Field

from halfmoon.errors import InvalidRequest
from halfmoon.policy.admission.qos_classes import ClassTable, QosClass
from halfmoon.policy.admission.tenants import Tenant
from services.gateway.openai.bodies.parse_body import parse_body
from services.gateway.openai.bodies.strict_model import Part

OFFER_HEADER = "X-Halfmoon-Offer"

_MAX_VALUES = 16
_MAX_CHARS = 256


class Offer(Part):
    """A request of another gateway. It is never offered again: one hop, however gateways are connected.

    `ask`: only predict its latency. `take`: answer it.
    """

    step: Literal["ask", "take"]
    gateway: str = Field(max_length=_MAX_CHARS)
    model: str = Field(max_length=_MAX_CHARS)  # fingerprint of what is to answer
    qos_class: str | None = Field(None, max_length=_MAX_CHARS)
    cache_salt: str = Field("", max_length=_MAX_CHARS)  # of whoever asks there: their KV stays apart here, too

    def in_class(self, own: QosClass, classes: ClassTable, tenant: Tenant) -> QosClass:
        """The class that the request has here: the one of the same name, or else that of any request like it.

        It is not degraded: it was offered as a whole.
        """
        allowed = (qos for qos in classes.classes if qos.name == self.qos_class and tenant.may_use(qos.name))
        return replace(next(allowed, own), degradation=())


class OtherModel(InvalidRequest):
    """The gateway that offers the request serves another model."""

    def __init__(self) -> None:
        super().__init__("this gateway serves another model than the one that offers the request", param=OFFER_HEADER)


def offer_of(request: web.Request) -> Offer | None:
    """The offer that a request carries; None for a client's own request. Raises InvalidRequest."""
    written = request.headers.get(OFFER_HEADER)
    return None if written is None else parse_body(Offer, written.encode(errors="replace"), _MAX_VALUES)
