"""`halfmoon profile` measures the workers of a running system; `halfmoon profiles` lists what was measured."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from rich.console import Console
from rich.table import Table

from halfmoon.cli.gateway_options import GATEWAY_HELP, gateway_url
from halfmoon.cli.output_file import check_can_write
from halfmoon.cli.profile_store import LedgerOptions, all_profiles, keep_profile
from halfmoon.cli.terminal.option_groups import with_option_groups
from halfmoon.cli.terminal.progress_bars import stage_bars
from halfmoon.errors import HalfmoonError
from halfmoon.profiling.profiler import ProfileOptions, profiled
from halfmoon.profiling.sweep import SweepLimits
from halfmoon.rpc.credentials.operator_token import TOKEN_HELP, client_token
from halfmoon.rpc.credentials.sources import client_credential
from halfmoon.rpc.tls.http_context import CA_HELP, CA_VARIABLE
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile, read_profile, write_profile

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_INTERRUPTED = 130
_LIMITS = SweepLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTarget:
    """The profile's name and the workers that are measured."""

    PANEL: ClassVar[str] = "What to measure"
    name: Annotated[str, typer.Option(help="Name of the profile in the ledger; replaces a profile of that name.")]
    worker: Annotated[
        list[str] | None, typer.Option(help="Id of a worker; repeat it for more. Default: one of each role.")
    ] = None
    beside: Annotated[
        bool | None,
        typer.Option(
            "--beside/--no-beside",
            help="Measures how two workers of a host slow each other down. Default: only if both compute on its CPUs.",
        ),
    ] = None
    transports: Annotated[
        str, typer.Option(help="Transports of KV, best first, separated by commas: shm, nixl, grpc.")
    ] = "shm,grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """The gateway and its secrets."""

    PANEL: ClassVar[str] = "Gateway"
    gateway: Annotated[str | None, typer.Option(help=GATEWAY_HELP)] = None
    token: Annotated[str | None, typer.Option(envvar="HALFMOON_OPERATOR_TOKEN", help=TOKEN_HELP)] = None
    ca: Annotated[Path | None, typer.Option(envvar=CA_VARIABLE, help=CA_HELP)] = None
    api_key: Annotated[str | None, typer.Option(help="API key, if the gateway requires one.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """The range of measurements."""

    PANEL: ClassVar[str] = "Measurements"
    longest_prompt: Annotated[int, typer.Option(min=64, help="Longest prompt in tokens.")] = _LIMITS.longest_prompt
    largest_batch: Annotated[int, typer.Option(min=1, help="Largest decode batch in sequences.")] = (
        _LIMITS.largest_batch
    )
    longest_context: Annotated[int, typer.Option(min=64, help="Longest context of each sequence in tokens.")] = (
        _LIMITS.longest_context
    )
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each prompt and transfer; their mean counts.")] = (
        _LIMITS.repeats
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """The file to write."""

    PANEL: ClassVar[str] = "Output"
    output: Annotated[Path | None, typer.Option(help="File that also gets the profile. Default: NAME.json.")] = None


@with_option_groups
def profile(
    target: ProfileTarget, access: AccessOptions, sweep: SweepOptions, output: OutputOptions, ledger: LedgerOptions
) -> None:
    """Measures idle workers over their RPCs, for `simulate`, `plan` and `up --engine sim`; Ctrl-C leaves nothing."""
    name = target.name
    if not _NAME.fullmatch(name):
        raise typer.BadParameter("a name is letters, digits, '.', '_' and '-'")
    path = output.output or Path(f"{name}.json")
    terminal = Console(stderr=True)
    try:
        check_can_write(path, "the profile")
        measured = _measured(_profile_options(target, access, sweep, ledger.state_dir), terminal)
        write_profile(path, measured)
        keep_profile(name, measured, ledger.state_dir, ledger.ledger_url)
    except HalfmoonError as error:
        terminal.out(f"halfmoon: {error}", style="red", highlight=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        terminal.print("halfmoon: interrupted; nothing is left on the workers, and nothing is written")
        raise typer.Exit(_INTERRUPTED) from None
    _print(name, path, measured)


def _profile_options(
    target: ProfileTarget, access: AccessOptions, sweep: SweepOptions, state_dir: Path
) -> ProfileOptions:
    limits = SweepLimits(sweep.longest_prompt, sweep.largest_batch, sweep.longest_context, sweep.repeats)
    transports = tuple(text.strip() for text in target.transports.split(",") if text.strip())
    workers = tuple(target.worker or ())
    url = gateway_url(access.gateway, state_dir)
    credential = partial(client_credential, "profiler", state_dir=state_dir)
    token = client_token(access.token, url, state_dir)
    return ProfileOptions(url, token, access.api_key, workers, transports, limits, target.beside, credential, access.ca)


@with_option_groups
def profiles(ledger: LedgerOptions) -> None:
    """Lists the profiles in the ledger, which other commands take as ledger:NAME."""
    try:
        known = all_profiles(ledger.state_dir, ledger.ledger_url)
    except HalfmoonError as error:
        raise typer.BadParameter(error.message) from error
    if not known:
        Console().print("no profile has been measured yet: make one with `halfmoon profile`")
        return
    table = Table("profile", "measured", "model", "device", "TP x PP", "error prefill / step")
    for stored in known:
        profile = read_profile(Path(f"ledger:{stored.name}"), dict(stored.profile))
        parallelism = f"{profile.tensor_parallel} x {profile.pipeline_parallel}"
        measured_at = stored.measured_at.strftime("%Y-%m-%d %H:%M")
        table.add_row(stored.name, measured_at, profile.model_name, profile.device, parallelism, _errors(profile))
    Console().print(table)


def _measured(options: ProfileOptions, terminal: Console) -> MeasuredProfile:
    with stage_bars(terminal) as advance:
        return asyncio.run(profiled(options, advance))


def _errors(profile: MeasuredProfile) -> str:
    return " / ".join("–" if error is None else f"{error:.1%}" for error in profile.whole.error)


def _print(name: str, path: Path, profile: MeasuredProfile) -> None:
    terminal = Console()
    held_out = [sum(point.is_held_out for point in points) for points in (profile.prefill, profile.step)]
    terminal.print(
        f"{len(profile.prefill)} kinds of prompts, {len(profile.step)} of batches, {len(profile.transfer)} of "
        f"transfers; median error at {held_out[0]} held-out prompts and {held_out[1]} held-out batches: "
        f"{_errors(profile)}",
        highlight=False,
    )
    if profile.link is not None:
        bytes_per_s, latency_s = profile.link
        transport = profile.transfer[0].transport
        terminal.print(
            f"KV over {transport}: {bytes_per_s / 1e6:.0f} MB/s after {1000 * latency_s:.1f} ms", highlight=False
        )
    for pair in profile.beside:
        terminal.print(f"{pair.work} next to {pair.neighbour}: {pair.slowdown:.2f} times as long", highlight=False)
    request_ms, answer_ms, token_ms = (
        1000 * time_s for time_s in (profile.request_s, profile.answer_s, profile.token_s)
    )
    terminal.print(
        f"overhead of a request: {request_ms:.1f} ms before its prompt, {answer_ms:.1f} ms after it; "
        f"{token_ms:.1f} ms for each step of its tokens",
        highlight=False,
    )
    terminal.out(f"profile: {path}, and ledger:{name}", highlight=False)
