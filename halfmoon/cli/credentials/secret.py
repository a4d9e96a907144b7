"""`halfmoon secret`: makes the secret of a cluster, and the credentials of its services."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from halfmoon.errors import HalfmoonError
from halfmoon.rpc.credentials.credential import checked_secret, credential_from, new_secret
from halfmoon.rpc.credentials.issue import issue_all
from halfmoon.rpc.credentials.roles import ClusterRole
from halfmoon.rpc.credentials.sources import environment_secret, write_secret

app = typer.Typer(no_args_is_help=True, help="Makes the secret of a cluster, and the credentials of its services.")

Out = Annotated[Path | None, typer.Option(help="File to write, readable by its owner alone. Default: prints it.")]


@app.command()
def new(out: Out = None) -> None:
    """Makes a cluster secret: give it to every service of a cluster, by HALFMOON_CLUSTER_SECRET_FILE."""
    _put(new_secret, out)


@app.command()
def issue(
    role: Annotated[ClusterRole, typer.Argument(help="Role of the service that gets the credential.")],
    out: Out = None,
) -> None:
    """Makes one role's credential, which is good for no other role, from the secret that the environment names."""
    _put(lambda: credential_from(checked_secret(environment_secret() or ""), role).text(), out)


@app.command("issue-all")
def issue_all_to(directory: Annotated[Path, typer.Argument(help="Directory with a directory for each role.")]) -> None:
    """Makes secret and authority in `root` at the first call, then each role's credential and certificate in ROLE."""
    _ran(lambda: issue_all(directory))


def _put(make: Callable[[], str], out: Path | None) -> None:
    if out is None:
        _ran(lambda: print(make()))
    else:
        _ran(lambda: write_secret(out, make()))


def _ran(work: Callable[[], None]) -> None:
    try:
        work()
    except FileExistsError as error:
        typer.echo(f"halfmoon: {error.filename2 or error.filename} exists already: remove it first", err=True)
        raise typer.Exit(1) from error
    except HalfmoonError as error:
        typer.echo(f"halfmoon: {error.message}", err=True)
        raise typer.Exit(1) from error
