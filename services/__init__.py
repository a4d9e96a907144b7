"""Programs: one package a service, each run as `python -m services.NAME`."""
