"""KV and weights beyond the device's memory: they lie in host memory, and each step fetches them layer by layer (KVPR).

Read in this order: tiers, plan, passes, staging, link, attention, runner, recompute, choice, weights.
"""
