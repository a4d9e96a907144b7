"""The tenants and keys in force: those of the settings, and those of the ledger, which every gateway may edit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from pydantic import ValidationError

from halfmoon.config.tenants import TenantConfig, check_tenant_classes, check_tenants
from halfmoon.ledger.edits.stored_tenants import StoredKey, StoredTenant, StoredTenants
from halfmoon.policy.admission.fair_shares import FairShares
from halfmoon.policy.admission.tenants import Tenant
from halfmoon.rpc.addresses.loopback import is_loopback
from halfmoon.rpc.credentials.api_keys import DeclaredKey, declared_key
from services.gateway.control.known_rows import KnownRows
from services.gateway.http.api_keys import AcceptedKey, ApiKeys, KeyTable
from services.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)


class Declared(NamedTuple):
    """The keys and tenants of the settings."""

    table: KeyTable
    written: Sequence[DeclaredKey]


class ActiveTenants:
    """Owns which keys and tenants of the ledger are in force. Reads of the ledger take turns."""

    def __init__(
        self, stored: StoredTenants, keys: ApiKeys, shares: FairShares, known: KnownRows, declared: Declared
    ) -> None:
        """`declared` are those of the settings, which win over the ledger."""
        self._shares = shares
        self._stored = stored
        self._keys = keys
        self._known = known
        self.declared = declared
        self._turn = asyncio.Lock()
        self._revision: int | None = None

    @property
    def table(self) -> KeyTable:
        """What is in force here now."""
        return self._keys.table

    async def refresh(self) -> None:
        """Applies edits of the ledger, as far as they can be read. Raises Unavailable."""
        async with self._turn:
            if await self._stored.revision() == self._revision:
                return
            read = await self._stored.all()
            self._apply(self._merged(read.tenants, read.keys))
            self._known.write([*map(_as_json, read.tenants), *map(_as_json, read.keys)])
            log.info("tenants.changed", extra={"revision": read.revision, "num_keys": len(self._keys.table.keys)})
            self._revision = read.revision

    def use_known(self, host: str) -> None:
        """Applies what this host saw last, until the ledger answers; nothing if it has answered here.

        A host that never saw the ledger knows only the declared keys. Without any it refuses requests beyond loopback,
        because the ledger may hold keys. Raises InvalidRequest for a damaged file, which may have held some.
        """
        if self._revision is not None:
            return
        rows = self._known.read(_of_json)
        tenants = [row for row in rows or () if isinstance(row, StoredTenant)]
        table = self._merged(tenants, [row for row in rows or () if isinstance(row, StoredKey)])
        if rows is None and not table.is_needed and not is_loopback(host):
            table = KeyTable(is_known=False)
        self._apply(table)
        log.warning("tenants.known", extra={"num_keys": len(table.keys), "is_known": table.is_known})

    def _merged(self, tenants: Sequence[StoredTenant], keys: Sequence[StoredKey]) -> KeyTable:
        """The declared table with these rows.

        Of a tenant whose row cannot be read, what was in force here stays; if nothing was, its keys are refused,
        because its limits are not known.
        """
        declared, stored, unread = self.declared.table, dict[str, Tenant](), set[str]()
        for row in tenants:
            try:
                stored[row.name] = TenantConfig.model_validate(row.definition).as_tenant(row.name)
            except ValidationError as error:
                log.warning("tenant.unread", extra={"tenant": row.name, "reason": str(error)[:300]})
                if row.name in self.table.tenants:
                    stored[row.name] = self.table.tenants[row.name]
                elif row.name not in declared.tenants:
                    unread.add(row.name)
        valid = (key for key in keys if key.revoked_at is None and key.tenant not in unread)
        accepted = {key.digest: AcceptedKey(key.tenant, key.expires_at) for key in valid}
        is_needed = declared.is_needed or bool(keys)
        return KeyTable({**accepted, **declared.keys}, {**stored, **declared.tenants}, is_needed)

    def _apply(self, table: KeyTable) -> None:
        self._keys.table = table
        self._shares.is_on = table.num_tenants > 1


def declared_tenants(settings: GatewaySettings) -> Declared:
    """The keys and tenants of a gateway's settings. Raises InvalidRequest."""
    of_tenants = [declared_key(key, name) for name, tenant in settings.tenants.items() for key in tenant.keys]
    keys = [*settings.declared_keys(), *of_tenants]
    check_tenants([*settings.tenants, *(key.tenant for key in keys)])
    for name, tenant in settings.tenants.items():
        check_tenant_classes(name, tenant, settings.classes)
    tenants = {name: tenant.as_tenant(name) for name, tenant in settings.tenants.items()}
    table = KeyTable({key.digest: AcceptedKey(key.tenant) for key in keys}, tenants, bool(keys or tenants))
    return Declared(table, keys)


def _as_json(row: StoredTenant | StoredKey) -> list[Any]:
    return [value.isoformat() if isinstance(value, datetime) else value for value in row]


def _of_json(fields: list[Any]) -> StoredTenant | StoredKey:
    """Tenants have three fields, keys six. Raises ValueError or TypeError for anything else."""
    if len(fields) == len(StoredTenant._fields):
        name, version, definition = fields
        if isinstance(name, str) and isinstance(definition, dict):
            return StoredTenant(name, version, definition)
    elif len(fields) == len(StoredKey._fields) and all(isinstance(text, str) for text in fields[:3]):
        return StoredKey(*fields[:3], *(value and datetime.fromisoformat(value) for value in fields[3:]))
    raise ValueError("it is neither a tenant nor a key")
