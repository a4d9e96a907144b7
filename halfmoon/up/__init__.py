"""`halfmoon up`: the whole system on one host. Which processes there are, how they start, change and stop.

Read in this order: config/system_config, run, service_specs, supervisor, reserved_ports, gpus, from_plan, fleet.
"""
