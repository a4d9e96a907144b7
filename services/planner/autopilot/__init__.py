"""The autopilot, live: observes the cluster through the gateways' control API, decides once a second, acts if told.

`halfmoon.policy.scaling` decides, which the simulator runs, too. Read in this order: gateways, actuators,
decision_log, outlook_process, slow_loop, live_autopilot.
"""
