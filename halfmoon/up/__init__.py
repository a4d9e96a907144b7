"""`halfmoon up`: starts, changes and stops the processes of the whole system, on one host or several.

Read in this order: run, until_stopped, up_options, specs/service_specs, supervision/child,
supervision/service_process, supervision/supervisor, supervision/restarts, hosts, join, this_host/gpus, fleet/fleet,
specs/stores, service.

`config/` and `on_ray/` have orders of their own.
"""
