"""`halfmoon kv …`: inspects a running KV store and changes what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from halfmoon.errors import HalfmoonError
from halfmoon.pb import kvstore_pb2, kvstore_pb2_grpc
from halfmoon.rpc.addresses.resolved import is_port
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.credentials.sources import client_credential
from halfmoon.rpc.peer import Peer
from halfmoon.up.specs.stores import known_stores

app = typer.Typer(no_args_is_help=True, help="Inspects a running KV store, and changes what it holds.")

_ID_BYTES = 24  # 8 of the tenant's tag, 16 of the key
_COLUMNS = 140
_MOST_TENANTS = 50
_DEADLINE_S = 30.0
_VERIFY_DEADLINE_S = 24 * 3600.0  # verify reads every block


class TierName(StrEnum):
    """The tiers of a store, from fast to slow."""

    DRAM = "dram"
    DISK = "disk"
    COLD = "cold"


Address = Annotated[
    str | None,
    typer.Option(
        envvar="HALFMOON_STORE",
        help="host:port of the store. Default: the store in the state directory.",
        rich_help_panel="Store",
    ),
]
Ids = Annotated[list[str], typer.Argument(help="Block ids, as `halfmoon kv ls` shows them.")]
Tiers = Annotated[
    list[TierName] | None, typer.Option("--tier", help="Only this tier; repeat it for more.", rich_help_panel="Blocks")
]
StateDir = Annotated[
    Path, typer.Option(help="State directory of the `halfmoon up` that started the store.", rich_help_panel="Store")
]
_STATE_DIR = Path(".halfmoon")  # the default of `halfmoon up`


@app.command()
def stats(address: Address = None, state_dir: StateDir = _STATE_DIR) -> None:
    """Prints what each tier holds, and counts of hits, evictions and failures since the store started."""
    response = _ask(_store(address, state_dir), _control("Stats"), kvstore_pb2.StatsRequest())
    columns = ("blocks", "used", "budget", "waiting", "hits", "evicted", "damaged", "failed", "written", "skipped")
    table = Table("tier", *columns, box=None)
    for tier in response.tiers:
        sizes = (_size(tier.used_bytes), _size(tier.budget_bytes))
        counts = ("waiting", "hits_total", "evicted_total", "corrupted_total", "failed_total", "written_total")
        numbers = [str(getattr(tier, f"num_{name}")) for name in (*counts, "skipped_total")]
        table.add_row(_name(tier.tier), str(tier.num_blocks), *sizes, *numbers)
    console = _console()
    console.print(table)
    for tier in response.tiers:
        if tier.trouble:
            console.print(f"{_name(tier.tier)}: {tier.trouble}", markup=False)
    console.print(
        f"stored {response.num_stored_total}, missed {response.num_misses_total}, "
        f"expired {response.num_expired_total}, arriving {_size(response.reserved_bytes)}"
    )

    if any(account.tenant for account in response.tenants):
        tenants = Table("tenant", "blocks", "used", "quota", "evicted by quota", box=None)
        for account in response.tenants[:_MOST_TENANTS]:
            quota = _size(account.quota_bytes) if account.quota_bytes else ""
            held = (str(account.num_blocks), _size(account.used_bytes), quota, str(account.num_evicted_total))
            tenants.add_row(account.tenant or "(shared)", *held)
        console.print(tenants)


@app.command()
def ls(
    address: Address = None,
    state_dir: StateDir = _STATE_DIR,
    tier: Tiers = None,
    limit: Annotated[
        int, typer.Option(min=1, max=2**32 - 1, help="Most blocks to list.", rich_help_panel="Blocks")
    ] = 50,
    tenant: Annotated[
        str | None, typer.Option(help="Only this tenant's blocks; '' is what is shared.", rich_help_panel="Blocks")
    ] = None,
    after: Annotated[str, typer.Option(help="Lists the blocks after this id.", rich_help_panel="Blocks")] = "",
) -> None:
    """Lists blocks by id: the tenant's tag, then the key."""
    request = kvstore_pb2.ListRequest(
        limit=limit, after=_id(after) if after else b"", tiers=_tiers(tier), tenant=tenant
    )
    table = Table("id", "depth", "tiers", "bytes", "uses", "pinned", "expires", "tenant", box=None)
    for block in _ask(_store(address, state_dir), _admin("List"), request).blocks:
        expires = datetime.fromtimestamp(block.expires_at_s).isoformat(" ", "seconds") if block.expires_at_s else ""
        where = " ".join(_name(place) for place in block.tiers)
        table.add_row(
            block.id.hex(), str(block.depth), where, _size(block.used_bytes), str(block.num_uses),
            "yes" if block.pinned else "", expires, block.tenant,
        )  # fmt: skip
    _console().print(table)


