"""KV beyond the device's memory: it lies in host memory, and each step fetches it layer by layer (KVPR).

Read in this order: tiers, plan, passes, staging, link, attention, runner, recompute, choice.
"""
