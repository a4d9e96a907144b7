"""Ratios, measured side by side in one run. Nothing here asserts a time."""

import os

# gRPC reads these when it is loaded. What a benchmark starts are new programs, so gRPC need not get ready for a fork,
# and that they end before their parent's channels do is no news.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
