"""`halfmoon config`: shows, checks and describes configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel, ByteSize

from halfmoon.cli.profile_store import profile_file
from halfmoon.cli.up.up_flags import with_up_flags
from halfmoon.config.qos_classes import DEFAULT_TARGETS
from halfmoon.errors import HalfmoonError
from halfmoon.policy.admission.qos_classes import DEFAULT_CLASS
from halfmoon.policy.view.worker_view import ROLES
from halfmoon.rpc.addresses.masked_url import HIDDEN, masked_url
from halfmoon.up.config.human_bytes import human_bytes
from halfmoon.up.config.options import up_options
from halfmoon.up.config.read import read_config
from halfmoon.up.config.system_config import SystemConfig
from halfmoon.up.up_options import UpOptions

app = typer.Typer(no_args_is_help=True, help="Shows, checks and describes configuration files.")


@app.command()
@with_up_flags
def show(config: SystemConfig) -> None:
    """Prints the configuration that `halfmoon up` would use with these options, as YAML without secrets."""
    print(as_yaml(config), end="")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="The configuration, or a plan of `halfmoon plan`.")]) -> None:
    """Checks a configuration file: prints every mistake with its place, or what would be started."""
    try:
        options = configured(read_config(file))
    except HalfmoonError as error:
        typer.echo(error.message, err=True)
        raise typer.Exit(1) from error
    counts = {"prefill": options.num_prefill, "decode": options.num_decode, "both": options.num_both}
    workers = " + ".join(f"{count} {role}" for role, count in counts.items() if count)
    print(f"{file} is a configuration: {options.model} on {workers} workers")


@app.command()
def schema() -> None:
    """Prints the JSON schema of configuration files, for completion and checks in editors."""
    print(json.dumps(SystemConfig.model_json_schema(), indent=2))


def configured(config: SystemConfig) -> UpOptions:
    """Converts a configuration to what is started.

    Raises InvalidRequest, and Unavailable if the profile's ledger does not answer.
    """
    if config.engine != "sim":
        return up_options(config)
    profile = profile_file(config.simulation.profile, config.state_dir.absolute(), config.ledger_url)
    return up_options(config, profile)


def as_yaml(config: SystemConfig) -> str:
    """Returns the whole configuration as YAML, without secrets and without empty plan fields."""
    shown = _plain(config)
    if config.gateway.slo == "default":
        shown["classes"] = {DEFAULT_CLASS: _plain(DEFAULT_TARGETS), **shown["classes"]}
    for role in ROLES if config.cluster is None else ():
        groups = [group.model_dump(mode="json", exclude_unset=True) for group in config.workers.groups(role)]
        shown["workers"][role] = [{"count": 1, **group} for group in groups]
    for written in shown["classes"].values():
        for rule in written["rules"]:
            if rule["kind"] in ("header", "api_key"):
                rule["value"] = HIDDEN
    for tenant in shown["tenants"].values():
        tenant["keys"] = [HIDDEN for _ in tenant["keys"]]
    shown["gateway"]["peer_key"] = [HIDDEN for _ in config.gateway.peer_key]
    security = shown["security"]
    security["api_key"] = [HIDDEN for _ in config.security.api_key]
    for name in ("operator_token", "cluster_secret"):
        security[name] = security[name] and HIDDEN
    for section, name in (
        (shown, "ledger_url"),
        (shown["stores"], "cold_url"),
        (shown["observability"], "otlp_endpoint"),
    ):
        section[name] = section[name] and masked_url(section[name])
    for name in ("cluster", "layout", "expected"):
        if shown[name] is None:
            del shown[name]
    text: str = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    return text


def _plain(value: Any) -> Any:
    """Converts a value to what YAML can hold; bytes get a unit, such as 512MiB."""
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, ByteSize):
        return human_bytes(value)
    return str(value) if isinstance(value, Path) else value
