"""What workers and stores share: `python -m benchmarks.pool`."""