@app.command()
def pin(
    ids: Ids,
    address: Address = None,
    state_dir: StateDir = _STATE_DIR,
    unpin: Annotated[
        bool, typer.Option("--unpin", help="Unpins the blocks instead.", rich_help_panel="Blocks")
    ] = False,
) -> None:
    """Protects blocks, and those before them in their chains, from eviction and expiry."""
    request = kvstore_pb2.PinRequest(ids=[_id(text) for text in ids], unpin=unpin)
    response = _ask(_store(address, state_dir), _admin("Pin"), request)
    print(f"{'unpinned' if unpin else 'pinned'} {response.num_blocks} of {len(ids)}")
    raise typer.Exit(0 if response.num_blocks == len(ids) else 1)


@app.command()
def drop(ids: Ids, address: Address = None, state_dir: StateDir = _STATE_DIR) -> None:
    """Drops blocks, and all that follow them in their chains, from every tier."""
    response = _ask(
        _store(address, state_dir), _admin("Drop"), kvstore_pb2.DropRequest(ids=[_id(text) for text in ids])
    )
    print(f"dropped {response.num_dropped}")


@app.command()
def verify(address: Address = None, state_dir: StateDir = _STATE_DIR, tier: Tiers = None) -> None:
    """Reads every block (of DRAM and disk, unless --tier is given) and drops damaged ones; exits with 1 if any were."""
    request = kvstore_pb2.VerifyRequest(tiers=_tiers(tier))
    verdicts = _ask(_store(address, state_dir), _admin("Verify"), request, _VERIFY_DEADLINE_S).tiers
    for verdict in verdicts:
        print(f"{_name(verdict.tier)}: {verdict.num_blocks} read, {verdict.num_damaged} damaged and dropped")
    raise typer.Exit(1 if any(verdict.num_damaged for verdict in verdicts) else 0)


class _Store(NamedTuple):
    address: str
    credential: Credential | None


Method = Callable[[Peer], Callable[..., Any]]


def _control(name: str) -> Method:
    return lambda peer: getattr(kvstore_pb2_grpc.KVStoreStub(peer.channel), name)


def _admin(name: str) -> Method:
    return lambda peer: getattr(kvstore_pb2_grpc.KVStoreAdminStub(peer.channel), name)


def _ask(store: _Store, method: Method, request: Any, deadline_s: float = _DEADLINE_S) -> Any:
    """Makes one call. If it fails, prints the reason and exits with 1."""

    async def asking() -> Any:
        async with Peer(store.address, store.credential, "store") as peer:
            return await peer.call(method(peer), request, deadline_s=deadline_s)

    work: Coroutine[Any, Any, Any] = asking()
    try:
        return asyncio.run(work)
    except HalfmoonError as err:
        Console(stderr=True).out(f"{store.address}: {err.message}", style="red", highlight=False)
        raise typer.Exit(1) from None


def _store(given: str | None, state_dir: Path) -> _Store:
    """Returns the store. Raises BadParameter if its address is malformed, or neither given nor known."""
    address = _address(given, state_dir)
    try:
        return _Store(address, client_credential("operator", address, state_dir))
    except HalfmoonError as error:
        raise typer.BadParameter(error.message) from error


def _address(given: str | None, state_dir: Path) -> str:
    known = known_stores(state_dir)
    address = given or (known[0] if len(known) == 1 else "")
    host, _, port = address.rpartition(":")
    if host and is_port(port):
        return address
    if given:
        raise typer.BadParameter(f"--address {given!r} is not host:port")
    if known:
        raise typer.BadParameter(f"there are several stores: give --address one of {', '.join(known)}")
    raise typer.BadParameter(f"no store is known in {state_dir}: give --address host:port, or --state-dir")


def _id(text: str) -> bytes:
    try:
        block = bytes.fromhex(text)
    except ValueError:
        block = b""
    if len(block) != _ID_BYTES:
        raise typer.BadParameter(
            f"{text!r} is not a block id: {2 * _ID_BYTES} hexadecimal digits, as `kv ls` shows them"
        )
    return block


def _tiers(names: Sequence[TierName] | None) -> list[kvstore_pb2.KVTier.ValueType]:
    return [kvstore_pb2.KVTier.Value(name.value.upper()) for name in names or ()]


def _name(tier: kvstore_pb2.KVTier.ValueType) -> str:
    return kvstore_pb2.KVTier.Name(tier).lower()


def _console() -> Console:
    """Returns a console wide enough for the tables, also in a pipe: a truncated id could not be used."""
    return Console(highlight=False, width=max(Console().width, _COLUMNS))


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
