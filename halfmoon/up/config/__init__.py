"""The configuration of `halfmoon up`: reads the file and flags, and converts them for the services.

Read in this order: system_config, read, options, service_environment, human_bytes, settings_table.
"""
