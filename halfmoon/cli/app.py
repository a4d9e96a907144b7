"""The `halfmoon` command."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import halfmoon
from halfmoon.cli.kv import app as kv_app
from halfmoon.cli.plan import plan
from halfmoon.cli.profile import profile, profiles
from halfmoon.cli.profile_store import profile_file
from halfmoon.cli.replay import replay
from halfmoon.cli.simulate import simulate
from halfmoon.cli.top import TopOptions, top
from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.worker_profile import DEFAULT_PROFILE, PROFILES
from halfmoon.up.from_plan import planned_options
from halfmoon.up.run import run_up
from halfmoon.up.service_specs import UpOptions
from halfmoon.up.simulated import SimulatedWorkers
from halfmoon.up.stores import StoreOptions

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(kv_app, name="kv")
app.command()(plan)
app.command()(profile)
app.command()(profiles)
app.command()(replay)
app.command()(simulate)


class Device(StrEnum):
    """Where engines compute; `auto` takes a GPU if there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """Of weights and KV; `auto` takes bfloat16 where it is fast."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class EngineKind(StrEnum):
    """What computes: the model, or modelled latencies without one."""

    REAL = "real"
    SIM = "sim"


class HandoverCodec(StrEnum):
    """How KV travels from prefill to decode."""

    RAW = "raw"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"


class SimText(StrEnum):
    """What simulated workers say: random words, or the prompt again."""

    RANDOM = "random"
    ECHO = "echo"


@app.callback()
def main() -> None:
    """Halfmoon: disaggregated serving of large language models."""


@app.command()
def version() -> None:
    """Prints the version."""
    print(halfmoon.__version__)


@app.command()
def up(
    model: Annotated[
        str | None, typer.Option(help="'demo' (the default), a directory, a .gguf file or a Hugging Face id")
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="workers and model of a file of `halfmoon plan`")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="prefill workers (default 1, or 0 with --both)")] = None,
    decode: Annotated[int | None, typer.Option(help="decode workers (default 1, or 0 with --both)")] = None,
    both: Annotated[int, typer.Option(help="workers that prefill and decode on one engine")] = 0,
    device: Annotated[Device, typer.Option(help="where engines compute")] = Device.AUTO,
    dtype: Annotated[Dtype, typer.Option(help="of weights and KV")] = Dtype.AUTO,
    handover_codec: Annotated[
        HandoverCodec, typer.Option(help="of KV on its way to decode: smaller than raw, and a little less exact")
    ] = HandoverCodec.RAW,
    stores: Annotated[int, typer.Option(min=1, help="stores of KV blocks; workers of each role use them in turns")] = 1,
    dram_bytes: Annotated[str, typer.Option(help="memory of each store of KV blocks")] = "512MiB",
    disk_dir: Annotated[
        Path | None, typer.Option(help="where the store keeps blocks on disk; default: in the state directory")
    ] = None,
    disk_bytes: Annotated[str, typer.Option(help="most that each store's blocks on disk may take")] = "8GiB",
    cold_url: Annotated[
        str | None, typer.Option(help="where the store keeps blocks for other hosts: s3://, file://, redis://, …")
    ] = None,
    dram_codec: Annotated[
        str, typer.Option(help="of blocks in memory: raw, int8, int4, lz4, zstd, int8+zstd, …")
    ] = "raw",
    disk_codec: Annotated[str, typer.Option(help="of blocks on disk")] = "raw",
    cold_codec: Annotated[str, typer.Option(help="of blocks in the cold store")] = "raw",
    host: Annotated[str, typer.Option(help="address of the HTTP server")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the HTTP server")] = 8000,
    gateways: Annotated[int, typer.Option(min=1, help="gateways that share the port of the HTTP server")] = 1,
    api_key: Annotated[
        list[str] | None, typer.Option(help="a key that clients may use; repeat it for more; none: no key is needed")
    ] = None,
    operator_token: Annotated[
        str | None,
        typer.Option(
            envvar="HALFMOON_OPERATOR_TOKEN",
            help="what console and control API ask for; none: nothing on a loopback host, one is made elsewhere",
        ),
    ] = None,
    state_dir: Annotated[Path, typer.Option(help="logs and the ledger")] = Path(".halfmoon"),
    ledger_url: Annotated[
        str | None,
        typer.Option(
            envvar="HALFMOON_LEDGER_URL",
            help="the ledger of gateways and planner: sqlite:///file or postgresql://user:password@host/database; "
            "none: SQLite in the state directory",
        ),
    ] = None,
    console: Annotated[bool, typer.Option(help="start the Streamlit console, if it is installed")] = True,
    console_port: Annotated[int, typer.Option(min=1, max=65535, help="port of the console")] = 8501,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="http://host:port of a collector that gets each request's trace (OTLP over gRPC)")
    ] = None,
    engine: Annotated[
        EngineKind, typer.Option(help="'sim': simulated workers, no weights and no torch")
    ] = EngineKind.REAL,
    sim_profile: Annotated[
        str, typer.Option(help=f"latencies: {', '.join(PROFILES)}, a JSON file, or ledger:NAME")
    ] = DEFAULT_PROFILE,
    sim_time_scale: Annotated[float, typer.Option(help="simulated workers are so many times as fast")] = 1.0,
    sim_text: Annotated[SimText, typer.Option(help="of simulated answers")] = SimText.RANDOM,
    sim_processes: Annotated[int, typer.Option(min=1, help="processes that share the simulated workers")] = 1,
) -> None:
    """Starts gateway, workers, kvstore, planner and console on this host; Ctrl-C stops them all."""
    default = 0 if both else 1
    terminal = Console(stderr=False)
    try:
        options = UpOptions(
            model=model or "demo",
            num_prefill=default if prefill is None else prefill,
            num_decode=default if decode is None else decode,
            num_both=both,
            device=device.value,
            dtype=dtype.value,
            handover_codec=handover_codec.value,
            host=host,
            port=port,
            num_gateways=gateways,
            api_keys=tuple(api_key or ()),
            operator_token=operator_token,
            state_dir=state_dir.absolute(),
            store=StoreOptions(
                dram_bytes,
                None if disk_dir is None else disk_dir.absolute(),
                disk_bytes,
                cold_url,
                dram_codec,
                disk_codec,
                cold_codec,
                stores,
            ),
            console=console,
            console_port=console_port,
            ledger_url=ledger_url,
            otlp_endpoint=otlp_endpoint,
            simulation=(
                SimulatedWorkers(
                    profile_file(sim_profile, state_dir.absolute()),
                    sim_time_scale,
                    sim_text.value,
                    num_processes=sim_processes,
                )
                if engine is EngineKind.SIM
                else None
            ),
        )
        if plan_file is not None:
            if (prefill, decode, both) != (None, None, 0):
                raise InvalidRequest("--plan says how many workers there are: leave --prefill, --decode and --both out")
            options = planned_options(options, plan_file, model)
    except InvalidRequest as err:
        raise typer.BadParameter(err.message) from err
    raise typer.Exit(run_up(options, terminal))


@app.command("top")
def top_command(
    gateway: Annotated[str, typer.Option(help="its URL")] = "http://127.0.0.1:8000",
    token: Annotated[
        str | None,
        typer.Option(envvar="HALFMOON_OPERATOR_TOKEN", help="the operator token, where the gateway has one"),
    ] = None,
    interval_s: Annotated[float, typer.Option(min=0.2, help="seconds between two looks")] = 2.0,
    workers: Annotated[int, typer.Option(min=1, help="lines for workers: the busiest")] = 20,
    once: Annotated[bool, typer.Option("--once", help="look once, print, and end")] = False,
) -> None:
    """Shows in the terminal what the cluster does; Ctrl-C ends it."""
    options = TopOptions(gateway.rstrip("/"), token, interval_s, workers)
    with suppress(KeyboardInterrupt):
        raise typer.Exit(asyncio.run(top(options, Console(), once=once)))


if __name__ == "__main__":
    app()
