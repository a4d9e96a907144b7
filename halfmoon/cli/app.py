"""The `halfmoon` command: registers every subcommand."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console

import halfmoon
from halfmoon.cli.bench import bench
from halfmoon.cli.chat import ChatOptions, chat, typed_questions
from halfmoon.cli.credentials.certs import app as certs_app
from halfmoon.cli.credentials.keys import app as keys_app
from halfmoon.cli.credentials.secret import app as secret_app
from halfmoon.cli.gateway_options import GatewayOptions
from halfmoon.cli.kv import app as kv_app
from halfmoon.cli.planning.plan import plan
from halfmoon.cli.profile import profile, profiles
from halfmoon.cli.replay import replay
from halfmoon.cli.simulate import simulate
from halfmoon.cli.status import status
from halfmoon.cli.terminal.option_groups import with_option_groups
from halfmoon.cli.top import TopOptions, top
from halfmoon.cli.up.config import app as config_app
from halfmoon.cli.up.config import configured
from halfmoon.cli.up.join import join_command
from halfmoon.cli.up.up_flags import with_up_flags
from halfmoon.cli.workers.drain import drain
from halfmoon.cli.workers.restart import restart
from halfmoon.cli.workers.role import role
from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.up.config.system_config import SystemConfig
from halfmoon.up.run import run_up
from halfmoon.up.terminal import unfailing_console

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(certs_app, name="certs")
app.add_typer(keys_app, name="keys")
app.add_typer(kv_app, name="kv")
app.add_typer(config_app, name="config")
app.add_typer(secret_app, name="secret")
app.command("join")(join_command)
app.command()(bench)
app.command()(plan)
app.command()(profile)
app.command()(profiles)
app.command()(replay)
app.command()(simulate)
app.command()(drain)
app.command()(restart)
app.command()(role)
app.command()(status)


@app.callback()
def main() -> None:
    """Halfmoon: disaggregated serving of large language models."""
    for argument in sys.argv[1:]:
        if argument != argument.encode(errors="replace").decode():
            raise typer.BadParameter(f"the argument {argument!r} is not UTF-8: names and paths are kept as text")


@app.command()
def version() -> None:
    """Prints the version."""
    print(halfmoon.__version__)


@app.command()
@with_up_flags
def up(config: SystemConfig) -> None:
    """Starts gateway, workers, KV store, planner and console on this host; Ctrl-C stops them all.

    Without options it serves a small demo model with one prefill and one decode worker. The class called default
    applies from the start: a first token within 30 s, and 1 s between tokens. Requests that would wait far longer get
    429 with Retry-After; --slo off removes the class.
    """
    try:
        options = configured(config)
    except HalfmoonError as error:
        raise typer.BadParameter(error.message) from error
    raise typer.Exit(run_up(options, unfailing_console(sys.stdout)))


@app.command("top")
@with_option_groups
def top_command(
    gateway: GatewayOptions,
    interval_s: Annotated[
        float, typer.Option(min=0.2, help="Seconds between two refreshes.", rich_help_panel="Display")
    ] = 2.0,
    workers: Annotated[
        int, typer.Option(min=1, help="Number of workers to show, the busiest first.", rich_help_panel="Display")
    ] = 20,
    once: Annotated[
        bool, typer.Option("--once", help="Prints the figures once and exits.", rich_help_panel="Display")
    ] = False,
) -> None:
    """Shows the console's figures in the terminal, refreshed until Ctrl-C."""
    try:
        options = TopOptions(gateway.url, gateway.operator_token, interval_s, gateway.ca, workers)
        with suppress(KeyboardInterrupt):
            raise typer.Exit(asyncio.run(top(options, Console(), once=once)))
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error


@app.command("chat")
@with_option_groups
def chat_command(
    gateway: GatewayOptions,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="HALFMOON_API_KEY", help="API key, where one is needed.", rich_help_panel="Gateway"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model; default: the served one.", rich_help_panel="Answers")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", rich_help_panel="Answers")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; default: the model's.", rich_help_panel="Answers")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer.", rich_help_panel="Answers")
    ] = None,
) -> None:
    """Talks to the model in the terminal; each answer says how quick it was and where it ran. Ctrl-C stops an answer.

    Lines that are piped in are asked one after the other.
    """
    terminal = unfailing_console(sys.stdout)
    optional = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
    try:
        operator = gateway.operator_token
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error
    parameters = {name: value for name, value in optional.items() if value is not None}
    options = ChatOptions(gateway.url, api_key, operator, gateway.ca, system, parameters)
    questions = typed_questions(terminal) if sys.stdin.isatty() else (line.rstrip("\n") for line in sys.stdin)
    raise typer.Exit(chat(options, terminal, questions))


if __name__ == "__main__":
    app()
