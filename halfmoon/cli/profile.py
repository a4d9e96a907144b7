"""`halfmoon profile`: measures the workers of a running system; `halfmoon profiles`: what was measured."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from halfmoon.cli.profile_store import DEFAULT_STATE_DIR, LedgerUrl, StateDir, all_profiles, keep_profile
from halfmoon.cli.progress_bars import stage_bars
from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.profiling.profiler import ProfileOptions, profiled
from halfmoon.profiling.sweep import SweepLimits
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile, read_profile, write_profile

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_INTERRUPTED = 130
_LIMITS = SweepLimits()


def profile(
    name: Annotated[str, typer.Option(help="in the ledger, where it replaces the one of that name")],
    gateway: Annotated[str, typer.Option(help="URL of the system's gateway")] = "http://127.0.0.1:8000",
    worker: Annotated[
        list[str] | None, typer.Option(help="a worker's id; repeat it for more; default: one of each role")
    ] = None,
    beside: Annotated[
        bool | None,
        typer.Option(
            "--beside/--no-beside",
            help="measure how two workers of a host slow each other down; default: where both are on its CPUs",
        ),
    ] = None,
    transports: Annotated[str, typer.Option(help="of KV, best first, by commas: shm, nixl, grpc")] = "shm,grpc",
    longest_prompt: Annotated[int, typer.Option(min=64, help="tokens")] = _LIMITS.longest_prompt,
    largest_batch: Annotated[int, typer.Option(min=1, help="sequences")] = _LIMITS.largest_batch,
    longest_context: Annotated[int, typer.Option(min=64, help="of each sequence of a batch, tokens")] = (
        _LIMITS.longest_context
    ),
    repeats: Annotated[int, typer.Option(min=1, help="of each prompt and transfer; the mean counts")] = (
        _LIMITS.repeats
    ),
    output: Annotated[Path | None, typer.Option(help="file besides; default: NAME.json")] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    ledger_url: LedgerUrl = None,
    token: Annotated[
        str | None, typer.Option(envvar="HALFMOON_OPERATOR_TOKEN", help="the operator token, where there is one")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="where the gateway wants one")] = None,
) -> None:
    """Measures idle workers over their RPCs, for `simulate`, `plan` and `up --engine sim`; Ctrl-C leaves nothing."""
    if not _NAME.fullmatch(name):
        raise typer.BadParameter("a name is letters, digits, '.', '_' and '-'")
    limits = SweepLimits(longest_prompt, largest_batch, longest_context, repeats)
    offered = tuple(one.strip() for one in transports.split(",") if one.strip())
    options = ProfileOptions(gateway.rstrip("/"), token, api_key, tuple(worker or ()), offered, limits, beside)
    path = output or Path(f"{name}.json")
    terminal = Console(stderr=True)
    try:
        if not path.parent.is_dir():
            raise InvalidRequest(f"the profile cannot be written: {path.parent} is no directory", param="output")
        found = _measured(options, terminal)
        write_profile(path, found)
        keep_profile(name, found, state_dir, ledger_url)
    except HalfmoonError as error:
        terminal.print(f"halfmoon: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        terminal.print("halfmoon: interrupted; nothing is left on the workers, and nothing is written")
        raise typer.Exit(_INTERRUPTED) from None
    _print(name, path, found)


def profiles(state_dir: StateDir = DEFAULT_STATE_DIR, ledger_url: LedgerUrl = None) -> None:
    """Lists the profiles of the ledger, which other commands take as ledger:NAME."""
    try:
        known = all_profiles(state_dir, ledger_url)
    except HalfmoonError as error:
        raise typer.BadParameter(error.message) from error
    if not known:
        Console().print("no profile was measured: make one with `halfmoon profile`")
        return
    table = Table("profile", "measured", "model", "device", "TP x PP", "error prefill / step")
    for one in known:
        found = read_profile(Path(f"ledger:{one.name}"), dict(one.profile))
        parallelism = f"{found.tensor_parallel} x {found.pipeline_parallel}"
        measured = one.measured_at.strftime("%Y-%m-%d %H:%M")
        table.add_row(one.name, measured, found.model_name, found.device, parallelism, _errors(found))
    Console().print(table)


def _measured(options: ProfileOptions, terminal: Console) -> MeasuredProfile:
    with stage_bars(terminal) as advance:
        return asyncio.run(profiled(options, advance))


def _errors(found: MeasuredProfile) -> str:
    error = found.whole.error
    return " / ".join("–" if one is None else f"{one:.1%}" for one in error)


def _print(name: str, path: Path, found: MeasuredProfile) -> None:
    terminal = Console()
    held_out = [sum(one.is_held_out for one in some) for some in (found.prefill, found.step)]
    terminal.print(
        f"{len(found.prefill)} kinds of prompts, {len(found.step)} of batches, {len(found.transfer)} of transfers; "
        f"median error at {held_out[0]} prompts and {held_out[1]} batches that were held out: {_errors(found)}",
        highlight=False,
    )
    if found.link is not None:
        bytes_per_s, latency_s = found.link
        transport = found.transfer[0].transport
        told = f"{bytes_per_s / 1e6:.0f} MB/s after {1000 * latency_s:.1f} ms"
        terminal.print(f"KV by {transport}: {told}", highlight=False)
    for one in found.beside:
        terminal.print(f"{one.work} beside {one.neighbour}: {one.slowdown:.2f} times as long", highlight=False)
    beside_s = found.request_s, found.answer_s, found.token_s
    told = "a request beside its work: {:.1f} ms before, {:.1f} ms after its prompt; {:.1f} ms each step of its tokens"
    terminal.print(told.format(*(1000 * one for one in beside_s)), highlight=False)
    terminal.print(f"written: {path}, and ledger:{name}", soft_wrap=True, highlight=False)
