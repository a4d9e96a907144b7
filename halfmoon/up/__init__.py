"""`halfmoon up`: starts, changes and stops the processes of the whole system on one host.

Read in this order: run, up_options, service_specs, certificates, supervision/child, supervision/supervisor,
supervision/restarts, supervision/log_files, gpus, fleet/fleet, fleet/from_plan, stores, simulated, service.

`config/` has an order of its own.
"""
