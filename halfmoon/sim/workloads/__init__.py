"""Workloads: traces from files, and requests drawn from an arrival process and length distributions."""
