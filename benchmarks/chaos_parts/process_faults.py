"""Faults of processes: killed, stopped, told to end or to drain, one or all of a role, once or again and again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from typing import Any

import psutil

from benchmarks.chaos_parts.fault import WORKERS, Act, Fault
from benchmarks.chaos_parts.system import System

_STOPPED_S = 15.0
_NUM_KILLS = 10
_ENDED_S = 60.0


def send(role: str, number: signal.Signals, how_many: int = 1) -> Act:
    """Sends a signal to the oldest processes of a role."""

    async def act(system: System, here: Any) -> str:
        for process in system.processes()[role][:how_many]:
            process.send_signal(number)
        return ""

    return act


def stop_for(role: str) -> Act:
    """SIGSTOP, and SIGCONT later. "up" is `halfmoon up` itself."""

    async def act(system: System, here: Any) -> str:
        pid = system.process.pid if role == "up" else system.processes()[role][0].pid
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(_STOPPED_S)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        return ""

    return act


async def kill_repeatedly(system: System, here: Any) -> str:
    """Kills whatever decode worker is the newest, as soon as all are members again."""
    waits = []
    for _ in range(_NUM_KILLS):
        system.processes()["decode"][-1].kill()
        began_s = time.monotonic()
        await asyncio.sleep(1.0)
        while len(await system.workers()) < system.num_workers and time.monotonic() - began_s < 90:
            await asyncio.sleep(0.1)
        waits.append(time.monotonic() - began_s)
    return "back each time after " + " ".join(f"{wait:.1f}" for wait in waits) + " s"


def end_up(number: signal.Signals) -> Act:
    """Ends `halfmoon up` and counts what it leaves behind."""

    async def act(system: System, here: Any) -> str:
        children = psutil.Process(system.process.pid).children(recursive=True)
        shared = set(os.listdir("/dev/shm"))
        began_s = time.monotonic()
        system.process.send_signal(number)
        await system.process.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, _ENDED_S)
        left = [name for name in os.listdir("/dev/shm") if name in shared and "halfmoon" in name]
        return (
            f"all processes over after {time.monotonic() - began_s:.1f} s, {len(alive)} left, "
            f"{len(left)} files in /dev/shm"
        )

    return act


def _each(role: str, what: str, act: Act, **options: Any) -> Fault:
    return Fault(name=f"{what} {role}", act=act, **options)


def process_faults() -> list[Fault]:
    """All faults of processes, in the table's order."""
    early: dict[str, Any] = {"after_s": 2.0}
    two_gateways: dict[str, Any] = {"arguments": (*WORKERS, "--gateways", "2"), "repeats": True}
    one, kill = "a worker of", signal.SIGKILL
    return [
        _each("decode", f"kill -9 {one}", send("decode", kill)),
        _each("decode", "kill -9 both workers of", send("decode", kill, 2)),
        _each("prefill", f"kill -9 {one}", send("prefill", kill), **early),
        _each("prefill", "kill -9 both workers of", send("prefill", kill, 2), **early),
        _each("kvstore", "kill -9", send("kvstore", kill)),
        _each("planner", "kill -9", send("planner", kill)),
        _each("gateway", "kill -9 the only", send("gateway", kill), repeats=True),
        Fault(name="kill -9 the only gateway, clients do not repeat", act=send("gateway", kill)),
        _each("decode", f"SIGSTOP 15 s {one}", stop_for("decode")),
        _each("prefill", f"SIGSTOP 15 s {one}", stop_for("prefill"), **early),
        _each("kvstore", "SIGSTOP 15 s", stop_for("kvstore")),
        _each("planner", "SIGSTOP 15 s", stop_for("planner")),
        _each("gateway", "SIGSTOP 15 s the only", stop_for("gateway")),
        _each("up", "SIGSTOP 15 s halfmoon", stop_for("up")),
        _each("decode", f"SIGTERM {one}", send("decode", signal.SIGTERM)),
        _each("prefill", f"SIGTERM {one}", send("prefill", signal.SIGTERM), **early),
        _each("decode", f"SIGUSR1 (drain) {one}", send("decode", signal.SIGUSR1)),
        _each("prefill", f"SIGUSR1 (drain) {one}", send("prefill", signal.SIGUSR1), **early),
        Fault(name="one decode place killed ten times", act=kill_repeatedly),
        _each("two gateways", "kill -9 one of", send("gateway", kill), **two_gateways),
        Fault(name="SIGINT of halfmoon up", act=end_up(signal.SIGINT), ends_system=True),
        Fault(name="kill -9 of halfmoon up", act=end_up(kill), ends_system=True),
    ]
