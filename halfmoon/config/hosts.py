"""Settings of the hosts on which `halfmoon up` starts services."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from halfmoon.config.section import Section, Texts

HostsName = Literal["this-host", "ray"]


class HostsConfig(Section):
    """The hosts of the system."""

    on: HostsName = Field(
        "this-host",
        description="where workers and stores start: this-host, or ray, on the hosts of a Ray cluster; gateways, "
        "planner and console start on this host",
    )
    ray_address: str = Field(
        "auto", description="HOST:PORT of the Ray cluster; auto: the one that this host is in (`ray start`)"
    )
    address: str | None = Field(
        None,
        description="address of this host at which services on other hosts reach its own, for `halfmoon join`; none: "
        "loopback, or with ray the one that Ray uses",
    )
    port: int = Field(
        7000,
        ge=0,
        le=65_000,
        description="with an `address`: port at which workers of other hosts join the first gateway; further gateways "
        "have the next ones; 0 picks free ports",
    )
    gateways: Texts = Field(
        (),
        description="HOST:PORT of the cluster service of each gateway on other hosts: workers of this host join them, "
        "too. A DNS name stands for all its addresses, own ones included. All gateways need one `ledger_url`",
    )
