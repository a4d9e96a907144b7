"""Which roles the workers of a cluster should have, and how many workers there should be.

Read in this order: observation, observed_json, traffic_meter, pressure, rules, autopilot.
"""
