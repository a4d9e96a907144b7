"""`halfmoon keys …`: tenants and their API keys in the ledger. Running gateways follow within seconds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from halfmoon.cli.profile_store import LedgerOptions, ledger_in
from halfmoon.cli.terminal.option_groups import with_option_groups
from halfmoon.config.tenants import TenantConfig, check_tenant_classes, check_tenant_name
from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.rpc.credentials.api_keys import key_digest, key_id, new_api_key
from halfmoon.up.config.human_bytes import human_bytes

if TYPE_CHECKING:
    from halfmoon.ledger.edits.stored_tenants import StoredKey
    from halfmoon.ledger.ledger import Ledger

app = typer.Typer(no_args_is_help=True, help="Adds, lists and revokes API keys, and edits what tenants may use.")

Result = TypeVar("Result")

_FIRST_KEY = (
    "This is the first key: from now on gateways need one for every request, and the operator token for control: that "
    "of `halfmoon up` is in operator_token in its state directory."
)
_REMOVED = "none"  # what takes a limit away
_COLUMNS = 140

Limit = Annotated[str | None, typer.Option(help="Requests a minute; none: no limit.")]
Tenant = Annotated[str, typer.Argument(help="Name of the tenant.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """What a tenant may use. An option that is not given changes nothing."""

    PANEL: ClassVar[str] = "What the tenant may use (none: no limit)"
    requests_per_minute: Limit = None
    tokens_per_minute: Annotated[str | None, typer.Option(help="Tokens of prompts and outputs a minute.")] = None
    kv_bytes: Annotated[str | None, typer.Option(help="KV kept in each store, such as 2GiB.")] = None
    classes: Annotated[str | None, typer.Option(help="Classes that it may use, separated by commas.")] = None
    default_class: Annotated[str | None, typer.Option(help="Class of requests that match no rule.")] = None
    weight: Annotated[str | None, typer.Option(help="Share of a class, relative to other tenants.")] = None
    cache_pool: Annotated[str | None, typer.Option(help="Tenants of one pool share cached KV.")] = None

    def over(self, definition: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the definition with these options. Raises InvalidRequest for values out of range."""
        names = [name for name in TenantConfig.model_fields if getattr(self, name) is not None]
        given = {name: getattr(self, name) for name in names}
        if self.classes is not None:
            given["classes"] = [name.strip() for name in self.classes.split(",")]
        kept = {name: value for name, value in definition.items() if name not in given}
        new = {name: value for name, value in given.items() if value not in (_REMOVED, [_REMOVED])}
        try:
            return TenantConfig.model_validate(kept | new).model_dump(mode="json", exclude_defaults=True)
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(str(part) for part in problem["loc"])
            raise InvalidRequest(f"{name}: {problem['msg']}".removeprefix(": "), param=name) from error


@app.command()
@with_option_groups
def add(
    tenant: Tenant,
    limits: LimitOptions,
    ledger: LedgerOptions,
    label: Annotated[str, typer.Option(help="What the key is for; shown in lists.")] = "",
    expires_days: Annotated[
        float | None, typer.Option(min=0.0001, max=36_500, help="Days until the key ends by itself.")
    ] = None,
) -> None:
    """Makes a key for a tenant, new or not, and prints it. It is shown this once; only its digest is kept.

    Where there is any key, gateways serve no request without one.
    """
    from halfmoon.ledger.edits.stored_tenants import StoredKey

    key, now = new_api_key(), datetime.now(UTC)
    expires_at = None if expires_days is None else now + timedelta(days=expires_days)
    stored = StoredKey(key_digest(key), tenant, label[:128], now, expires_at)

    async def work(ledger: Ledger) -> bool:
        check_tenant_name(tenant)
        is_first = not (await ledger.tenants.all()).keys
        await _edit(ledger, tenant, limits)
        await ledger.tenants.add_key(stored)
        return is_first

    is_first = _run(ledger, work)
    print(key)
    error_console = Console(stderr=True)
    error_console.print(f"key {key_id(stored.digest)} of tenant {tenant}; it is not shown again", highlight=False)
    if is_first:
        error_console.print(_FIRST_KEY, highlight=False, soft_wrap=True)


@app.command("set")
@with_option_groups
def set_(tenant: Tenant, limits: LimitOptions, ledger: LedgerOptions) -> None:
    """Changes what a tenant may use."""

    async def work(ledger: Ledger) -> None:
        check_tenant_name(tenant)
        await _edit(ledger, tenant, limits)

    _run(ledger, work)


