"""The control API: status, console data, and the QoS classes and admission mode in force.

Imports `telemetry`, `openai`, `cluster` and `http`. No other shelf imports it.
"""
