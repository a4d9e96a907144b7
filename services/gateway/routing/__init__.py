"""A request on the cluster: rejected early, or placed and relayed until its outputs are whole.

Its outputs are computed by attempts, or adopted from a gateway that died.

Imports `telemetry`, `openai` and `cluster`.
"""
