"""Faults under load, one after another: what is lost, what changes, how long the pauses are, and when all is back.

    python -m benchmarks.chaos                         every fault that this machine allows
    python -m benchmarks.chaos --list                  their names
    python -m benchmarks.chaos --only 'kill -9' disk   those whose names contain one of these
    python -m benchmarks.chaos --vllm PYTHON --only 'kill -9 a worker'   over vLLM, which PYTHON has
    python -m benchmarks.chaos --overload 5            ten times the load that fits, for five minutes (simulator)
    python -m benchmarks.chaos --soak 30               mixed traffic, aborts and a kill a minute, for thirty minutes

Each system is a `halfmoon up` of its own in a temporary state directory. Texts are compared with those of an
undisturbed run. --markdown and --json write the table; rows of faults not run now stay as the JSON file has them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.chaos_parts.disk_faults import disk_faults
from benchmarks.chaos_parts.elastic_faults import elastic_faults
from benchmarks.chaos_parts.fault import Fault, over_vllm
from benchmarks.chaos_parts.load import Load
from benchmarks.chaos_parts.network_faults import network_faults
from benchmarks.chaos_parts.outage_faults import outage_faults
from benchmarks.chaos_parts.overload import overload, report
from benchmarks.chaos_parts.process_faults import process_faults
from benchmarks.chaos_parts.samples import trend_table, trends, write_csv
from benchmarks.chaos_parts.soak import soak
from benchmarks.chaos_parts.soak_plot import write_soak_plot
from benchmarks.chaos_parts.system import System, running_system
from benchmarks.chaos_parts.table import markdown, merged, read_json, write_json
from benchmarks.chaos_parts.trial import Outcome, reference_texts, try_fault

_UNDISTURBED = "none"


async def _nothing(system: System, here: object) -> str:
    return ""


def all_faults() -> list[Fault]:
    """Every fault, those first that share one system."""
    none = Fault(name=_UNDISTURBED, act=_nothing)
    return [none, *process_faults(), *elastic_faults(), *outage_faults(), *disk_faults(), *network_faults()]


async def run_faults(
    faults: Sequence[Fault], load: Load, folder: Path, keep: Callable[[Sequence[Outcome]], None]
) -> list[Outcome]:
    """Runs the faults in order; those with equal surroundings share a system until one ends it.

    `keep` is called with all outcomes so far after each of them.
    """
    outcomes: list[Outcome] = []
    texts: dict[bool, list[str]] = {}  # by whether workers are simulated
    system: System | None = None
    async with AsyncExitStack() as stack:
        for number, fault in enumerate(faults):
            problem = fault.missing()
            if problem is not None:
                outcomes.append(Outcome(fault.name, note=f"not tried: {problem}"))
                continue
            try:
                earlier = faults[number - 1] if number else None
                if system is None or earlier is None or not _shares(earlier, fault):
                    system = None
                    await stack.aclose()
                    state_dir = folder / f"state-{number}"
                    surroundings = await stack.enter_async_context(fault.around(state_dir))
                    arguments = (*fault.arguments, *surroundings.arguments)
                    running = running_system(
                        arguments, state_dir, fault.num_workers, surroundings.environment, fault.whole_within_s
                    )
                    system = await stack.enter_async_context(running)
                is_simulated = "sim" in fault.arguments
                if is_simulated not in texts:
                    texts[is_simulated] = await reference_texts(system, load)
                print(f"{fault.name} …", end=" ", flush=True, file=sys.stderr)
                outcome = await try_fault(system, fault, load, surroundings.here, texts[is_simulated])
            except RuntimeError as error:
                outcome = Outcome(fault.name, note=f"not tried: {error}")
            print(f"lost {outcome.lost}, changed {outcome.changed}. {outcome.note}", file=sys.stderr)
            outcomes.append(outcome)
            keep(outcomes)
            if fault.ends_system or outcome.leaked_blocks is None:
                system = None
    return outcomes


def _shares(earlier: Fault, fault: Fault) -> bool:
    same = earlier.arguments == fault.arguments and earlier.around is fault.around
    return same and not earlier.ends_system


def run_in_namespace(faults: Sequence[Fault], options: argparse.Namespace, folder: Path) -> list[Outcome]:
    """Runs this program in a network namespace of its own for these faults."""
    out = folder / "namespace.json"
    names = [part for fault in faults for part in ("--exactly", fault.name)]
    command = [sys.executable, "-m", "benchmarks.chaos", "--here", "--json", str(out), *names]
    command += ["--unsalted"] if options.unsalted else []
    command += ["--vllm", str(options.vllm)] if options.vllm else []
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    subprocess.run([*inside, *command], check=True, stdout=sys.stderr)
    return read_json(out)


def _chosen(options: argparse.Namespace) -> list[Fault]:
    names = options.exactly or []
    return [
        over_vllm(fault, options.vllm.absolute()) if options.vllm else fault
        for fault in all_faults()
        if (fault.name in names if names else not options.only or any(part in fault.name for part in options.only))
    ]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names of the faults")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="faults whose names contain a part")
    parser.add_argument("--exactly", action="append", metavar="NAME", help="the fault of this name; repeat it for more")
    parser.add_argument("--unsalted", action="store_true", help="let prompts be found in caches")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="workers compute with this interpreter's vLLM")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # already in namespaces of its own
    parser.add_argument("--overload", type=float, metavar="MINUTES", help="minutes of overload, instead of faults")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="minutes of a soak, instead of faults")
    parser.add_argument("--csv", type=Path, help="write the soak's samples here")
    parser.add_argument("--png", type=Path, help="draw the soak's curves here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="halfmoon-chaos-") as name:
        if options.overload:
            print(report(asyncio.run(overload(options.overload, Path(name)))))
        elif options.soak and not options.here and os.geteuid() == 0 and shutil.which("unshare"):
            _with_own_shared_memory()
        elif options.soak:
            _soak(options, Path(name))
        else:
            _run(options, Path(name))


def _with_own_shared_memory() -> None:
    """Runs this command line again with a /dev/shm of its own, so that what others keep there does not count."""
    own = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
    subprocess.run([*own, sys.executable, "-m", "benchmarks.chaos", "--here", *sys.argv[1:]], check=True)


def _soak(options: argparse.Namespace, folder: Path) -> None:
    result = asyncio.run(soak(options.soak, folder))
    if options.csv:
        write_csv(options.csv, result.samples)
    if options.png:
        write_soak_plot(options.png, result.samples, f"{options.soak:g} minutes, {result.kills.total()} kills")
    print("".join(f"{count:6} {what}\n" for what, count in sorted(result.ended.items())))
    print(f"kills: {dict(result.kills)}\n\n{trend_table(trends(result.samples))}")


def _run(options: argparse.Namespace, folder: Path) -> None:
    faults = _chosen(options)
    if options.list:
        print("\n".join(fault.name for fault in faults))
        return
    load = Load(salt="" if options.unsalted else "new")
    inside = [fault for fault in faults if fault.is_inside_namespace and not options.here and not fault.missing()]
    plain = [fault for fault in faults if fault not in inside]
    earlier = read_json(options.json) if options.json and options.json.exists() else []

    def keep(outcomes: Sequence[Outcome]) -> None:
        rows = merged(earlier, outcomes, [fault.name for fault in all_faults()])
        if options.markdown:
            options.markdown.write_text(markdown(rows))
        if options.json:
            write_json(options.json, rows)

    outcomes = asyncio.run(run_faults(plain, load, folder, keep)) if plain else []
    outcomes += run_in_namespace(inside, options, folder) if inside else []
    keep(outcomes)
    print(markdown(outcomes))


if __name__ == "__main__":
    main()
