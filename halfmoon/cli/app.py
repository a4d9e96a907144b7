"""The `halfmoon` command: registers every subcommand."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import halfmoon
from halfmoon.cli.bench import bench
from halfmoon.cli.chat import ChatOptions, chat, typed_questions
from halfmoon.cli.credentials.certs import app as certs_app
from halfmoon.cli.credentials.keys import app as keys_app
from halfmoon.cli.credentials.secret import app as secret_app
from halfmoon.cli.kv import app as kv_app
from halfmoon.cli.planning.plan import plan
from halfmoon.cli.profile import profile, profiles
from halfmoon.cli.profile_store import DEFAULT_STATE_DIR
from halfmoon.cli.replay import replay
from halfmoon.cli.simulate import simulate
from halfmoon.cli.status import status
from halfmoon.cli.top import TopOptions, top
from halfmoon.cli.up.config import app as config_app
from halfmoon.cli.up.config import configured
from halfmoon.cli.up.join import join_command
from halfmoon.cli.up.up_flags import with_up_flags
from halfmoon.cli.workers.drain import drain
from halfmoon.cli.workers.restart import restart
from halfmoon.cli.workers.role import role
from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.rpc.credentials.operator_token import TOKEN_HELP, client_token
from halfmoon.rpc.tls.http_context import CA_HELP, CA_VARIABLE
from halfmoon.up.config.system_config import SystemConfig
from halfmoon.up.run import run_up
from halfmoon.up.terminal import unfailing_console

GatewayUrl = Annotated[str, typer.Option(help="URL of the gateway.", rich_help_panel="Gateway")]
OperatorToken = Annotated[
    str | None, typer.Option(envvar="HALFMOON_OPERATOR_TOKEN", help=TOKEN_HELP, rich_help_panel="Gateway")
]
StateDir = Annotated[Path, typer.Option(help="State directory of `halfmoon up`.", rich_help_panel="Gateway")]
Authorities = Annotated[Path | None, typer.Option(envvar=CA_VARIABLE, help=CA_HELP, rich_help_panel="Gateway")]

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
def top_command(
    gateway: GatewayUrl = "http://127.0.0.1:8000",
    token: OperatorToken = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    ca: Authorities = None,
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
        options = TopOptions(gateway.rstrip("/"), client_token(token, gateway, state_dir), interval_s, ca, workers)
        with suppress(KeyboardInterrupt):
            raise typer.Exit(asyncio.run(top(options, Console(), once=once)))
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error


@app.command("chat")
def chat_command(
    gateway: GatewayUrl = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(envvar="HALFMOON_API_KEY", help="API key, where one is needed.", rich_help_panel="Gateway"),
    ] = None,
    token: OperatorToken = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    ca: Authorities = None,
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
    url, terminal = gateway.rstrip("/"), unfailing_console(sys.stdout)
    optional = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
    try:
        operator = client_token(token, gateway, state_dir)
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error
    parameters = {name: value for name, value in optional.items() if value is not None}
    options = ChatOptions(url, api_key, operator, ca, system, parameters)
    questions = typed_questions(terminal) if sys.stdin.isatty() else (line.rstrip("\n") for line in sys.stdin)
    raise typer.Exit(chat(options, terminal, questions))


if __name__ == "__main__":
    app()
