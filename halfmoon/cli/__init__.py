"""The `halfmoon` command: one file per subcommand.

Read in this order: app, up/up_flags, up/flags, up/config, credentials, gateway_options, planning/plan, simulate,
replay, bench, profile, kv, top.
"""
