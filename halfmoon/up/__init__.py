"""`halfmoon up`: starts, changes and stops the processes of the whole system on one host.

Read in this order: run, up_options, service_specs, certificates, child, supervisor, restarts, log_files, gpus,
from_plan, fleet, stores, simulated, service.

`config/` has an order of its own.
"""
