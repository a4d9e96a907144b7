"""Latency sources."""
