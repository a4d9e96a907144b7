"""Turns the flags of `halfmoon up` into a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
import yaml

from halfmoon.cli.terminal.option_groups import unwrapped_doc
from halfmoon.cli.up.flags import PANELS, flag_parameter, parameter
from halfmoon.errors import InvalidRequest
from halfmoon.policy.view.worker_view import ROLES
from halfmoon.up.config.read import Override, read_config
from halfmoon.up.config.system_config import SystemConfig
from halfmoon.yaml_text import parsed_yaml

_FILE_PANEL, _WORKERS_PANEL, _OTHER_PANEL = "Configuration file", "Workers", "Everything else"
_CONFIG_HELP = "Configuration file, such as halfmoon.yaml; flags override it. See `halfmoon config`."
_SET_HELP = "Sets any field of the configuration, such as gateway.request_deadline_s=60; repeat it for more."
_PLAN_HELP = "Configuration file that `halfmoon plan` wrote."
_COUNT_HELP = {
    "prefill": "Number of prefill workers. Default: 1, or 0 with --both.",
    "decode": "Number of decode workers. Default: 1, or 0 with --both.",
    "both": "Number of workers that do prefill and decode on one engine. Default: 0.",
}


def with_up_flags(command: Callable[[SystemConfig], None]) -> Callable[..., None]:
    """Returns a typer command that takes all flags of `halfmoon up` and passes their configuration to `command`."""

    def run(**given: Any) -> None:
        try:
            config = config_of(given)
        except InvalidRequest as error:
            raise typer.BadParameter(error.message) from error
        command(config)

    run.__name__, run.__doc__ = command.__name__, unwrapped_doc(command)
    run.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
    return run


def config_of(given: Mapping[str, Any]) -> SystemConfig:
    """Builds the configuration from flags by parameter name; None and [] mean not given. Raises InvalidRequest."""
    files = [path for path in (given.get("config"), given.get("plan")) if path is not None]
    if len(files) > 1:
        raise InvalidRequest("--plan is another name of --config: give one of them", param="config")
    config = read_config(files[0] if files else None, list(_overrides(given)))
    counts: dict[str, int] = {role: given[role] for role in ROLES if given.get(role) is not None}
    return _counted(config, counts, files[0] if files else None, list(_overrides(given))) if counts else config


def _overrides(given: Mapping[str, Any]) -> Iterator[Override]:
    for text in given.get("set") or ():
        path, sign, value = text.partition("=")
        if not (path and sign):
            raise InvalidRequest(f"--set {text}: write PATH=VALUE, such as gateway.request_deadline_s=60", param="set")
        yield Override(path, _value(value, path), f"--set {path}")
    for flag in (flag for flags in PANELS.values() for flag in flags):
        value = given.get(flag.parameter)
        if value is not None and value != []:
            yield Override(flag.path, None if value == "null" else value, flag.name)


def _value(text: str, path: str) -> Any:
    try:
        return parsed_yaml(text).value
    except yaml.YAMLError as error:
        raise InvalidRequest(f"--set {path}: {text!r} is not YAML: {error}", param="set") from error


def _counted(
    config: SystemConfig, counts: Mapping[str, int], path: Path | None, overrides: list[Override]
) -> SystemConfig:
    """Sets the number of workers of each role, in the file's group of that role or in a new one."""
    for role, count in counts.items():
        groups = getattr(config.workers, role)
        if len(groups) > 1:
            raise InvalidRequest(
                f"--{role}: {path} has {len(groups)} groups of {role} workers: change their counts there", param=role
            )
        written = groups[0].model_dump(exclude_unset=True) if groups else {}
        overrides.append(Override(f"workers.{role}", [{**written, "count": count}], f"--{role}"))
    return read_config(path, overrides)


def _parameters() -> Iterator[inspect.Parameter]:
    yield parameter("config", Path, typer.Option("--config", help=_CONFIG_HELP, rich_help_panel=_FILE_PANEL))
    yield parameter("plan", Path, typer.Option("--plan", help=_PLAN_HELP, rich_help_panel=_FILE_PANEL))
    for panel, flags in PANELS.items():
        for role in ROLES if panel == _WORKERS_PANEL else ():
            option = typer.Option(f"--{role}", min=0, help=_COUNT_HELP[role], rich_help_panel=panel)
            yield parameter(role, int, option)
        for flag in flags:
            yield flag_parameter(flag, panel)
    option = typer.Option("--set", help=_SET_HELP, rich_help_panel=_OTHER_PANEL, metavar="PATH=VALUE")
    yield parameter("set", list[str], option)
