"""What `halfmoon up` prints: where the system answers, what goes wrong, and bars while weights are loaded."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import Counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from halfmoon.rpc.addresses.loopback import is_loopback_url
from halfmoon.rpc.credentials.operator_token import token_file
from halfmoon.up.fleet.fleet_diff import WorkerChange
from halfmoon.up.specs.service_specs import http_url
from halfmoon.up.specs.simulated import ignored_settings
from halfmoon.up.supervision.child import Child
from halfmoon.up.this_host.cores import threads_text
from halfmoon.up.up_options import UpOptions, simulated_workers


def print_ready(
    options: UpOptions, terminal: Console, url: str, name: str, others: list[Child], *, shows_token_file: bool
) -> None:
    """Prints the workers' threads, where the system answers, and where the operator token is, if wanted."""
    threads = threads_text({child.spec.name: child.spec.environment for child in others})
    if threads:
        terminal.out(threads, highlight=False)
    if any(child.spec.name == "console" for child in others):
        terminal.out(f"console: {http_url(options, options.console_port)}", highlight=False)
    if shows_token_file:
        where = f"operator token of console and control API: in {token_file(options.state_dir)}"
        terminal.out(where, highlight=False)
    terminal.out(f"logs: {options.state_dir / 'logs'}   stop: Ctrl-C", highlight=False)
    if options.cluster_port:
        own = (f"{options.host_address}:{options.cluster_port + number}" for number in range(options.num_gateways))
        gateways = ",".join([*own, *options.other_gateways])
        command = f"halfmoon join {shlex.quote(gateways)} --role decode --secrets DIR"
        terminal.out(f"workers of other hosts: {command}", highlight=False)
    terminal.out(f"halfmoon is ready: {url}", highlight=False, style="bold")
    terminal.out(_curl(options, url, name), highlight=False)


def _curl(options: UpOptions, url: str, name: str) -> str:
    trust = ""
    if options.http_tls_cert is not None:  # a certificate rarely has 127.0.0.1 in it
        trust = " -k" if is_loopback_url(url) else f" --cacert {shlex.quote(str(options.http_tls_cert))}"
    key = " -H 'Authorization: Bearer KEY'" if options.console_key else ""
    question = {"role": "user", "content": "What is a half moon?"}
    body = json.dumps({"model": name, "stream": True, "messages": [question]}, ensure_ascii=False)
    headers = f"-H 'Content-Type: application/json'{key}"
    return f"curl -N{trust} {shlex.quote(f'{url}/v1/chat/completions')} {headers} -d {shlex.quote(body)}"


def print_ignored(options: UpOptions, terminal: Console) -> None:
    """Prints one line on what simulated workers do not take from the settings or the plan."""
    simulation = options.simulation
    assert simulation is not None
    ignored = ignored_settings([arguments for _, arguments in simulated_workers(options)])
    if not ignored and not options.is_planned:
        return
    subject = f"simulated workers ignore {', '.join(ignored)}; their" if ignored else "simulated workers'"
    instead = f" (--sim-profile {simulation.profile}), not the plan's" if options.is_planned else ""
    text = f"halfmoon: {subject} latency and memory are those of the profile{instead}"
    terminal.out(text, style="yellow", highlight=False)


def print_restart(terminal: Console, why: str, wait_s: float) -> None:
    """Prints why a service ended, and when it is started again."""
    when = f" in {wait_s:g} s" if wait_s else ""
    terminal.out(f"halfmoon: {why}\nStarting it again{when}.", style="yellow", highlight=False)


def print_trouble(terminal: Console, sentence: str) -> None:
    """Prints what does not end the system."""
    terminal.out(f"halfmoon: {sentence}", style="yellow", highlight=False)


def print_stopping(options: UpOptions, terminal: Console) -> None:
    """Prints that the system ends, and how long that may take."""
    text = "halfmoon is stopping"
    if options.drain_s:
        text += f": running answers have {options.drain_s:g} s to finish; Ctrl-C again ends it at once"
    terminal.print(text, highlight=False, soft_wrap=True)


def print_change(terminal: Console, change: asyncio.Task[WorkerChange]) -> None:
    """Prints which workers serve after a change, or why it failed."""
    if change.cancelled():
        return
    error = change.exception()
    text = f"changing the workers failed, the old ones keep serving: {error}" if error else _now(change.result())
    terminal.out(f"halfmoon: {text}", style="red" if error else None, highlight=False)


def _now(change: WorkerChange) -> str:
    counts = Counter(role for role, _ in change.then)
    workers = ", ".join(f"{count} {role}" for role, count in sorted(counts.items()))
    return f"now {workers} workers serve, as planned"


def progress_bars(terminal: Console) -> Progress:
    """Returns bars that go when they are done; none are shown where the terminal is a file."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    return Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)


def print_event(terminal: Console, service: str, event: dict[str, Any]) -> None:
    """Prints a child's log event about ranks that it waits for, or about its end for good after a drain."""
    if event.get("event") == "worker.drained" and not event.get("returns"):  # else `print_restart` says it
        print_trouble(terminal, f"{service} has drained; it is not started again")
    if event.get("event") == "ranks.awaited":
        num, address = event["missing"], event["address"]
        text = f"{service} awaits {num} ranks: halfmoon join {address} --ranks {num} --secrets DIR, on another host"
        print_trouble(terminal, text)


class UnreachedGateways:
    """Prints why workers cannot join their gateways, each reason once until it changes."""

    def __init__(self, terminal: Console) -> None:
        self._terminal = terminal
        self._printed: dict[tuple[str, str], str] = {}

    def on_event(self, service: str, event: dict[str, Any]) -> None:
        """Reads a child's log event."""
        where = service, str(event.get("gateway") or event.get("gateway_id"))
        if event.get("event") == "registration.welcome":
            self._printed.clear()
        elif event.get("event") in ("registration.lost", "registration.refused"):
            reason = str(event.get("reason"))
            if self._printed.get(where) != reason:
                self._printed[where] = reason
                print_trouble(self._terminal, f"{service} has not joined {where[1]}: {reason}")


class WeightsProgress:
    """Owns the progress bars, one for each service that loads weights."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def on_event(self, service: str, event: dict[str, Any]) -> None:
        """Advances a bar on a child's log event."""
        if event.get("event") == "weights.progress":
            self._advance(f"{service}: weights", int(event["done_bytes"]), int(event["total_bytes"]))

    def _advance(self, title: str, done: int, total: int) -> None:
        if title not in self._tasks:
            self._tasks[title] = self._bars.add_task(title)
        self._bars.update(self._tasks[title], completed=done, total=total)
