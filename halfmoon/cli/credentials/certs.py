"""`halfmoon certs …`: makes a development authority, issues certificates to services, and shows what is in one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.rpc.credentials.roles import ClusterRole
from halfmoon.rpc.credentials.sources import state_secret
from halfmoon.rpc.tls.identity_files import paths_in

app = typer.Typer(
    no_args_is_help=True,
    help="Makes certificates for mutual TLS between services: an authority for development, and one certificate a "
    "service with its role in it.",
)

_DIRECTORY = Path(".halfmoon/certs")
_DAYS = 365
_MOST_DAYS = 36_500  # a certificate knows years up to 9999

AuthorityDir = Annotated[Path, typer.Option("--dir", help="Directory of the authority.", rich_help_panel="Authority")]


@app.command()
def init(
    directory: AuthorityDir = _DIRECTORY,
    days: Annotated[
        int, typer.Option(min=1, max=_MOST_DAYS, help="How long the authority lasts.", rich_help_panel="Authority")
    ] = 3650,
) -> None:
    """Makes an authority, and a cluster secret if the directory has none. Keep ca.key and cluster_secret private."""
    with _readable_errors():
        from halfmoon.rpc.tls.authority import CA_CERT, CA_KEY, Authority

        Authority.create(directory, days)
        state_secret(directory)
    print(f"authority: {directory / CA_CERT}, its key: {directory / CA_KEY}")
    print(f"cluster secret: {directory / 'cluster_secret'}")
    print(f"next: halfmoon certs issue --role worker --dir {directory} --out worker")


@app.command()
def issue(
    role: Annotated[ClusterRole, typer.Option(help="What the service may do.", rich_help_panel="Certificate")],
    out: Annotated[
        Path, typer.Option(help="Directory for tls.crt, tls.key and ca.crt.", rich_help_panel="Certificate")
    ],
    directory: AuthorityDir = _DIRECTORY,
    name: Annotated[
        str | None, typer.Option(help="Name of the service. Default: this host's.", rich_help_panel="Certificate")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="DNS name or address for clients that check it, such as those of HTTP; repeat it for more.",
            rich_help_panel="Certificate",
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, max=_MOST_DAYS, help="How long it lasts.", rich_help_panel="Certificate")
    ] = _DAYS,
) -> None:
    """Issues a certificate. A running service takes new files over by itself."""
    with _readable_errors():
        from halfmoon.rpc.tls.authority import Authority

        authority = Authority.open(directory)
        authority.issue(role, name or socket.gethostname(), host or (), days).write(out)
    print(f"{role}: {out / 'tls.crt'}, {out / 'tls.key'}, {out / 'ca.crt'}")


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A certificate, or a directory with tls.crt or ca.crt.")],
    ca: Annotated[
        Path | None, typer.Option(help="Authorities to check against. Default: ca.crt beside the certificate.")
    ] = None,
) -> None:
    """Prints subject, role, hosts and expiry, and whether the authority issued it; exits with 1 if it is of no use."""
    with _readable_errors():
        faults = _shown(path, ca)
    for fault in faults:
        Console(stderr=True).out(fault, style="red", highlight=False)
    raise typer.Exit(1 if faults else 0)


def _shown(path: Path, ca: Path | None) -> list[str]:
    """Prints a certificate and returns what makes it useless."""
    from halfmoon.rpc.tls.authority import CA_CERT
    from halfmoon.rpc.tls.certificates import belongs_to, certificates_in, chains_to, summary_of, utc_now

    if os.path.isdir(path):  # `Path.is_dir` raises for a name that is too long
        issued = paths_in(path).cert
        path = issued if issued.exists() else path / CA_CERT
    own = paths_in(path.parent)
    ca = ca or own.ca
    chain = certificates_in(_content(path), str(path))
    summary, now = summary_of(chain[0]), utc_now()
    is_issued = chains_to(chain, certificates_in(_content(ca), str(ca)))
    table = Table(box=None, show_header=False)
    table.add_row("subject", summary.subject)
    table.add_row("role", summary.role or ("authority" if summary.is_authority else "none"))
    table.add_row("name", summary.name)
    table.add_row("hosts", ", ".join(summary.hosts))
    table.add_row("expires", f"{summary.expires_at:%Y-%m-%d %H:%M} UTC, {_until(summary.expires_at - now)}")
    table.add_row("authority", f"issued by {ca}" if is_issued else f"not issued by {ca}")
    Console(highlight=False, width=max(Console().width, 120)).print(table)
    if summary.expires_soon(now):
        typer.echo(f"warning: {path} expires soon: issue another with `halfmoon certs issue`", err=True)
    faults = [f"{path} has expired"] if summary.is_expired(now) else []
    if not is_issued:
        faults.append(f"{path} was not issued by {ca}")
    if path == own.cert and os.access(own.key, os.R_OK):
        key = own.key.read_bytes()
        faults += [] if belongs_to(key, chain[0], str(own.key)) else [f"{own.key} is not the key of {path}"]
    return faults


def _until(left: timedelta) -> str:
    return f"in {left.days} days" if left.total_seconds() > 0 else f"{-left.days} days ago"


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Prints an error of ours, or a missing package, and exits with 1."""
    try:
        yield
    except HalfmoonError as error:
        reason = error.message
    except ImportError:
        reason = "certificates need another package: pip install 'halfmoon[tls]'"
    else:
        return
    typer.echo(reason, err=True)
    raise typer.Exit(1)
