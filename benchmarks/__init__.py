"""Benchmarks: ratios measured side by side in one run. Nothing here asserts a time.

Shelves: engine, kv, prefixes, pool, gateway, planner, chaos_parts. Whole systems are at the top.
"""

import os

# gRPC reads these when it is loaded. Benchmarks start new programs, so gRPC need not prepare for a fork,
# and it need not report that they end before their parent's channels do.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
