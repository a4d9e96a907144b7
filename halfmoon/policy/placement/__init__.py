"""Placement: which prefill and which decode worker serve a request, and why."""
