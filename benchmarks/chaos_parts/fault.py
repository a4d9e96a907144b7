"""What a fault is: something done to a running system in the middle of its load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.chaos_parts.system import System

WORKERS = (
    *("--prefill", "2", "--decode", "2", "--dtype", "float32"),
    *("--kv-memory", "256MiB", "--dram-bytes", "128MiB"),  # enough for the load
)
VLLM_STARTS_S = 900.0
SIMULATED = ("--engine", "sim", "--sim-profile", "llama2-70b-8xa800")


@dataclass(slots=True)
class Surroundings:
    """What a system is started in. `here` is what the fault's own set-up hands to its action, such as a server."""

    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    here: Any = None


Act = Callable[[System, Any], Awaitable[str]]
Around = Callable[[Path], AbstractAsyncContextManager[Surroundings]]


@asynccontextmanager
async def nothing_around(state_dir: Path) -> AsyncIterator[Surroundings]:
    """No set-up."""
    yield Surroundings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the table.

    `act` does it and returns a note. `around` prepares what the system is started in. `ends_system`: the next fault
    gets a new one. `whole_within_s`: how long that may take to start, and to be whole again. `missing` says why it
    cannot be tried on this machine. `is_inside_namespace`: it needs a network namespace of its own, which takes root.
    """

    name: str
    act: Act
    after_s: float = 5.0  # from the load's start
    arguments: tuple[str, ...] = WORKERS
    num_workers: int = 4
    whole_within_s: float = 240.0
    around: Around = nothing_around
    missing: Callable[[], str | None] = lambda: None
    repeats: bool = False  # whether clients repeat their requests
    ends_system: bool = False
    is_inside_namespace: bool = False


def over_vllm(fault: Fault, python: Path) -> Fault:
    """The same fault with workers over the vLLM of this interpreter, unless its workers are simulated."""
    if "sim" in fault.arguments:
        return fault
    return replace(fault, arguments=(*fault.arguments, *vllm_arguments(python)), whole_within_s=VLLM_STARTS_S)


def vllm_arguments(python: Path) -> tuple[str, ...]:
    """Options of `halfmoon up` for workers over the vLLM of this interpreter."""
    engine = ("--engine", "vllm", "--engine-python", str(python), "--engine-args=--enforce-eager")
    context = ("--set", "workers.all.max_context_tokens=2048")  # vLLM wants memory for one that long
    return (*engine, *context)
