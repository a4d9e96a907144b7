"""A request on the cluster: rejected early, or placed and relayed until its outputs are whole.

Imports `telemetry`, `openai` and `cluster`.
"""
