"""Forecast: what the requests inside will do, and so the latency that a new one can expect."""
