"""Sections of the configuration that services and `halfmoon up` share, each with defaults and descriptions.

Read in this order: section, gateway, qos_classes, tenants, worker, quantization, stores, planner, simulation, security,
observability, state.
"""
