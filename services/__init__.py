"""Programs: one package a service, each run as `python -m services.NAME`."""

import os

# gRPC reads this when it is loaded. uvloop forks to start a program, and what gRPC does in the child of a fork, to go
# on there, crashes one in six of the planner's jobs on a busy host. Nothing goes on in a fork here: programs are new.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Its lines about connections (goaways, failed handshakes) are plain text, and the logs are JSON.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
