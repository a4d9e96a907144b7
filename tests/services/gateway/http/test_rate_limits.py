"""Rates of tenants: whom they stop, what the client is told, and that each gateway allows its share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from halfmoon.policy.admission.tenants import ANYONE, Tenant
from services.gateway.http.rate_limits import RateLimited, RateLimits
from tests.services.gateway.fakes import MODEL, Fleet, Script, running_fleet
from tests.services.gateway.test_access import ask

SLOW = Tenant("slow", requests_per_minute=2, tokens_per_minute=600)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_requests_and_tokens_a_minute() -> None:
    clock = Clock()
    limits = RateLimits(clock=clock)
    limits.take_request(SLOW)
    limits.take_request(SLOW)
    with pytest.raises(RateLimited, match=r"tenant slow reached: 2 requests a minute; try again in 30s") as refused:
        limits.take_request(SLOW)
    assert (refused.value.retry_after_ms, refused.value.limit) == (30_000, "requests")
    clock.now_s += 30
    limits.take_request(SLOW)
    limits.take_tokens(SLOW, 400)
    with pytest.raises(RateLimited, match="600 tokens a minute") as refused:
        limits.take_tokens(SLOW, 300)
    assert refused.value.retry_after_ms == 10_000
    limits.correct_tokens(SLOW, -200)  # it was shorter
    limits.take_tokens(SLOW, 300)
    limits.correct_tokens(SLOW, 700)
    clock.now_s += 30
    with pytest.raises(RateLimited, match="tokens"):  # in debt
        limits.take_request(SLOW)


def test_a_request_of_more_than_a_minutes_tokens_needs_a_full_bucket() -> None:
    clock = Clock()
    limits = RateLimits(clock=clock)
    limits.take_tokens(SLOW, 1)
    with pytest.raises(RateLimited) as refused:
        limits.take_tokens(SLOW, 5_000)
    clock.now_s += (refused.value.retry_after_ms or 0) / 1000
    limits.take_tokens(SLOW, 5_000)


def test_each_gateway_allows_its_share() -> None:
    limits = RateLimits(num_gateways=2, clock=Clock())
    limits.take_request(SLOW)
    with pytest.raises(RateLimited):
        limits.take_request(SLOW)


def test_without_limits_nothing_is_counted() -> None:
    limits = RateLimits(clock=Clock())
    for tenant in (ANYONE, Tenant("free")):
        for _ in range(1000):
            limits.take_request(tenant)
            limits.take_tokens(tenant, 1e9)


def test_an_edited_rate_is_in_force_at_once() -> None:
    clock = Clock()
    limits = RateLimits(clock=clock)
    limits.take_request(SLOW)
    limits.take_request(SLOW)
    for _ in range(3):
        limits.take_request(Tenant("slow"))  # the limit was removed
    limits.take_request(SLOW)


async def post(fleet: Fleet, key: str, max_tokens: int = 1, **more: Any) -> tuple[int, Any, Any]:
    body = {"model": MODEL, "prompt": "x" * 20, "max_tokens": max_tokens, "ignore_eos": True, **more}
    return await ask(fleet, "POST", "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


async def test_clients_are_told_as_by_openai(tmp_path: Path) -> None:
    tenants = {"slow": {"keys": ["a", "b"], "requests_per_minute": 3}, "free": {"keys": ["c"]}}
    async with running_fleet(tmp_path, tenants=tenants) as fleet:
        await fleet.pair()
        for key, left in (("a", "2"), ("b", "1"), ("a", "0")):
            status, headers, _ = await post(fleet, key)
            assert (status, headers["x-ratelimit-limit-requests"]) == (200, "3")
            assert headers["x-ratelimit-remaining-requests"] == left
            assert headers["x-ratelimit-reset-requests"].endswith("s")
        status, headers, body = await post(fleet, "b")
        assert (status, body["error"]["type"], body["error"]["code"]) == (429, "requests", "rate_limit_exceeded")
        assert 1 <= int(headers["Retry-After"]) <= 20
        tokenizing = {"json": {"prompt": "a"}, "headers": {"Authorization": "Bearer a"}}
        assert (await ask(fleet, "POST", "/tokenize", **tokenizing))[0] == 429
        status, headers, _ = await post(fleet, "c")
        assert status == 200
        assert not [name for name in headers if name.lower().startswith("x-ratelimit")]
        metrics = await fleet.metrics()
    assert 'halfmoon_gateway_tenant_rate_limited_total{limit="requests",tenant="slow"} 1.0' in metrics
    assert 'halfmoon_gateway_tenant_requests_total{status="ok",tenant="slow"} 3.0' in metrics
    assert 'halfmoon_gateway_tenant_tokens_total{kind="prompt",tenant="slow"} 60.0' in metrics


async def test_tokens_count_as_used_not_as_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.service.RateLimits", partial(RateLimits, clock=lambda: 0.0))
    tenants = {"t": {"keys": ["a"], "tokens_per_minute": 1_000}}
    async with running_fleet(tmp_path, tenants=tenants) as fleet:
        await fleet.pair(Script("yes"))
        for _ in range(12):  # 170 expected, 23 and the end used
            status, headers, _ = await post(fleet, "a", max_tokens=150, ignore_eos=False, stop=["yes"])
            assert status == 200
        left = int(headers["x-ratelimit-remaining-tokens"])
        assert 500 < left < 1_000 - 11 * 23  # the last one is in the headers as expected
        refused = [await post(fleet, "a", prompt="x" * 500) for _ in range(3)]  # longer than the context: 400
        assert {status for status, _, _ in refused} == {400}
        status, headers, _ = await post(fleet, "a")
        assert status == 200


async def test_the_number_of_tenants_in_metrics_is_bounded(tmp_path: Path) -> None:
    keys = {f"t{number}": {"keys": [f"k{number}"]} for number in range(110)}
    async with running_fleet(tmp_path, tenants=keys) as fleet:
        await fleet.pair()
        for number in range(110):
            assert (await post(fleet, f"k{number}"))[0] == 200
        lines = [line for line in (await fleet.metrics()).splitlines() if "tenant_requests_total{" in line]
    assert len(lines) == 101
    assert 'halfmoon_gateway_tenant_requests_total{status="ok",tenant="other"} 10.0' in lines
