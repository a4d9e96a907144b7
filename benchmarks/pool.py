"""One pool of KV: measurements of holders that workers share.

python -m benchmarks.pool stores TRACE.jsonl --stores 4 --blocks 10000
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import pool_stores


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one measurement and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    stores = commands.add_parser("stores", help="hits of several stores beside those of one as large as all of them")
    stores.add_argument("trace", type=Path)
    stores.add_argument("--stores", type=int, default=4)
    stores.add_argument("--blocks", type=int, default=10_000, help="of all stores together")
    options = parser.parse_args(arguments)
    pool_stores.show(options.trace, options.stores, options.blocks)


if __name__ == "__main__":
    main()
