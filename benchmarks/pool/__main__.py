"""One pool of KV: measurements of what workers and stores share.

python -m benchmarks.pool stores TRACE.jsonl --stores 4 --blocks 10000
python -m benchmarks.pool fetch --rates 50 200 1000 --repeat 7
python -m benchmarks.pool conditional --chats 4 --turns 10 --engine sim
python -m benchmarks.pool chats --chats 4 --mbps 50 200 1000
python -m benchmarks.pool failover --kills 8 --mbps 50 200 1000 --busy-s 1
python -m benchmarks.pool live TRACE.jsonl --requests 900 --speed 3
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pool import chats, conditional, failover, fetch, live, stores


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one measurement and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("stores", help="hits of several stores beside those of one as large as all of them")
    command.add_argument("trace", type=Path)
    command.add_argument("--stores", type=int, default=4)
    command.add_argument("--blocks", type=int, default=10_000, help="of all stores together")
    command.set_defaults(run=lambda given: stores.show(given.trace, given.stores, given.blocks))
    fetch.add_arguments(commands.add_parser("fetch", help="a prefix that only another worker has"))
    conditional.add_arguments(commands.add_parser("conditional", help="chats that decode workers may compute"))
    chats.add_arguments(commands.add_parser("chats", help="bytes handed over in chats of several turns"))
    failover.add_arguments(commands.add_parser("failover", help="streams whose decode worker is killed"))
    live.add_arguments(commands.add_parser("live", help="a trace on simulated workers with a pool, by placement"))
    options = parser.parse_args(arguments)
    done = options.run(options)
    if asyncio.iscoroutine(done):
        asyncio.run(done)


if __name__ == "__main__":
    main()
