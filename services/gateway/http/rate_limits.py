"""Rate limits of tenants: requests and tokens a minute, as OpenAI's API tells them in headers and errors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

from aiohttp import web

from halfmoon.errors import NoCapacity
from halfmoon.policy.admission.tenants import Tenant
from halfmoon.policy.admission.token_bucket import TokenBucket
from services.gateway.http.api_keys import tenant_of

LimitKind = Literal["requests", "tokens"]

_KINDS: tuple[LimitKind, ...] = ("requests", "tokens")
LIMIT_HEADERS = tuple(f"x-ratelimit-{what}-{kind}" for kind in _KINDS for what in ("limit", "remaining", "reset"))
_UNLIMITED_PATHS = "/halfmoon/"  # the control API


class RateLimited(NoCapacity):
    """The tenant has used up one of its rates. `limit` says which."""

    def __init__(self, tenant: Tenant, limit: LimitKind, per_minute: float, wait_s: float) -> None:
        super().__init__(
            f"rate limit of tenant {tenant.name} reached: {per_minute:g} {limit} a minute; "
            f"try again in {_duration(wait_s)}",
            retry_after_ms=math.ceil(1000 * wait_s),
        )
        self.limit = limit


class RateLimits:
    """Owns the buckets of tenants with limits. Each of several gateways allows an even share of a rate."""

    def __init__(self, num_gateways: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_gateways = num_gateways
        self._clock = clock
        self._buckets: dict[tuple[str, LimitKind], TokenBucket] = {}

    def take_request(self, tenant: Tenant) -> None:
        """Counts a request, valid or not. Raises RateLimited if it is over the limit, or if tokens are used up."""
        now_s = self._clock()
        self._check(tenant, "tokens", 0.0, now_s)
        self._check(tenant, "requests", 1.0, now_s)
        requests = self._bucket(tenant, "requests", now_s)
        if requests is not None:
            requests.take(1.0, now_s)

    def take_tokens(self, tenant: Tenant, num_expected: float) -> None:
        """Takes the tokens that a request is expected to cost. Raises RateLimited, and takes nothing then."""
        now_s = self._clock()
        self._check(tenant, "tokens", num_expected, now_s)
        self.correct_tokens(tenant, num_expected)

    def correct_tokens(self, tenant: Tenant, num_more: float) -> None:
        """Takes what a request cost above expectation; a negative number is given back."""
        now_s = self._clock()
        tokens = self._bucket(tenant, "tokens", now_s)
        if tokens is not None:
            tokens.take(num_more, now_s)

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds what is left to the headers of a response."""
        tenant, now_s = tenant_of(request), self._clock()
        if not tenant.name or request.path.startswith(_UNLIMITED_PATHS):
            return
        for kind in _KINDS:
            bucket = self._bucket(tenant, kind, now_s)
            if bucket is not None:
                response.headers[f"x-ratelimit-limit-{kind}"] = f"{bucket.per_period:.0f}"
                response.headers[f"x-ratelimit-remaining-{kind}"] = f"{max(0, math.floor(bucket.level(now_s)))}"
                response.headers[f"x-ratelimit-reset-{kind}"] = _duration(bucket.full_in_s(now_s))

    def _check(self, tenant: Tenant, kind: LimitKind, cost: float, now_s: float) -> None:
        bucket = self._bucket(tenant, kind, now_s)
        wait_s = bucket.wait_s(cost, now_s) if bucket is not None else 0.0
        if bucket is not None and wait_s:
            raise RateLimited(tenant, kind, bucket.per_period, wait_s)

    def _bucket(self, tenant: Tenant, kind: LimitKind, now_s: float) -> TokenBucket | None:
        """The bucket of a limit, with the rate that is in force now; None without a limit."""
        rate = tenant.requests_per_minute if kind == "requests" else tenant.tokens_per_minute
        if rate is None:
            self._buckets.pop((tenant.name, kind), None)
            return None
        rate /= self._num_gateways
        bucket = self._buckets.get((tenant.name, kind))
        if bucket is None:
            bucket = self._buckets[tenant.name, kind] = TokenBucket(rate, now_s)
        elif bucket.per_period != rate:
            bucket.change_rate(rate, now_s)
        return bucket


def _duration(seconds: float) -> str:
    """A duration as OpenAI writes it: 120ms, 1.5s, 6m0s. Rounded up."""
    milliseconds = math.ceil(1000 * seconds)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, left = divmod(milliseconds, 60_000)
    rest = f"{left / 1000:g}s"
    return f"{minutes}m{rest}" if minutes else rest
