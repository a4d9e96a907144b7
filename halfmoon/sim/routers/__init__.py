"""Routers of the simulated gateway: the shipped policies, and faster ones for estimates and single routes."""