@app.command("list")
@with_option_groups
def list_(
    ledger: LedgerOptions,
    revoked: Annotated[bool, typer.Option("--revoked", help="Lists revoked and expired keys, too.")] = False,
) -> None:
    """Lists the tenants and keys of the ledger. Those of a configuration file are not in it."""
    read = _run(ledger, lambda opened: opened.tenants.all())
    now = datetime.now(UTC)
    definitions = {one.name: one.definition for one in read.tenants}
    shown = [key for key in read.keys if revoked or _state(key, now) == ""]
    table = Table("tenant", "key", "label", "made", "ends", "may use", box=None, header_style="dim")
    for name in sorted({*definitions, *(key.tenant for key in shown)}):
        rows = [[key_id(key.digest), escape(key.label), _day(key.created_at), _ends(key, now)]
                for key in shown if key.tenant == name]  # fmt: skip
        for number, row in enumerate(rows or [["no key", "", "", ""]]):
            table.add_row(name, *row, escape(_limits(definitions.get(name, {}))) if number == 0 else "")
    console = Console() if Console().is_terminal else Console(width=_COLUMNS)
    console.print(table if table.row_count else "no tenants: make a key with `halfmoon keys add TENANT`")


@app.command()
@with_option_groups
def revoke(
    ledger: LedgerOptions,
    keys: Annotated[list[str] | None, typer.Argument(help="Ids of keys, as `halfmoon keys list` shows them.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Revokes all keys of this tenant, and forgets its limits.")] = None,
) -> None:
    """Revokes keys. Requests that run go on; gateways refuse new ones within seconds."""
    if not keys and tenant is None:
        raise typer.BadParameter("name the ids of keys, or --tenant")

    async def work(ledger: Ledger) -> None:
        tenants, now = ledger.tenants, datetime.now(UTC)
        for key in keys or ():
            await tenants.revoke(key, now)
        if tenant is not None:
            versions = {one.name: one.version for one in (await tenants.all()).tenants}
            await tenants.remove(tenant, versions.get(tenant, 0), now)

    _run(ledger, work)


@app.command()
def digest() -> None:
    """Reads a key and prints its digest, which a configuration file may hold instead of the key."""
    is_typed = sys.stdin.isatty()
    key = (typer.prompt("Key", hide_input=True, err=True) if is_typed else sys.stdin.readline()).strip()
    if not key:
        raise typer.BadParameter("there is no key on the standard input")
    print(f"sha256:{key_digest(key)}")


async def _edit(ledger: Ledger, name: str, limits: LimitOptions) -> None:
    stored = next((one for one in (await ledger.tenants.all()).tenants if one.name == name), None)
    before = stored.definition if stored else {}
    definition = limits.over(before)
    if limits.classes is not None or limits.default_class is not None:
        await _check_classes(ledger, name, TenantConfig.model_validate(definition))
    if definition != before:
        await ledger.tenants.put(name, definition, stored.version if stored else 0)


async def _check_classes(ledger: Ledger, name: str, tenant: TenantConfig) -> None:
    """Raises InvalidRequest for classes that are not in the ledger; says so if no gateway has written any yet."""
    configured = [one.name for one in (await ledger.classes.all()).classes]
    try:
        check_tenant_classes(name, tenant, configured)
    except InvalidRequest as error:
        if configured:
            raise
        Console(stderr=True).out(
            f"no gateway has written its classes to this ledger yet, so they cannot be checked: {error.message}",
            highlight=False,
        )


def _run(options: LedgerOptions, work: Callable[[Ledger], Awaitable[Result]]) -> Result:
    """Runs `work` on the ledger, which is made if it is absent. Exits with a message for a HalfmoonError."""

    async def run() -> Result:
        async with ledger_in(options.state_dir, options.ledger_url) as ledger:
            return await work(ledger)

    try:
        return asyncio.run(run())
    except HalfmoonError as error:
        raise typer.BadParameter(error.message) from error


def _state(key: StoredKey, now: datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else ""


def _ends(key: StoredKey, now: datetime) -> str:
    return _state(key, now) or ("" if key.expires_at is None else _day(key.expires_at))


def _day(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M")


def _limits(definition: Mapping[str, Any]) -> str:
    parts: Sequence[str] = [
        f"{name.replace('_', ' ')} {human_bytes(value) if name == 'kv_bytes' else _text(value)}"
        for name, value in definition.items()
    ]
    return ", ".join(parts)


def _text(value: Any) -> str:
    return "+".join(value) if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else str(value)
