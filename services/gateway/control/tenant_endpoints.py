"""The control API's tenants and keys: kept in the ledger, in force on every gateway within a poll."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from pydantic import Field

from halfmoon.config.tenants import TenantConfig, check_tenant_classes, check_tenant_name
from halfmoon.errors import InvalidRequest
from halfmoon.ledger.edits.stored_tenants import StoredKey
from halfmoon.ledger.ledger import Ledger
from halfmoon.policy.admission.tenants import Tenant
from halfmoon.rpc.credentials.api_keys import key_digest, key_id, new_api_key
from services.gateway.control.active_tenants import ActiveTenants
from services.gateway.control.class_endpoints import version_of
from services.gateway.control.store_view import StoreView
from services.gateway.http.received_request import receive_body
from services.gateway.openai.bodies.parse_body import parse_body
from services.gateway.openai.bodies.strict_model import Part

_MAX_VALUES = 1_000  # of a body
_USAGE = timedelta(hours=24)
_MAX_DAYS = 36_500


class TenantBody(TenantConfig):
    """What a tenant may use, and the version that it replaces."""

    version: int = Field(0, ge=0, lt=1 << 31)  # 0: the tenant has no limits yet


class KeyBody(Part):
    """A new key."""

    label: str = Field("", max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")  # terminals show it
    expires_days: float | None = Field(None, gt=0, le=_MAX_DAYS)


class TenantEndpoints:
    """Serves tenants to operators. Owns nothing.

    All of them raise Unavailable when the ledger does not answer.
    """

    def __init__(self, ledger: Ledger, active: ActiveTenants, stores: StoreView) -> None:
        self._ledger = ledger
        self._active = active
        self._stores = stores

    async def list(self, request: web.Request) -> web.Response:
        """GET /halfmoon/v1/tenants: each with its limits, keys by id, and usage of the last 24 hours."""
        read = await self._ledger.tenants.all()
        usage = await self._ledger.tenant_usage.since(datetime.now(UTC) - _USAGE)
        stored_bytes = await self._stored_bytes()
        declared, versions = self._active.declared, {one.name: one.version for one in read.tenants}
        keys = [(key.tenant, {**_key(key.digest), "is_declared": True}) for key in declared.written]
        keys += [(key.tenant, _key(key.digest, key)) for key in read.keys]
        names = {*declared.table.tenants, *versions, *usage, *(name for name, _ in keys)}
        shown = [
            {
                **_limits(self._active.table.tenant(name)),
                "name": name,
                "version": versions.get(name, 0),
                "is_declared": name in declared.table.tenants,
                "keys": [key for owner, key in keys if owner == name],
                "usage": usage[name]._asdict() if name in usage else None,
                "stored_kv_bytes": stored_bytes[name],
            }
            for name in sorted(names)
        ]
        return web.json_response({"tenants": shown, "is_key_needed": self._active.table.is_needed})

    async def put(self, request: web.Request) -> web.Response:
        """PUT /halfmoon/v1/tenants/{name}: its limits. Raises InvalidRequest or VersionConflict."""
        name = self._name(request)
        body = parse_body(TenantBody, await receive_body(request), _MAX_VALUES)
        check_tenant_classes(name, body, [one.name for one in (await self._ledger.classes.all()).classes])
        definition = body.model_dump(mode="json", exclude_defaults=True, exclude={"version"})
        stored = await self._ledger.tenants.put(name, definition, body.version)
        await self._active.refresh()
        return web.json_response({**_limits(body.as_tenant(name)), "name": name, "version": stored.version})

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /halfmoon/v1/tenants/{name}?version=3: forgets its limits and revokes its keys."""
        version = version_of(request.query.get("version", ""))
        await self._ledger.tenants.remove(self._name(request), version, datetime.now(UTC))
        await self._active.refresh()
        return web.Response(status=204)

    async def add_key(self, request: web.Request) -> web.Response:
        """POST /halfmoon/v1/tenants/{name}/keys: a new key, in this answer only. Raises InvalidRequest."""
        name = request.match_info["name"]
        check_tenant_name(name)
        body = parse_body(KeyBody, await receive_body(request), _MAX_VALUES)
        key, now = new_api_key(), datetime.now(UTC)
        expires_at = None if body.expires_days is None else now + timedelta(days=body.expires_days)
        stored = StoredKey(key_digest(key), name, body.label, now, expires_at)
        await self._ledger.tenants.add_key(stored)
        await self._active.refresh()
        return web.json_response({**_key(stored.digest, stored), "key": key}, status=201)

    async def revoke_key(self, request: web.Request) -> web.Response:
        """DELETE /halfmoon/v1/tenants/{name}/keys/{key_id}. Raises NotFound."""
        tenant, key_id = request.match_info["name"], request.match_info["key_id"]
        await self._ledger.tenants.revoke(key_id, datetime.now(UTC), tenant)
        await self._active.refresh()
        return web.Response(status=204)

    def _name(self, request: web.Request) -> str:
        name = request.match_info["name"]
        check_tenant_name(name)
        if name in self._active.declared.table.tenants:
            raise InvalidRequest(f"tenant {name} is one of the configuration: change it there", param="tenant")
        return name

    async def _stored_bytes(self) -> Counter[str]:
        """KV of each tenant, over all stores that answer."""
        total: Counter[str] = Counter()
        for store in await self._stores.shown():
            for tenant in store.get("tenants", ()):
                total[tenant["tenant"]] += tenant["used_bytes"]
        return total


def _limits(tenant: Tenant) -> dict[str, Any]:
    names = ("requests_per_minute", "tokens_per_minute", "kv_bytes", "classes", "default_class", "weight", "cache_pool")
    return {name: getattr(tenant, name) for name in names}


def _key(digest: str, stored: StoredKey | None = None) -> dict[str, Any]:
    """A key as operators see it: never the key, nor its whole digest."""
    moments = ("created_at", "expires_at", "revoked_at")
    shown: dict[str, Any] = {"key_id": key_id(digest), "label": "", "is_declared": False, **dict.fromkeys(moments)}
    if stored is not None:
        shown["label"] = stored.label
        for name in moments:
            moment = getattr(stored, name)
            shown[name] = moment and moment.isoformat()
    return shown
